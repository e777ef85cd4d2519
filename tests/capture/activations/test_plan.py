"""Capture plans: what a rule chooses, JSON, estimates against sizes counted by hand, and what is said of bad ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mappnb
from mappnb import Capture, CapturePlan, TokenSample
from mappnb.capture.activations.plan import NAMED, parse_activations
from mappnb.errors import CaptureError
from mappnb.layout import Layout

FACTS = {
    "num_layers": 6,
    "hidden": 24,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn": 40,
    "vocab": 50,
    "gated": False,
    "num_experts": 0,
    "dtype": "float32",
}
NUMBERS = st.lists(st.integers(-5, 40), min_size=1, max_size=4)
SLICES = st.builds(slice, st.none() | st.integers(0, 9), st.none() | st.integers(10, 20), st.none() | st.integers(1, 3))
RULES = st.builds(
    Capture,
    st.lists(
        st.sampled_from(["q", "layers.2.k_rot", "resid_post", "mlp", "logits", "blocks.1.hook_resid_mid"]),
        min_size=1,
        max_size=3,
    ),
    layers=st.none() | st.integers(-3, 5) | NUMBERS | SLICES | st.just("every 3"),
    tokens=st.none()
    | st.integers(1, 9)
    | NUMBERS
    | SLICES
    | st.builds(TokenSample, st.integers(1, 9), st.integers(0, 99)),
    heads=st.none() | st.integers(0, 5) | st.lists(st.integers(0, 5), min_size=1, max_size=3),
    steps=st.none() | st.integers(0, 30) | NUMBERS | SLICES,
    every=st.integers(1, 12),
    gradients=st.booleans(),
)


@given(
    st.lists(RULES, max_size=3),
    st.sampled_from(["block", "drop", "thin"]),
    st.none() | st.just("bytes") | st.just(["a", "b"]),
)
def test_plans_survive_json(rules, policy, vocabulary) -> None:
    plan = CapturePlan(*rules, policy=policy, vocabulary=vocabulary)
    text = json.dumps(plan.to_dict(), allow_nan=False)
    assert CapturePlan.from_dict(json.loads(text)) == plan == parse_activations(text)
    assert len({rule.name for rule in plan.rules}) == len(plan.rules)


@given(RULES, st.integers(0, 60))
def test_steps_are_those_of_brute_force(rule, step) -> None:
    steps = rule.steps
    if steps is None:
        chosen = True
    elif isinstance(steps, slice):
        stop = 10**6 if steps.stop is None else steps.stop + 1  # both ends
        chosen = step in range(steps.start or 0, stop, steps.step or 1)
    else:
        chosen = step in ([steps] if isinstance(steps, int) else steps)
    assert rule.wants_step(step) == (chosen and step % rule.every == 0)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, {0, 1, 2, 3, 4, 5}),
        (-1, {5}),
        ([0, -2], {0, 4}),
        (slice(1, 4), {1, 2, 3}),
        (slice(None, None, 2), {0, 2, 4}),
        ("every 4", {0, 4}),
    ],
)
def test_layers(layers, expected) -> None:
    rule = Capture("q", layers=layers)
    assert {n for n in range(6) if rule.wants("q", n, num_layers=6)} == expected
    assert not rule.wants("k", 0, num_layers=6) and not rule.wants("q", 0, grad=True, num_layers=6)


def test_a_layer_in_the_name_counts_for_that_point() -> None:
    rule = Capture(["layers.5.q", "k", "logits"], layers=[0])
    assert rule.wants("q", 5, num_layers=6) and not rule.wants("q", 0, num_layers=6)
    assert rule.wants("k", 0, num_layers=6) and rule.wants("logits", -1, num_layers=6)


def test_tokens() -> None:
    assert Capture("q").slots(8) is None
    assert Capture("q", tokens=3).slots(8).tolist() == [5, 6, 7]
    assert Capture("q", tokens=slice(2, 6, 2)).slots(8).tolist() == [2, 4]
    assert Capture("q", tokens=[7, 0, -2, 99]).slots(8).tolist() == [0, 6, 7]
    sample = Capture("q", tokens=TokenSample(5, seed=3))
    first = sample.slots(100, step=4, dp_rank=1, microbatch=2)
    assert first.tolist() == sample.slots(100, step=4, dp_rank=1, microbatch=2).tolist()  # equal on every rank
    assert first.tolist() != sample.slots(100, step=5, dp_rank=1, microbatch=2).tolist()
    assert len(set(first.tolist())) == 5 and (np.diff(first) > 0).all()
    counts = np.bincount(np.concatenate([sample.slots(10, step=s) for s in range(400)]), minlength=10)
    assert (abs(counts - 200) < 60).all()  # no slot is favoured


def test_heads_and_their_groups() -> None:
    rule = Capture("q", heads=[0, -1])
    assert rule.head_numbers("head", num_heads=6, num_kv_heads=2) == [0, 5]
    assert rule.head_numbers("kv_head", num_heads=6, num_kv_heads=2) == [0, 1]
    assert Capture("q", heads=2).head_numbers("kv_head", num_heads=6, num_kv_heads=2) == [0]


def by_point(plan, layout=None, **batch):
    table = plan.estimate(FACTS, layout, sequence_length=16, micro_batch=2, num_microbatches=4, **batch)
    return dict(zip(table["point"], table["bytes_per_step"], strict=True))


def test_estimates_are_sizes_counted_by_hand() -> None:
    rows = 16 * 2 * 4
    assert by_point(CapturePlan(Capture(["q", "k", "resid_post", "mlp_act", "logits"]))) == {
        "q": 6 * rows * 24 * 4,
        "k": 6 * rows * 8 * 4,
        "resid_post": 6 * rows * 24 * 4,
        "mlp_act": 6 * rows * 40 * 4,
        "logits": rows * 50 * 4,
    }
    stage = by_point(CapturePlan(Capture(["q", "resid_post", "embed", "logits"])), Layout(tp=2, pp=3, cp=2))
    assert stage == {"q": 2 * rows // 2 * 12 * 4, "resid_post": 2 * rows // 2 * 24 * 4, "logits": rows // 2 * 25 * 4}


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (dict(mode="cast"), 24 * 2),
        (dict(mode="int8"), 24 + 4),
        (dict(mode="topk", k=5), 5 * 8),
        (dict(mode="bucket", size=7), 4 * 4),
        (dict(mode="sketch", size=6), 6 * 4),
    ],
)
def test_estimates_by_mode(options, size) -> None:
    assert by_point(CapturePlan(Capture("layers.0.resid_post", **options))) == {"resid_post": 16 * 2 * 4 * size}
    assert by_point(CapturePlan(Capture("layers.0.resid_post", tokens=4, **options))) == {
        "resid_post": 4 * 2 * 4 * size
    }


def test_statistics_do_not_grow_with_the_batch() -> None:
    plan = CapturePlan.named("default")
    small, large = (plan.estimate(FACTS, sequence_length=s).attrs["total_bytes"] for s in (16, 4096))
    assert small == large < 100_000


def test_statistics_are_as_large_as_what_is_stored() -> None:
    torch = pytest.importorskip("torch", reason="head statistics are taken by torch")
    from mappnb.activation_stats import tensor_stats
    from mappnb.capture.activations.head_stats import head_statistics

    fields, histogram = tensor_stats(np.ones(3))
    rule = Capture("layers.0.resid_post", mode="stats")
    assert by_point(CapturePlan(rule)) == {"resid_post": fields.nbytes + histogram.nbytes}
    heads = head_statistics(torch.ones(8, 16, 6, 4), torch.ones(8, 16, 2, 4), None, FACTS)  # samples of a step
    stored = sum(values.numel() * values.element_size() for values in heads.values())
    rule = Capture(["q_rot", "k_rot"], layers=0, mode="heads")
    assert by_point(CapturePlan(rule)) == {"q_rot": stored, "k_rot": 0}


def test_over_budget() -> None:
    plan = CapturePlan(Capture(["mlp_act", "k"]), budget_bytes=30_000)
    with pytest.raises(
        CaptureError, match=r"above the budget of 29\.3 KiB; drop mlp_act of 'full' \(120\.0 KiB\), or choose"
    ):
        by_point(plan)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Capture("mlp_gate"), "not gated; did you mean 'mlp_pre'"),
        (Capture("router_prob"), "the model has no experts"),
        (Capture("layers.6.q"), "the model has layers 0 to 5"),
        (Capture("q", layers=[2, 8]), r"layers \[8\], but the model has layers 0 to 5"),
        (Capture("q", heads=7), "the model has heads 0 to 5"),
    ],
)
def test_plans_that_do_not_fit_the_model(rule, said) -> None:
    with pytest.raises(CaptureError, match=said):
        CapturePlan(rule).estimate(FACTS, sequence_length=16)
    with pytest.raises(CaptureError, match="how long are the sequences"):
        CapturePlan(Capture("q")).estimate(FACTS)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Capture("resid_pots"), "did you mean 'resid_post'"),
        (lambda: Capture([]), "no points"),
        (lambda: Capture("q", mode="topp"), "unknown mode 'topp'.*did you mean 'topk'"),
        (lambda: Capture("q", mode="topk"), "needs k="),
        (lambda: Capture("q", mode="topk", kk=3), "has no option 'kk'; it has: k; did you mean 'k'"),
        (lambda: Capture("q", mode="topk", k=0), "k is 0"),
        (lambda: Capture("q", mode="cast", dtype="bfloat"), "did you mean 'bfloat16'"),
        (lambda: Capture("q", mode="heads"), r"its points are \['q_rot', 'k_rot'\]"),
        (lambda: Capture("unembed", mode="stats"), "weights are stored as they are"),
        (lambda: Capture("q", layers="every"), "write 'every 4'"),
        (lambda: Capture("q", layers=1.5), "layers is 1.5"),
        (lambda: Capture("q", tokens=0), "the last so many tokens"),
        (lambda: Capture("q", steps=slice(0, 4, 0)), "steps is slice"),
        (lambda: Capture("q", steps=slice(5, 3)), "holds no step"),
        (lambda: Capture("q", every=0), "every is 0"),
        (lambda: Capture("q", name="weights"), "name is 'weights'"),
        (lambda: Capture("q", name="a/b"), "name is 'a/b'"),
        (lambda: TokenSample(0), "n is 0"),
        (lambda: CapturePlan("q"), "is no rule; write CapturePlan"),
        (lambda: CapturePlan(Capture("q", name="a"), Capture("k", name="a")), "two rules have the name 'a'"),
        (lambda: CapturePlan(policy="blok"), "did you mean 'block'"),
        (lambda: CapturePlan(budget_bytes=0), "budget_bytes is 0"),
        (lambda: CapturePlan(vocabulary="words"), "expected 'bytes'"),
        (lambda: CapturePlan(names={"resid_pots": "x"}), "did you mean 'resid_post'"),
        (lambda: CapturePlan.named("defalt"), "did you mean 'default'"),
        (lambda: CapturePlan.from_dict({"rulez": []}), "unknown key 'rulez'.*did you mean 'rules'"),
        (
            lambda: CapturePlan.from_dict({"rules": [{"points": ["q"], "evry": 2}]}),
            "unknown key 'evry'.*did you mean 'every'",
        ),
        (lambda: CapturePlan.from_dict({"rules": "q"}), "expected a list of objects"),
        (lambda: CapturePlan.from_dict({"rules": [{"points": ["q"], "tokens": {"last": 3}}]}), "cannot read"),
        (lambda: parse_activations(3), "activations is 3"),
        (lambda: parse_activations('{"rules": ['), "a plan as JSON was expected"),
        (lambda: parse_activations("no/such.json"), "cannot be read"),
    ],
)
def test_bad_plans(make, said) -> None:
    with pytest.raises(CaptureError, match=said):
        make()


def test_named_plans(tmp_path) -> None:
    assert {"default", "residual", "attention"} <= set(NAMED)
    default = CapturePlan.named("default")
    assert default.wants_step(0) and not default.wants_step(5) and default.wants_step(10)
    assert parse_activations(None) is None and parse_activations("default") == default
    assert parse_activations(Capture("q")) == CapturePlan(Capture("q"))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(default.to_dict()))
    assert parse_activations(str(path)) == default


def test_public_names() -> None:
    assert mappnb.Capture is Capture and mappnb.CapturePlan is CapturePlan and callable(mappnb.metric)


def test_exec_hands_the_plan_to_the_program(tmp_path, monkeypatch) -> None:
    from mappnb.capture.execute import environment, execute

    plan = CapturePlan(Capture("q", layers=slice(1, 3), tokens=TokenSample(4)), vocabulary=["a", "b"])
    env = environment(run_dir=str(tmp_path), plan="default", resume=False, activations=plan)
    assert parse_activations(env["MAPPNB_ACTIVATIONS"]) == plan
    monkeypatch.setenv("MAPPNB_ACTIVATIONS", "{}")
    assert "MAPPNB_ACTIVATIONS" not in environment(run_dir=str(tmp_path), plan="default", resume=False)
    with pytest.raises(CaptureError, match="did you mean 'default'"):
        execute(["python", "-c", "raise SystemExit(3)"], run_dir=str(tmp_path / "run"), activations="defalt")
    assert not (tmp_path / "run").exists()


def test_large_models_are_judged_at_once() -> None:
    import time

    facts = {**FACTS, "num_layers": 128}
    begin = time.process_time()
    CapturePlan(*NAMED["residual"], Capture("all", gradients=True, layers=[0], name="all")).estimate(
        facts, sequence_length=8
    )
    assert time.process_time() - begin < 1.0
