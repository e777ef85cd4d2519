"""Which ranks should have left shards and did not: their part is masked, and told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mappnb._activation_index import WEIGHTS, Found
from mappnb.errors import LayoutError
from mappnb.layout import Layout
from mappnb.paths import ACTIVATIONS, INC_NAME, RANK_NAME
from mappnb.store import Incarnation, Store

__all__ = ["missing_steps", "note_gaps"]


def note_gaps(
    store: Store, incarnations: Sequence[Incarnation], found: Sequence[Found], newest: Mapping[int, int], *, live: bool
) -> None:
    """Put ranks whose shards are missing into ``store.problems``; what was told there before and has come since is taken out."""
    for incarnation in incarnations:
        own = [f for f in found if f.part.incarnation == incarnation.number]
        last = incarnation is incarnations[-1]
        steps_of = missing_steps(own, newest, live=live and last)
        folder = f"{INC_NAME.format(incarnation.number)}/{ACTIVATIONS}/"
        for rank in range(_layout(own).world_size if own else 0):
            where = folder + RANK_NAME.format(rank)
            if rank in steps_of:
                store.problems[where] = (
                    f"no shards of {_steps_text(steps_of[rank])}; its part is masked, its values read as 0"
                )
            else:
                store.problems.pop(where, None)


def missing_steps(found: Sequence[Found], newest: Mapping[int, int], *, live: bool = False) -> dict[int, list[int]]:
    """Return rank -> steps that it should have written and did not, within one incarnation.

    Notes
    -----
    A rank is missed where another rank's shards say that they are a part only: of a split dim or split tokens (its tensor-parallel
    peers), of the sequence (context parallelism), of the batch (data parallelism), or of the layers. A stage is missed if no rank of
    it wrote anything although the plan takes every layer. While the job lives, a rank is behind, not missing, as long as it wrote
    nothing later.
    """
    if not found:
        return {}
    layout = _layout(found)
    out: dict[int, set[int]] = {}
    for stream in {f.stream for f in found}:
        those = [f for f in found if f.stream == stream]
        expected = _expected(those, layout)
        by_rank: dict[int, set[int]] = {}
        for one in those:
            by_rank.setdefault(one.part.rank, set()).update(
                s for s in one.steps if newest.get(s) == one.part.incarnation
            )
        steps = set().union(*by_rank.values()) if by_rank else set()
        for rank in expected:
            wrote = by_rank.get(rank, set())
            latest = max(wrote, default=-1)
            lost = {s for s in steps - wrote if not live or s < latest}
            if lost:
                out.setdefault(rank, set()).update(lost)
    return {rank: sorted(steps) for rank, steps in sorted(out.items())}


def _layout(found: Sequence[Found]) -> Layout:
    try:
        return Layout.from_dict(found[0].attrs.get("layout") or {})
    except LayoutError:
        return Layout()


def _expected(found: Sequence[Found], layout: Layout) -> set[int]:
    """Return the ranks of which shards are to be expected in one stream."""
    coords = {rank: layout.coords(rank) for rank in range(layout.world_size)}
    needed: dict[int, set[int]] = {}  # stage -> tensor-parallel ranks that must have written
    alike = {key: _writers(f, layout) for key, f in {id(f.arrays): f for f in found}.items()}
    for one in found:
        if one.part.rank in coords:
            at = coords[one.part.rank]
            needed.setdefault(at["pp"], {at["tp"]}).update({at["tp"]}, alike[id(one.arrays)])
    if _whole_model(found):
        for stage in range(layout.pp):
            needed.setdefault(stage, set.union(*needed.values()) if needed else set())
    return {
        rank
        for rank, at in coords.items()
        # weights are the same in all replicas: the first writes them
        if at["tp"] in needed.get(at["pp"], ()) and not (found[0].stream == WEIGHTS and (at["dp"] or at["cp"]))
    }


def _writers(found: Found, layout: Layout) -> set[int]:
    """Return the tensor-parallel ranks that must hold the rest of what a block's shards are parts of."""
    out: set[int] = set()
    for name in (*found.part.shards, *found.others):
        attrs = found.arrays[name].attrs
        shard = attrs.get("shard")
        if not isinstance(shard, Mapping):
            continue
        for dim, part in (shard.get("split") or {}).items():
            if dim not in (attrs.get("chosen") or {}):  # of chosen heads a rank may have none
                out.update(range(0, layout.tp, max(1, layout.tp // int(part["size"]))))
        if str(shard.get("token", "")).endswith("sp"):
            out.update(range(layout.tp))
    return out


def _whole_model(found: Sequence[Found]) -> bool:
    """Return whether the plan takes every layer of the model in this stream, and the model is known to have more than were found."""
    plan = found[0].attrs.get("plan") or {}
    rules = plan.get("rules", []) if isinstance(plan, Mapping) else []
    rule = next((r for r in rules if r.get("name") == found[0].stream), None)
    if rule is None or rule.get("layers") is not None:
        return False
    return all(
        not str(p).startswith("layers.") and p not in ("embed", "logits", "final_ln") for p in rule.get("points", ())
    )


def _steps_text(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps ({steps[0]} to {steps[-1]})"
