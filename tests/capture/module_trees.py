"""Modules for the tests of module spans: small ones, and random trees, played with hooks of either kind or none."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from capture.fake_session import FakeSession
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from mappnb.capture._module_spans import ModuleSpans

__all__ = ["PASSINGS", "TREES", "Scale", "attached", "play"]


class Clock:
    """Time that passes only in the forward and backward of the modules, so that two runs are equal to the ns."""

    def __init__(self, core: Any = None) -> None:
        self.core, self.now_ns = core, 0
        self.tick()

    def tick(self) -> None:
        self.now_ns += 1
        if self.core is not None:
            self.core._set_test_clock(self.now_ns)


class Tick(torch.autograd.Function):
    """Identity, during which the clock ticks."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.tick()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.tick()
        return gradient, None


class Spec(NamedTuple):
    """One module of a random tree."""

    style: str
    result: str
    children: tuple[Any, ...]
    hooks: str = ""


STYLES = ["plain", "keyword", "reentrant", "non-reentrant", "no_grad", "raises", "residual", "in place", "chunks"]
RESULTS = ["tensor", "tuple", "empty tuple", "detached", "none", "input"]


def specs(children: Any) -> Any:
    return st.builds(
        Spec,
        st.sampled_from(STYLES),
        st.sampled_from(["tensor"] * 6 + RESULTS),
        st.just(()) if children.is_empty else st.lists(children, max_size=3).map(tuple),
        st.sampled_from(["", "", "before", "after"]),
    )


TREES = st.recursive(specs(st.nothing()), specs, max_leaves=8)


class Passing(NamedTuple):
    """One pass through the model."""

    x: str
    num_forward: int
    phase: str
    forget: bool
    off: bool


PASSINGS = st.lists(
    st.builds(
        Passing,
        st.sampled_from(["fresh", "fresh with gradient", "reused leaf", "reused", "none"]),
        st.integers(1, 2),
        st.sampled_from(["backward", "backward", "backward_input", "backward_weight", "no backward", "twice"]),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=4,
)


class Node(torch.nn.Module):
    """A module of a random tree."""

    def __init__(self, spec: Spec, clock: Clock, seen: list[str], path: str = "m") -> None:
        super().__init__()
        self.spec, self.clock, self.seen, self.path = spec, clock, seen, path
        self.weight = torch.nn.Parameter(torch.full((2,), 1.0 + len(path) / 8))
        self.parts = torch.nn.ModuleList(
            Node(child, clock, seen, f"{path}{i}") for i, child in enumerate(spec.children)
        )

    def __deepcopy__(self, memo: Any) -> Node:
        raise AssertionError("not needed")

    def call(self, part: Node, x: Any) -> Any:
        style = part.spec.style
        if style == "keyword":
            y = part(hidden_states=x)
        elif style in ("reentrant", "non-reentrant") and torch.is_grad_enabled() and x.requires_grad:
            y = checkpoint(part, x, use_reentrant=style == "reentrant")
        elif style == "no_grad":
            with torch.no_grad():
                y = part(x)
        elif style == "raises":
            try:
                y = part(x)
            except KeyError:
                y = x
        elif style == "chunks" and x.shape[-1] > 1:
            first, second = x.chunk(2, dim=-1)
            y = torch.cat([first, first_tensor(part(second), second)], dim=-1)
        else:
            y = part(x)
        return first_tensor(y, x)

    def forward(self, hidden_states):
        x = Tick.apply(hidden_states, self.clock)
        x = x * self.weight[: x.shape[-1]]
        if self.spec.style == "raises":
            raise KeyError("theirs")
        for part in self.parts:
            y = self.call(part, x)
            if part.spec.style == "residual":
                y = x + y
            elif part.spec.style == "in place" and y.grad_fn is not None:
                y = y.clone().add_(1)
            x = y
        if self.spec.hooks and x.requires_grad:
            x.register_hook(lambda gradient: self.seen.append(f"{self.path} {gradient.sum().item()}"))
        return self.answer(x, hidden_states)

    def answer(self, x: Any, hidden_states: Any) -> Any:
        result = self.spec.result
        if result == "tuple":
            return x, None
        if result == "detached":
            return x.detach()
        if result == "input":
            return hidden_states
        return {"empty tuple": (), "none": None}.get(result, x)


def first_tensor(y: Any, otherwise: Any) -> Any:
    y = (y[0] if y else None) if isinstance(y, tuple) else y
    return otherwise if y is None else y


def hook_of_user(seen: list[str], module: Any, args: Any, output: Any) -> None:
    """A forward hook that hooks the output's gradient."""
    y = first_tensor(output, None)
    if y is not None and y.requires_grad:
        y.register_hook(lambda gradient: seen.append(f"user {gradient.sum().item()}"))


def play(spec: Spec, passings: list[Passing], pure_python: bool | None) -> tuple[Any, ...]:
    """Play passes on a hooked tree (None: not hooked); returns what the training sees, and what was recorded."""
    session = FakeSession(pure_python=bool(pure_python))
    clock, seen = Clock(session.recorder._core), []
    model, spans = Node(spec, clock, seen), ModuleSpans(session)
    for module in model.modules():
        if isinstance(module, Node):
            hook = functools.partial(hook_of_user, seen)
            if module.spec.hooks == "before":
                module.register_forward_hook(hook)
            if pure_python is not None:
                spans.attach(module, op="module", name=module.path, before=lambda *_: clock.tick())
            if module.spec.hooks == "after":
                module.register_forward_hook(hook)
    kept = {"reused leaf": torch.ones(2, requires_grad=True), "reused": torch.ones(2, requires_grad=True) * 2}
    recorder_clock = clock.core
    trained = [play_one(model, spans, clock, passing, kept) for passing in passings]
    gradients = [None if p.grad is None else p.grad.tolist() for p in [*model.parameters(), kept["reused leaf"]]]
    spans.detach()
    recorder_clock._set_test_clock(None)
    events = [row[:-2] for row in session.recorder.drain().tolist()]
    stats = session.recorder.stats()
    return (trained, gradients, seen), (
        events,
        session.recorder.sites,
        stats,
        [(w, repr(e)) for w, e in session.failures],
    )


def play_one(model: Node, spans: ModuleSpans, clock: Clock, passing: Passing, kept: dict[str, Any]) -> Any:
    session = spans.session
    session.recorder.enabled = not passing.off and not session.failures
    outputs = []
    for _ in range(passing.num_forward):
        if passing.forget:
            spans.forget()
        x = kept.get(passing.x)
        if x is None:
            x = torch.ones(2, requires_grad=passing.x == "fresh with gradient")
        try:
            y = first_tensor(model(hidden_states=x) if passing.x == "none" else model(x), x)
        except KeyError:
            continue
        finally:
            if passing.forget:
                spans.drop_open()
        if y.requires_grad and y.grad_fn is not None:
            outputs.append(y)
    spans.enter_backward(passing.phase)
    if passing.phase != "no backward" and outputs:
        clock.tick()
        try:
            for last in [False, True] if passing.phase == "twice" else [True]:
                sum(y.sum() for y in outputs).backward(retain_graph=not last or passing.x == "reused")
        except RuntimeError as err:  # a checkpoint without anything to compute a gradient for
            return str(err)
        spans.end_tails()
        spans.forget()
    return [y.tolist() for y in outputs]


class Scale(torch.nn.Module):
    """Multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.weight


def attached(session: FakeSession, number: int = 2) -> tuple[Any, ModuleSpans]:
    """A sequence of hooked modules."""
    model, spans = torch.nn.Sequential(*[Scale() for _ in range(number)]), ModuleSpans(session)
    for i, part in enumerate(model):
        spans.attach(part, op="layer", layer=i)
    return model, spans
