"""The answers to a what-if as one dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr

from mappnb.analysis._whatif_case import Case, groups_by

__all__ = ["attributions", "overall", "shares"]

Floats = npt.NDArray[np.float64]

WORST_PERCENT: Final = 3
"""Share of the workers that ``worst_worker_share`` makes ideal, %, rounded up (arXiv:2505.05713, M_W)."""
RANK_REPLAY_OPS: Final = 50_000_000
"""Operations replayed at most for ``slowdown_by_rank``: some seconds of one core. Above, a rank gets the score of its worker."""

_OVERALL: Final = {
    "step_s": ("s", "length of the step as recorded"),
    "replay_s": ("s", "length as measured, without launch delays"),
    "ideal_s": ("s", "length if every operation took its ideal time, without launch delays"),
    "launch_delay_s": ("s", "what the launch delays make the step longer"),
    "step_slowdown": ("1", "replay_s over ideal_s"),
    "launch_step_slowdown": ("1", "length with launch delays over replay_s"),
    "slowdown": ("1", "mean of replay_s over mean of ideal_s"),
    "launch_slowdown": ("1", "mean length with launch delays over mean of replay_s"),
    "wasted_fraction": ("1", "1 - 1 / slowdown"),
    "wasted_gpu_hours": ("h", "replay_s less ideal_s, over all steps analysed and all GPUs"),
    "replay_error": (
        "1",
        "how far the replay is from the recording, over the recorded length; nothing smaller is known",
    ),
    "reliable": ("1", "whether the slowdown is larger than the replay error"),
}


def _variable(name: str, dims: tuple[str, ...], value: Any, units: str, meaning: str) -> tuple[Any, ...]:
    return dims, value, {"units": units, "long_name": meaning}


def overall(case: Case) -> dict[str, tuple[Any, ...]]:
    """Return the variables that are about everything: steps, slowdowns, error."""
    m = case.model
    replayed, ideal = case.replay_s, case.ideal_s
    trace = m.source == "straggler_analysis"
    delayed = m.recorded_s if trace else case.delayed_s
    slowdown = float(replayed.mean() / ideal.mean())
    # the artifact's mean of the recorded lengths is a float32 one
    mean = float(delayed.astype(np.float32).mean()) if trace else float(delayed.mean())
    values: dict[str, Any] = {
        "step_s": m.recorded_s,
        "replay_s": replayed,
        "ideal_s": ideal,
        "launch_delay_s": delayed - replayed,
        "step_slowdown": replayed / ideal,
        "launch_step_slowdown": delayed / replayed,
        "slowdown": slowdown,
        "launch_slowdown": mean / replayed.mean(),
        "wasted_fraction": 1 - 1 / slowdown,
        "wasted_gpu_hours": float((replayed - ideal).sum()) * m.num_gpus / 3600,
        "replay_error": case.error,
        "reliable": abs(replayed.mean() - ideal.mean()) > case.error * m.recorded_s.mean(),
    }
    return {
        name: _variable(name, ("step",) if np.ndim(value) else (), value, *_OVERALL[name])
        for name, value in values.items()
    }


def attributions(case: Case, by: Sequence[str], hosts: Mapping[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return variables and coordinates of the slowdowns with only one group as measured, for each grouping of ``by``."""
    out: dict[str, Any] = {}
    coords: dict[str, Any] = {}
    for dim in by:
        groups, place = groups_by(case.model, dim, hosts)
        if not groups:
            continue
        if dim == "rank" and len(groups) * len(case.model) > RANK_REPLAY_OPS:
            continue
        times = np.stack([case.put_back(place == i) for i in range(len(groups))], 1)
        effect = np.abs(times.mean(axis=0) - case.ideal_s.mean())
        only = f"with only one {dim} as measured and the rest ideal, over all ideal"
        coords[dim] = np.array(groups, object) if isinstance(groups[0], str) else groups
        slow = times.mean(axis=0) / case.ideal_s.mean()
        out[f"slowdown_by_{dim}"] = _variable("", (dim,), slow, "1", f"mean length {only}")
        per_step = times / case.ideal_s[:, None]
        out[f"step_slowdown_by_{dim}"] = _variable("", ("step", dim), per_step, "1", f"length {only}")
        sure = effect > case.error * case.model.recorded_s.mean()
        out[f"reliable_by_{dim}"] = _variable(
            "", (dim,), sure, "1", "whether its effect is larger than the replay error"
        )
    return out, coords


def shares(case: Case, found: xr.Dataset, by: Sequence[str]) -> xr.Dataset:
    """Return ``found`` with the score of each worker, and what the worst workers and the last stage explain.

    ``found`` has ``slowdown_by_dp_rank`` and ``slowdown_by_stage``; ``by`` are the attributions asked for.
    """
    m = case.model
    score = np.minimum.outer(found["slowdown_by_dp_rank"].values, found["slowdown_by_stage"].values)
    dps, stages = found["dp_rank"].values, found["stage"].values
    width = int(stages.max()) + 1
    cell = np.where((m.dp_rank >= 0) & (m.stage >= 0), m.dp_rank.astype(np.int64) * width + m.stage, -1)
    cells, first = np.unique(cell, return_index=True)
    first, cells = first[cells >= 0], cells[cells >= 0]
    ranks = m.rank[first].tolist()
    places = [(int(np.searchsorted(dps, c // width)), int(np.searchsorted(stages, c % width))) for c in cells.tolist()]
    scores = [float(score[p]) for p in places]
    order = sorted(range(len(cells)), key=lambda i: (-scores[i], m.order.get(ranks[i], ranks[i])))
    worst = order[: -(-WORST_PERCENT * len(cells) // 100)]
    known = np.full(score.shape, np.nan)
    for p, s in zip(places, scores, strict=True):
        known[p] = s
    out = found.assign(
        slowdown_by_worker=_variable(
            "", ("dp_rank", "stage"), known, "1", "the lesser of the slowdowns of its data-parallel rank and stage"
        )
    )
    out = out.assign(_explained(case, "worst_worker", np.isin(cell, cells[worst])))
    out = out.assign(_explained(case, "last_stage", m.stage == int(stages.max())))
    out.attrs["worst_workers"] = ", ".join(f"dp {cells[i] // width} stage {cells[i] % width}" for i in worst)
    return _rank_scores(case, out, cell, cells, scores) if "rank" in by and "slowdown_by_rank" not in out else out


def _rank_scores(case: Case, out: xr.Dataset, cell: Any, cells: Any, scores: list[float]) -> xr.Dataset:
    """Give each rank its worker's score where ``slowdown_by_rank`` was too much to replay; the attributes say so."""
    m = case.model
    ranks = np.unique(m.rank[m.rank >= 0])
    value = np.full(int(ranks.max(initial=-1)) + 1, 1.0)
    mine = (cell >= 0) & (m.rank >= 0)
    np.maximum.at(value, m.rank[mine], np.array(scores)[np.searchsorted(cells, cell[mine])])
    name = "score of its worker: the lesser of the slowdowns of its data-parallel rank and stage"
    out = out.assign_coords(rank=ranks).assign(slowdown_by_rank=_variable("", ("rank",), value[ranks], "1", name))
    out.attrs["slowdown_by_rank"] = f"{name}; {len(ranks)} ranks are too many to replay each"
    return out


def _explained(case: Case, name: str, mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
    removed, alone = case.without(mask), case.put_back(mask)
    excess = float(case.replay_s.mean() - case.ideal_s.mean())
    share = (case.replay_s.mean() - removed.mean()) / excess if excess else np.nan
    added = (alone.mean() - case.ideal_s.mean()) / excess if excess else np.nan
    words = name.replace("_", " ")
    return {
        f"{name}_share": _variable("", (), share, "1", f"part of the excess that goes if the {words} is made ideal"),
        f"{name}_added_share": _variable(
            "", (), added, "1", f"part of the excess that comes if only the {words} is as measured"
        ),
        f"without_{name}_s": _variable("", ("step",), removed, "s", f"length with the {words} ideal"),
        f"only_{name}_s": _variable("", ("step",), alone, "s", f"length with only the {words} as measured"),
    }
