"""What a capture plan costs: bytes per step of the rank that captures most, before compression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Final

import pandas as pd

from mappnb.activation_points import POINTS
from mappnb.activation_stats import FIELDS, NUM_BINS
from mappnb.capture.activations.head_stats import STATISTICS
from mappnb.capture.activations.plan import CapturePlan
from mappnb.capture.activations.rules import Capture
from mappnb.capture.activations.selection import layer_set
from mappnb.capture.activations.tap import Tap
from mappnb.errors import CaptureError, did_you_mean
from mappnb.layout import Layout

__all__ = ["Batch", "check_fit", "estimate", "table_of", "within_budget"]

ITEM_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
STATS_BYTES: Final = 8 * (len(FIELDS) + NUM_BINS)  # of one point of one layer


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank sees in a step.

    Attributes
    ----------
    sequence_length, micro_batch, num_microbatches : int
        Slots of a whole sequence, samples of a microbatch, microbatches of a step and rank.
    cp_size : int
        Ranks among which a sequence is divided.
    """

    sequence_length: int
    micro_batch: int
    num_microbatches: int
    cp_size: int = 1


@dataclass(frozen=True, slots=True)
class _Spot:
    """One point of one layer on one rank."""

    point: str
    layer: int
    sizes: tuple[int, ...]
    token_size: int = 1
    writes: bool = True
    grad: bool = False


def estimate(plan: CapturePlan, facts: Mapping[str, Any], layout: Layout | None = None, **batch: int) -> pd.DataFrame:
    """Return the table of ``CapturePlan.estimate``, which describes it; raises what that raises."""
    layout = layout or Layout()
    known = ("sequence_length", "micro_batch", "num_microbatches")
    for key in batch:
        if key not in known:
            raise CaptureError(
                f"estimate: unknown argument {key!r}; known: {', '.join(known)}{did_you_mean(key, known)}"
            )
    sizes = {**{"micro_batch": 1, "num_microbatches": 1}, **{k: facts[k] for k in known if k in facts}, **batch}
    if "sequence_length" not in sizes:
        raise CaptureError(
            "estimate: how long are the sequences? write plan.estimate(facts, layout, sequence_length=4096)"
        )
    check_fit(plan, facts)
    step = Batch(**sizes, cp_size=layout.cp)
    tables = [
        table_of(plan, _spots(facts, layout, pp_rank), step, facts).assign(pp=pp_rank) for pp_rank in range(layout.pp)
    ]
    worst = max(tables, key=lambda table: int(table["bytes_per_step"].sum()))
    worst.attrs.update(
        total_bytes=int(worst["bytes_per_step"].sum()), pp_rank=int(worst["pp"].max()) if len(worst) else 0
    )
    return within_budget(plan, worst.drop(columns="pp"))


def check_fit(plan: CapturePlan, facts: Mapping[str, Any]) -> None:
    """Raise CaptureError for points and layers that a model of these facts does not have."""
    num_layers, absent = int(facts.get("num_layers", 0)), _absent(facts)
    for rule in plan.rules:
        words = [word.removesuffix(".grad") for word in rule.points]
        for name in rule.point_names():
            if name.point in absent and not set(words) & {"all", "mlp", "attention", "residual"}:
                raise CaptureError(f"stream {rule.name!r}: {absent[name.point]}")
            if num_layers and name.layer >= num_layers:
                raise CaptureError(
                    f"stream {rule.name!r}: point {str(name)!r}, but the model has layers 0 to {num_layers - 1}"
                )
        if num_layers and not isinstance(rule.layers, (str, slice)):
            outside = sorted(n for n in layer_set(rule.layers, num_layers) if not 0 <= n < num_layers)
            if outside:
                raise CaptureError(
                    f"stream {rule.name!r}: layers {outside}, but the model has layers 0 to {num_layers - 1}"
                )
        heads = int(facts.get("num_heads", 0))
        wanted = () if rule.heads is None else (rule.heads,) if isinstance(rule.heads, int) else rule.heads
        if heads and any(not -heads <= head < heads for head in wanted):
            raise CaptureError(f"stream {rule.name!r}: heads {list(wanted)}, but the model has heads 0 to {heads - 1}")


def _absent(facts: Mapping[str, Any]) -> dict[str, str]:
    """Points that a model does not have, with what to say."""
    gated, experts = facts.get("gated"), int(facts.get("num_experts", 0) or 0)
    absent: dict[str, str] = {}
    if gated is True:
        absent["mlp_pre"] = "no point 'mlp_pre': the MLP of this model is gated; did you mean 'mlp_gate' or 'mlp_up'?"
    if gated is False:
        for point in ("mlp_gate", "mlp_up"):
            absent[point] = f"no point {point!r}: the MLP of this model is not gated; did you mean 'mlp_pre'?"
    if not experts and "num_experts" in facts:
        absent["router_prob"] = "no point 'router_prob': the model has no experts"
    return absent


def table_of(plan: CapturePlan, spots: Iterable[_Spot | Tap], step: Batch, facts: Mapping[str, Any]) -> pd.DataFrame:
    """Return bytes per step by stream and point on a rank, largest first; see ``CapturePlan.estimate``.

    Parameters
    ----------
    plan : CapturePlan
        What to capture.
    spots : iterable of Tap
        What the rank has.
    step : Batch
        What it sees in a step.
    facts : mapping
        Of the model.
    """
    num_layers, item = int(facts.get("num_layers", 0)), ITEM_BYTES.get(str(facts.get("dtype", "float32")), 4)
    rows: dict[tuple[str, str], list[int]] = {}
    for tap in spots:
        spot = tap if isinstance(tap, _Spot) else _spot(tap)
        for rule in plan.rules:
            for grad in (False, True):
                if rule.wants(spot.point, spot.layer, grad=grad, num_layers=num_layers):
                    row = rows.setdefault((rule.name, f"{spot.point}.grad" if grad else spot.point), [0, 0])
                    row[0] += 1
                    row[1] += _bytes(rule, spot, step, facts, item)
    table = pd.DataFrame(
        [(stream, point, layers, size) for (stream, point), (layers, size) in rows.items()],
        columns=["stream", "point", "layers", "bytes_per_step"],
    )
    return table.sort_values("bytes_per_step", ascending=False, kind="stable", ignore_index=True)


def within_budget(plan: CapturePlan, table: pd.DataFrame) -> pd.DataFrame:
    """Return the table, or raise CaptureError if it is above the plan's budget, with what to drop."""
    total = int(table["bytes_per_step"].sum())
    table.attrs["total_bytes"] = total
    if total <= plan.budget_bytes:
        return table
    drop, left = [], total
    for row in table.itertuples():
        if left <= plan.budget_bytes:
            break
        drop.append(f"{row.point} of {row.stream!r} ({_words(int(str(row.bytes_per_step)))})")
        left -= int(str(row.bytes_per_step))
    raise CaptureError(
        f"capture plan: {_words(total)} a step on one rank, above the budget of {_words(plan.budget_bytes)}; drop {', '.join(drop[:6])}"
        f"{' and more' if len(drop) > 6 else ''}, "
        f"or choose fewer layers or tokens, a smaller mode (cast, int8, stats), or CapturePlan(budget_bytes={total})\n"
        f"{table.head(12).to_string(index=False)}"
    )


def _bytes(rule: Capture, spot: _Spot, step: Batch, facts: Mapping[str, Any], item: int) -> int:
    """Bytes of one point of one layer in a step."""
    if rule.mode == "metric":
        return 0
    if rule.mode == "stats":
        return STATS_BYTES
    if not spot.writes:
        return 0
    slots = rule.slots(step.sequence_length)
    share = 1.0 if slots is None else len(slots) / step.sequence_length
    rows = (
        ceil(step.sequence_length / step.cp_size / spot.token_size * share) * step.micro_batch * step.num_microbatches
    )
    sizes, dim = list(spot.sizes), POINTS[spot.point].dims[0]
    if rule.mode == "heads":
        return sizes[0] * len(STATISTICS) * 4 * step.micro_batch * step.num_microbatches if spot.point == "q_rot" else 0
    if rule.heads is not None and dim in ("head", "kv_head") and facts.get("num_heads"):
        total = int(facts["num_heads" if dim == "head" else "num_kv_heads"])
        chosen = rule.head_numbers(dim, num_heads=int(facts["num_heads"]), num_kv_heads=int(facts["num_kv_heads"]))
        sizes[0] = ceil(sizes[0] * len(chosen or ()) / total)
    width, last = prod(sizes), sizes[-1]
    return rows * (width // last if last else 0) * _vector_bytes(rule, last, item)


def _vector_bytes(rule: Capture, length: int, item: int) -> int:
    """Bytes of one vector along the last dim."""
    options = rule.options
    if rule.mode == "topk":
        return int(min(options["k"], length) * (item + 4))
    if rule.mode == "bucket":
        return ceil(length / int(options["size"])) * item
    fixed = {"full": length * item, "cast": length * 2, "int8": length + 4}
    return int(fixed[rule.mode] if rule.mode in fixed else options["size"] * 4)


def _spot(tap: Tap) -> _Spot:
    return _Spot(tap.point, tap.layer, tap.shard.sizes, tap.shard.token_size, tap.shard.writes, tap.grad)


def _spots(facts: Mapping[str, Any], layout: Layout, pp_rank: int) -> list[_Spot]:
    """Return what tensor-parallel rank 0 of a pipeline rank has, with layers divided evenly over the stages."""
    num_layers = int(facts["num_layers"])
    stages = [layout.stage(pp_rank, chunk) for chunk in range(layout.num_chunks)]
    per_stage = ceil(num_layers / layout.num_stages)
    layers = [n for stage in stages for n in range(stage * per_stage, min((stage + 1) * per_stage, num_layers))]
    ends = {
        "embed": 0 in stages,
        "final_ln": layout.num_stages - 1 in stages,
        "logits": layout.num_stages - 1 in stages,
    }
    absent, over_tp = _absent(facts), bool(facts.get("sequence_parallel")) and layout.tp > 1
    found = []
    for name, point in POINTS.items():
        if (
            name in absent
            or not ends.get(name, True)
            or (name.startswith("mlp_") and name != "mlp_out" and facts.get("num_experts"))
        ):
            continue
        token_size = layout.tp if over_tp and point.sequence_parallel else 1
        sizes = _sizes(point.dims, facts, layout.tp)
        found += [_Spot(name, layer, sizes, token_size) for layer in (layers if point.per_layer else [-1])]
    return found


def _sizes(dims: tuple[str, ...], facts: Mapping[str, Any], tp: int) -> tuple[int, ...]:
    heads, hidden = int(facts.get("num_heads", 1)), int(facts.get("hidden", 0))
    whole = {
        "hidden": hidden,
        "head": ceil(heads / tp),
        "kv_head": ceil(int(facts.get("num_kv_heads", heads)) / tp),
        "head_dim": int(facts.get("head_dim", hidden // heads)),
        "neuron": ceil(int(facts.get("ffn", 4 * hidden)) / tp),
        "expert": int(facts.get("num_experts", 0) or 0),
        "vocab": ceil(int(facts.get("vocab", 0)) / tp),
    }
    return tuple(whole[dim] for dim in dims)


def _words(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"
