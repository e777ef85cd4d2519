"""Spans of modules: the native hooks and their pure-Python twin record the same, and change nothing of the training."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
from capture.fake_session import FakeSession
from hypothesis import HealthCheck, given, settings

from mappnb import _core
from mappnb.capture._module_spans import ModuleSpans
from mappnb.capture._pymodulehooks import NoHook, PyBoundary, PyModuleHook, PyModuleHooks
from mappnb.terms import Flag

torch = pytest.importorskip("torch")
from capture.module_trees import PASSINGS, TREES, Scale, attached, play  # noqa: E402


@pytest.fixture(params=["native", "pure Python"])
def session(request) -> FakeSession:
    return FakeSession(pure_python=request.param == "pure Python")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(spec=TREES, passings=PASSINGS)
def test_native_equals_twin_and_training_is_unchanged(spec, passings) -> None:
    plain, _ = play(spec, passings, None)
    native_training, native = play(spec, passings, False)
    twin_training, twin = play(spec, passings, True)
    assert native == twin
    assert native_training == twin_training == plain


# ------------------------------------------------------------------------------------------------------- boundaries
def test_the_kind_follows_the_recorder():
    native, twin = ModuleSpans(FakeSession(pure_python=False)), ModuleSpans(FakeSession(pure_python=True))
    assert isinstance(native._shared, _core.ModuleHooks) and isinstance(twin._shared, PyModuleHooks)


def test_order_of_a_backward_pass(session):
    model, spans = attached(session)
    model(torch.ones(3, requires_grad=True) * 1).sum().backward()
    spans.end_tails()
    assert [(e["layer"], e["phase"], e["depth"]) for e in session.events()] == [
        (0, "forward", 0),
        (1, "forward", 0),
        (1, "backward", 0),
        (0, "backward", 0),
    ]
    assert session.recorder.stats()["mismatched"] == 0 and not session.failures


def test_tails_end_with_the_pass(session):
    model, spans = attached(session)
    model(torch.ones(3)).sum().backward()
    assert {(e["layer"], e["phase"]) for e in session.events()} == {(0, "forward"), (1, "forward"), (1, "backward")}
    session.recorder.set_context(7, 1, 2, 3)
    spans.end_tails()
    spans.end_tails()
    (event,) = session.events()
    assert (event["layer"], event["phase"], event["peer"], event["seq"]) == (0, "backward", -1, -1)
    assert (event["step"], event["stage"], event["chunk"], event["microbatch"]) == (7, 1, 2, 3)


@pytest.mark.parametrize(("phase", "expected"), [("backward_input", "backward_input"), ("backward_weight", None)])
def test_backward_for_input_or_weights_only(session, phase, expected):
    model, spans = attached(session)
    y = model(torch.ones(3, requires_grad=True) * 1)
    spans.enter_backward(phase)
    y.sum().backward()
    assert [e["phase"] for e in session.events() if e["phase"] != "forward"] == ([expected] * 2 if expected else [])


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("hooked_before", [False, True])
def test_hooks_of_the_user_and_ours_on_one_tensor(session, leaf, hooked_before):
    """Inserting into the dictionary of a hooked tensor does what register_hook does, for leaves and results."""
    spans, calls = ModuleSpans(session), []
    x = torch.ones(2, requires_grad=True)
    x = x if leaf else x * 1
    if hooked_before:
        x.register_hook(lambda gradient: calls.append(("first", gradient.tolist())))
    boundary = spans.boundary(x)
    assert spans.boundary(x) is boundary
    gone = x.register_hook(lambda gradient: calls.append(("gone", gradient.tolist())))
    x.register_hook(lambda gradient: 3 * gradient)
    x.register_hook(lambda gradient: calls.append(("last", gradient.tolist())))
    gone.remove()
    assert list(x._backward_hooks.values()).index(boundary) == int(hooked_before)
    assert [key < 0 for key in x._backward_hooks] == [False] * hooked_before + [True, False, False]
    model = Scale()
    spans.attach(model, op="layer")
    model(x).sum().backward()
    assert calls == [("first", [2.0, 2.0])] * hooked_before + [("last", [6.0, 6.0])]
    assert [e["phase"] for e in session.events()] == ["forward", "backward"]


@pytest.mark.parametrize("leaf", [False, True])
def test_a_handle_of_the_user_outlives_its_tensor(session, leaf):
    """Dictionaries of ours may serve another tensor later: an old handle must not touch that one's hooks."""
    spans, calls = ModuleSpans(session), []
    for left in (True, False):
        x = torch.ones(2, requires_grad=True)
        x = x if leaf else x * 1
        spans.boundary(x)
        handle = x.register_hook(calls.append)
        if not left:
            handle.remove()
        del x
        other = torch.ones(2, requires_grad=True) * 1
        boundary = spans.boundary(other)
        handle.remove()
        assert list(other._backward_hooks.values()) == [boundary]
        other.sum().backward()
    assert not calls


def test_a_result_of_a_node_with_several(session):
    """The gradient of the second output begins the pass; hooks of others see their own gradient."""
    spans, seen = ModuleSpans(session), []
    model = Scale()
    spans.attach(model, op="layer")
    first, second = (torch.ones(2, 2, requires_grad=True) * 1).unbind()
    for name, part in (("first", first), ("second", second)):
        part.register_hook(lambda g, name=name: seen.append((name, g.tolist())))
    y = model(second)
    second.register_hook(lambda g: seen.append(("after", g.tolist())))
    (y.sum() + 7 * first.sum()).backward()
    assert sorted(seen) == [("after", [2.0, 2.0]), ("first", [7.0, 7.0]), ("second", [2.0, 2.0])]
    assert Counter(e["phase"] for e in session.events()) == {"forward": 1, "backward": 1}


def test_begin_and_end_of_others_are_called(session):
    """Who stands between the recorder and its core when the hooks are made sees all of their spans."""
    began, ended = [], []
    recorder = session.recorder
    begin, end = recorder.begin, recorder.end
    recorder.begin = lambda site: began.append(begin(site)) or began[-1]
    recorder.end = lambda token: ended.append(token) or end(token)
    model, spans = attached(session)
    recorder.begin, recorder.end = begin, end
    model(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert len(session.events()) == len(began) == 4 and ended == began
    spans.detach()
    model(torch.ones(3))
    assert len(began) == 4 and not session.failures


def test_recordings_nested_in_one_process():
    sessions = [FakeSession(pure_python=pure) for pure in (False, True, False, True)]
    model, kept = Scale(), [ModuleSpans(session) for session in sessions]
    for spans in kept:
        spans.attach(model, op="layer")
    x = torch.ones(2, requires_grad=True)
    model(x).sum().backward()
    assert len(x._backward_hooks) == len(sessions)
    for session in sessions:
        assert [e["phase"] for e in session.events()] == ["forward", "backward"]


def test_two_models_share_a_tensor_over_passes(session):
    """As in a GAN: what one model began with this tensor is not lost when another model's pass begins."""
    maker, critic = Scale(), Scale()
    spans = ModuleSpans(session)
    spans.attach(maker, op="layer", layer=0)
    spans.attach(critic, op="layer", layer=1)
    made = maker(torch.ones(2, requires_grad=True) * 1)
    spans.forget()
    critic(made).sum().backward()
    events = [(e["layer"], e["phase"], e["flags"]) for e in session.events()]
    assert events[2:] == [(1, "backward", 0), (0, "backward", 0)]
    assert session.recorder.stats()["mismatched"] == 0


# -------------------------------------------------------------------------------------------------------- lifetimes
def count(*kinds: type) -> int:
    gc.collect()
    return sum(type(thing) in kinds for thing in gc.get_objects())


def test_nothing_grows_over_many_passes(session):
    model, spans = attached(session, 3)
    buffer = torch.ones(4, requires_grad=True)
    boundaries = (PyBoundary, _core.Boundary)

    def passes(number: int) -> tuple[int, ...]:
        for _ in range(number):
            spans.forget()
            model(buffer).sum().backward()
            spans.end_tails()
            spans.forget()
            model(buffer)  # never followed by a backward pass
            session.recorder.drain()
        hooks = count(PyModuleHook, _core.ModuleHook)
        return count(*boundaries), hooks, sys.getrefcount(spans._shared), sys.getrefcount(session.fail.__func__)

    alive = passes(2)
    assert passes(200) == alive
    at = spans.boundary(buffer)
    assert len(buffer._backward_hooks) == 1 and at.num_passes <= 65
    for _ in range(100):
        spans.forget()
        model(buffer).sum().backward()
    spans.forget()
    spans.boundary(buffer)
    assert at.num_passes <= 64
    assert not session.failures


def test_finished_passes_leave_a_tensor_that_stays(session):
    model, spans = attached(session, 1)
    buffer = torch.ones(4, requires_grad=True)
    for _ in range(5):
        spans.forget()
        model(buffer).sum().backward()
    assert spans.boundary(buffer).num_passes == 1
    spans.forget()
    assert spans.boundary(buffer).num_passes == 0


def test_a_session_is_freed_after_detach(session):
    kind = session.recorder.native
    fresh = FakeSession(pure_python=not kind)
    model, spans = attached(fresh)
    y = model(torch.ones(2, requires_grad=True) * 1)
    alive = weakref.ref(fresh)
    spans.detach()
    del fresh, spans
    gc.collect()
    assert alive() is None  # although the model and its tensors live on
    y.sum().backward()


def test_a_session_is_freed_with_its_model(session):
    fresh = FakeSession(pure_python=not session.recorder.native)
    model, fresh.spans = attached(fresh)
    fresh.spans.attach(model, op="model", before=functools.partial(FakeSession.step_values, fresh))
    y = model(torch.ones(2, requires_grad=True) * 1)
    alive = weakref.ref(fresh)
    del fresh, model, y
    gc.collect()
    assert alive() is None


def test_copies_share_the_hook_and_pickles_have_none(session):
    model, spans = attached(session)
    hook = spans._hooks[0]
    assert copy.deepcopy(hook) is hook
    assert isinstance(pickle.loads(pickle.dumps(hook)), NoHook)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    copied(torch.ones(2, requires_grad=True)).sum().backward()
    assert Counter(e["phase"] for e in session.events()) == {"forward": 2, "backward": 2}
    pickled(torch.ones(2, requires_grad=True)).sum().backward()
    assert not session.events()


def test_a_hooked_tensor_is_saved_without_a_warning(session, tmp_path):
    model, spans = attached(session)
    x = torch.ones(2, requires_grad=True)
    model(x)
    torch.save(x, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), x)
    assert torch.equal(copy.deepcopy(x), x)


# ------------------------------------------------------------------------------------------------------------ errors
@pytest.mark.parametrize("where", ["before", "after"])
def test_our_errors_are_told_and_stay_away_from_the_training(session, where):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    spans, model = ModuleSpans(session), Scale()
    spans.attach(model, op="layer", **{where: broken})
    assert model(torch.ones(2)).tolist() == [2.0, 2.0]
    ((place, err),) = session.failures
    assert place == "module span" and str(err) == "ours"
    assert err.__traceback__ is not None
    model(torch.ones(2))
    assert len(session.failures) == 1  # the recorder is off


def test_an_interrupt_passes_through(session):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    spans, model = ModuleSpans(session), Scale()
    spans.attach(model, op="layer", before=interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2))
    assert not session.failures


def test_errors_in_boundaries_are_told(session):
    class Odd(torch.Tensor):
        @property
        def _backward_hooks(self):
            return [1]

    spans, model = ModuleSpans(session), Scale()
    spans.attach(model, op="layer")
    y = model(torch.ones(2).as_subclass(Odd).requires_grad_())
    assert y.tolist() == [2.0, 2.0]
    ((place, err),) = session.failures
    assert place == "module span" and "no dict" in str(err)


def test_a_node_of_another_kind_is_hooked_itself(session):
    class Node:
        def __init__(self) -> None:
            self.hooks: list[Any] = []

        def register_prehook(self, hook: Any) -> None:
            self.hooks.append(hook)

    class Odd(torch.Tensor):
        grad_fn = Node()
        requires_grad = True
        _backward_hooks = None

    spans = ModuleSpans(session)
    tensor = torch.ones(2).as_subclass(Odd)
    assert spans.boundary(tensor) is tensor.grad_fn.hooks[0]
    assert tensor._backward_hooks is None


def test_calls_left_open_by_exceptions(session):
    def forward(x):
        raise KeyError("theirs")

    spans = ModuleSpans(session)
    wrapped = spans.wrap(forward, op="loss", position=1, keyword="logits")
    with pytest.raises(KeyError):
        wrapped(1)
    assert spans._hooks[0].num_open == 1
    spans.drop_open()
    assert spans._hooks[0].num_open == 0
    spans._hooks[0].post(None, (), None)
    assert not session.failures and not session.events()


def test_wrapped_functions_have_a_backward_too(session):
    spans = ModuleSpans(session)

    def loss(labels, logits):
        return (labels * logits).sum()

    wrapped = spans.wrap(loss, op="loss", position=1, keyword="logits")
    for arguments, keywords in (
        ((2, torch.ones(2, requires_grad=True)), {}),
        ((2,), {"logits": torch.ones(2, requires_grad=True)}),
    ):
        wrapped(*arguments, **keywords).backward()
        assert [(e["op"], e["phase"]) for e in session.events()] == [("loss", "forward"), ("loss", "backward")]


def test_switched_off_and_on_within_a_call(session):
    spans, model = ModuleSpans(session), torch.nn.Sequential(Scale())
    spans.attach(model, op="model")
    spans.attach(model[0], op="layer", after=lambda: setattr(session.recorder, "enabled", False))
    model(torch.ones(2, requires_grad=True))
    assert [e["op"] for e in session.events()] == ["layer"]
    assert [hook.num_open for hook in spans._hooks] == [0, 0]
    model(torch.ones(2))
    session.recorder.enabled = True
    assert not session.events() and not session.failures


def test_several_threads_at_once(session):
    def run() -> None:
        model, _ = attached(session)
        barrier.wait()
        for _ in range(50):
            model(torch.ones(2, requires_grad=True)).sum().backward()

    threads, barrier = [threading.Thread(target=run) for _ in range(3)], threading.Barrier(3)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = session.events()
    assert Counter(e["phase"] for e in events) == {"forward": 300, "backward": 300}
    assert session.recorder.stats()["mismatched"] == 0 and not session.failures
    assert not any(e["flags"] & Flag.REPAIRED for e in events)
