"""The Megatron probe on gloo ranks: every microbatch, every layer, matching collectives, the same losses."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from typing import Any

import pytest
from capture.checks import assert_collectives_match, assert_nested, assert_p2p_match, patched_attributes
from capture.fake_session import FakeSession
from capture.ranks import run_ranks

from mappnb.capture._flops import training_flops_per_token
from mappnb.capture._megatron_step import Outputs, StepSums
from mappnb.capture.points import build_probes
from mappnb.terms import Flag

PRELOAD = ("megatron.core",)
STEPS = 3

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2": (2, {"pp": 2}),
    "pp2 interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "dp2 overlap recompute": (2, {"distributed_optimizer": True, "overlap": True, "recompute": True}),
    "ep2": (2, {"ep": 2, "experts": 4}),
    "pp2 dp2": (4, {"pp": 2}),
}


def settings_of(name: str) -> tuple[int, dict[str, Any]]:
    world_size, own = LAYOUTS[name]
    return world_size, {"steps": STEPS, "layers": 2, "hidden": 64, "global_batch": 8, "vocab": 256, **own}


def train_twice(settings: dict[str, Any]) -> dict[str, Any]:
    """Train without and with recording, in one process."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch.distributed as dist

    from mappnb.testing.gpt import TrainSettings, train

    dist.init_process_group("gloo")  # once: a second one would find the first one's addresses in the store
    job = TrainSettings(**settings, device="cpu")
    plain = train(job)
    for name in ("megatron.core.pipeline_parallel.schedules", "megatron.core.optimizer.optimizer"):
        __import__(name)
    before = patched_attributes()
    session = FakeSession(pure_python=False).start(*build_probes(FakeSession().plan))
    recorded = train(job)
    session.stop()
    return {
        "plain": (plain.losses, plain.grad_norms if hasattr(plain, "grad_norms") else None),
        "recorded": (recorded.losses, recorded.grad_norms if hasattr(recorded, "grad_norms") else None),
        "gone": {key for key, value in patched_attributes().items() if key in before and before[key] != value},
        "events": session.events(),
        "groups": session.groups,
        "failures": [f"{where}: {err!r}" for where, err in session.failures],
        "meta": session.meta,
        "sums": session.step_sums(),
        "metrics": [{**m, "value": m["value"].tolist() if hasattr(m["value"], "tolist") else m["value"]}
                    for m in session.metrics],
        "model": session.model,
        "layout": session.layout,
        "coords": session.coords,
        "stats": session.recorder.stats(),
        "leftover": len(session._probes[1]._patches._done),
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name):
    world_size, settings = settings_of(name)
    ranks = run_ranks(train_twice, world_size, settings, preload=PRELOAD, timeout_s=60.0)
    by_rank = {rank: result["events"] for rank, result in enumerate(ranks)}
    groups: dict[int, Any] = {}
    for result in ranks:
        assert not result["failures"] and not result["meta"], (result["failures"], result["meta"])
        assert result["recorded"] == result["plain"], "recording changed the losses"
        assert not result["gone"], "patches were left behind"
        assert result["stats"]["mismatched"] == 0
        assert_nested(result["events"])
        groups.update(result["groups"])
    assert_collectives_match(by_rank, groups)
    assert_p2p_match(by_rank)
    for result in ranks:
        check_schedule(result, settings, world_size)
        check_modules(result, settings)
        check_values(result, settings, world_size)
    total = sum(r["model"]["parameters_owned"] for r in ranks if r["coords"]["dp"] == r["coords"]["cp"] == 0)
    if not settings.get("experts"):
        assert total == num_parameters(settings)


def check_schedule(result: dict[str, Any], settings: dict[str, Any], world_size: int) -> None:
    """Each (step, chunk, microbatch) once forward and once backward, at the right stage; one optimizer step a step."""
    pp, vpp = settings.get("pp", 1), settings.get("vpp", 1)
    dp = world_size // pp // settings.get("tp", 1)
    num_microbatches = settings["global_batch"] // dp
    layout, coords = result["layout"], result["coords"]
    assert (layout.pp, layout.tp, layout.dp, layout.num_chunks) == (pp, settings.get("tp", 1), dp, vpp)
    expected = {
        (step, chunk, microbatch, chunk * pp + coords["pp"])
        for step in range(STEPS) for chunk in range(vpp) for microbatch in range(num_microbatches)
    }  # fmt: skip
    for op in ("forward_step", "backward_step"):
        found = [(e["step"], e["chunk"], e["microbatch"], e["stage"]) for e in result["events"] if e["op"] == op]
        assert len(found) == len(expected) and set(found) == expected, op
    per_step = Counter((e["op"], e["step"]) for e in result["events"])
    for step in range(STEPS):
        for op in ("iteration", "optimizer_step", "finalize_grads"):
            assert per_step[op, step] == 1, (op, step)
        assert per_step["next_batch", step] == num_microbatches * vpp


def check_modules(result: dict[str, Any], settings: dict[str, Any]) -> None:
    """Each layer once per microbatch and pass, inside the step of its chunk, numbered from 0 over the whole model."""
    pp, vpp, pp_rank = settings.get("pp", 1), settings.get("vpp", 1), result["coords"]["pp"]
    steps = Counter(e["chunk"] for e in result["events"] if e["op"] == "forward_step")
    per_chunk = settings["layers"] // (pp * vpp)
    phases = ["forward", "backward", *(["recompute"] if settings.get("recompute") else [])]
    for op in ("layer", "attention", "mlp"):
        found = Counter((e["chunk"], e["layer"], e["phase"]) for e in result["events"] if e["op"] == op)
        expected = {
            (chunk, (chunk * pp + pp_rank) * per_chunk + i, phase): steps[chunk]
            for chunk in range(vpp) for i in range(per_chunk) for phase in phases
        }  # fmt: skip
        assert found == expected, op
    first, last = pp_rank == 0, pp_rank == pp - 1
    counts = Counter((e["op"], e["phase"]) for e in result["events"])
    for op, there in (("embedding", first), ("output_layer", last), ("loss", last)):
        for phase in ("forward", "backward"):
            assert counts[op, phase] == (steps[0] if there else 0), (op, phase)


def check_values(result: dict[str, Any], settings: dict[str, Any], world_size: int) -> None:
    """Loss, tokens and microbatches of each step; tokens per expert add up."""
    dp = result["layout"].dp
    num_microbatches = settings["global_batch"] // dp
    last = result["coords"]["pp"] == settings.get("pp", 1) - 1
    for step in range(STEPS):
        values = result["sums"][step]
        assert values["microbatches"] == num_microbatches and values["tokens"] == num_microbatches * 64
        assert values["lr"] == pytest.approx(1e-3) and values["skipped"] == 0.0 and values["grad_norm"] > 0
        assert ("loss" in values) == last
        if last and dp == 1:
            assert values["loss"] == pytest.approx(result["recorded"][0][step], rel=1e-6)
    tokens = [m for m in result["metrics"] if m["name"] == "tokens"]
    assert Counter(m["step"] for m in tokens) == dict.fromkeys(range(STEPS), num_microbatches)
    documents = [m for m in result["metrics"] if m["name"] == "document_tokens"]
    assert all(m["value"] == [64] for m in documents) and len(documents) == len(tokens)
    experts = [m for m in result["metrics"] if m["name"] == "expert_tokens"]
    if settings.get("experts"):
        assert {m["layer"] for m in experts} == set(range(settings["layers"]))
        assert all(sum(m["value"]) == 64 * 2 and len(m["value"]) == 4 for m in experts)
        assert len(experts) == STEPS * num_microbatches * settings["layers"]
    else:
        assert not experts


def num_parameters(settings: dict[str, Any]) -> int:
    """Parameters of the dense reference model: weights, biases and norms; the embedding is tied."""
    h, ffn = settings["hidden"], 4 * settings["hidden"]
    layer = (3 * h * h + 3 * h) + (h * h + h) + (ffn * h + ffn) + (h * ffn + h) + 4 * h
    return settings["layers"] * layer + settings["vocab"] * h + 2 * h


# -------------------------------------------------------------------------------------------------- single process
def evaluate_and_old_function() -> dict[str, Any]:
    """Evaluation, and a schedule function that was taken before recording began."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch
    from megatron.core.pipeline_parallel import schedules

    from mappnb.testing.gpt import TrainSettings, train

    old = schedules.forward_backward_no_pipelining
    session = FakeSession(pure_python=False)
    session.start(*build_probes(session.plan))
    calls = []

    def forward_backward(**kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            with torch.no_grad():
                schedules.forward_backward_no_pipelining(**{**kwargs, "forward_only": True})
            return schedules.forward_backward_no_pipelining(**kwargs)
        return old(**kwargs)

    job = TrainSettings(steps=3, layers=2, hidden=64, global_batch=2, device="cpu")
    train(job, forward_backward_func=forward_backward)
    session.stop()
    return {"events": session.events(), "failures": session.failures and repr(session.failures), "steps": session.steps}


def test_evaluation_and_a_schedule_taken_before():
    (result,) = run_ranks(evaluate_and_old_function, 1, preload=PRELOAD, timeout_s=60.0)
    assert not result["failures"] and result["steps"] == [0, 1, 2]
    assert_nested(result["events"])
    (evaluation,) = [e for e in result["events"] if e["op"] == "evaluate"]
    end_ns = evaluation["start_ns"] + evaluation["duration_ns"]
    inside = [e for e in result["events"] if evaluation["start_ns"] <= e["start_ns"] < end_ns]
    counts = Counter((e["op"], e["phase"]) for e in inside)
    assert counts["forward_step", "forward"] == 2 and counts["layer", "forward"] == 4
    assert not [e for e in inside if e["phase"] == "backward"]
    per_step = Counter((e["op"], e["step"]) for e in result["events"] if e["op"] in ("forward_step", "backward_step"))
    assert per_step["backward_step", 0] == per_step["backward_step", 1] == per_step["backward_step", 2] == 2


def broken_probe() -> dict[str, Any]:
    """Our own code fails in the middle of a training."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from mappnb.testing.gpt import TrainSettings, train

    job = TrainSettings(steps=3, layers=2, hidden=64, global_batch=2, device="cpu")
    plain = train(job)
    session = FakeSession(pure_python=False)
    session.start(*build_probes(session.plan))

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("ours")

    session.metric = broken  # type: ignore[method-assign]
    recorded = train(job)
    session.stop()
    return {"same": plain.losses == recorded.losses, "failures": [f"{w} {e!r}" for w, e in session.failures]}


def test_our_own_error_changes_nothing():
    (result,) = run_ranks(broken_probe, 1, preload=PRELOAD, timeout_s=60.0)
    assert result["same"]
    assert len(result["failures"]) == 1 and "ours" in result["failures"][0]


# ------------------------------------------------------------------------------------------------------------- units
class Config:
    """Fields of a TransformerConfig."""

    num_layers, hidden_size, num_attention_heads, ffn_hidden_size = 4, 8, 2, 32

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def test_flops_of_a_gpt_are_narayanans():
    s, h, layers, vocab = 16, 8, 4, 100
    found = training_flops_per_token(Config(), seq_length=s, vocab_size=vocab)
    full_square = 24 * layers * h * h * (1 + s / (6 * h)) + 2 * h * vocab  # arXiv:2104.04473, appendix; forward
    assert found == pytest.approx(3 * (full_square - 2 * layers * s * h))  # ours: half of the square, it is causal


def test_flops_of_variants():
    dense = training_flops_per_token(Config(), seq_length=16, vocab_size=100)
    gated = training_flops_per_token(Config(gated_linear_unit=True), seq_length=16, vocab_size=100)
    assert gated - dense == 6 * 4 * 8 * 32
    grouped = training_flops_per_token(Config(num_query_groups=1), seq_length=16, vocab_size=100)
    assert dense - grouped == 6 * 4 * 2 * 8 * 4
    moe = training_flops_per_token(
        Config(num_moe_experts=8, moe_router_topk=2, moe_layer_freq=[0, 1, 0, 1]), seq_length=16, vocab_size=100
    )
    assert moe - dense == 6 * 2 * (8 * 8 + 2 * 8 * 32)
    assert training_flops_per_token(Config(multi_latent_attention=True), seq_length=16, vocab_size=100) is None


def test_outputs_find_their_microbatch():
    outputs, tensors = Outputs(), [object() for _ in range(4)]
    for i, tensor in enumerate(tensors):
        outputs.put(tensor, (0, 0, i))
    assert outputs.take(tensors[0]) == (0, 0, 0)
    assert outputs.take(object()) == (0, 0, 1)  # replaced by the schedule: the oldest that is left
    assert outputs.take(tensors[3]) == (0, 0, 3)
    outputs.clear()
    assert outputs.take(tensors[2]) == (-1, -1, -1)


def test_losses_in_all_of_megatrons_forms():
    import torch

    for reduced, expected in [
        ({"lm loss": torch.tensor(2.0)}, 2.0),
        ({"lm loss": torch.tensor([6.0, 3.0]), "other": torch.tensor(9.0)}, 2.0),
        ({"lm loss": (torch.tensor(6.0), torch.tensor(3.0))}, 2.0),
        ({"lm loss": 2.0}, 2.0),
    ]:
        session = FakeSession()
        sums = StepSums(session)
        sums.add_loss(reduced)
        value = next(iter(reduced.values()))
        if isinstance(value, torch.Tensor):
            value /= 10  # as the schedules do
        sums.add_loss({"lm loss": torch.tensor(4.0)})
        sums.tell()
        assert session.step_sums()[-1]["loss"] == pytest.approx((expected + 4.0) / 2)
    assert Flag.REPAIRED == 4
