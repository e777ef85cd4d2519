"""Whether a run can be predicted from the costs of another: which of its operations take as long as there, and which do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import CostError
from mappnb.run import Run
from mappnb.sched.measure import Steps, measure, pipeline_ranks
from mappnb.terms import Kind

__all__ = ["Predictability", "changed_costs", "predictable"]

By = Literal["stage", "rank"]
_TOLERANCE = 0.1
"""A tenth: what the Monte Carlo of a schedule hides; the published simulators err by 1 to 8 % (Lumos, Echo, vTrain)."""
_SIGMAS = 3.0
"""A change counts where it is this many standard errors of the two medians."""
_SPLIT = ("I", "W")


@dataclass(frozen=True)
class Predictability:
    """Whether a run can be predicted from the costs of another.

    Attributes
    ----------
    ok : bool
        No operation's duration changed beyond the tolerance.
    why : str
        The reason in words: which operations changed, from what to what.
    changed : DataFrame
        As of :func:`changed_costs`: the operations that changed.
    busy_ratio : float
        Work of the busiest pipeline rank in a step, after over before: how far a prediction would be off at least.
    """

    ok: bool
    why: str
    changed: pd.DataFrame = field(repr=False)
    busy_ratio: float = 1.0

    def __bool__(self) -> bool:
        return self.ok


def changed_costs(
    before: Run | xr.Dataset,
    after: Run | xr.Dataset,
    *,
    tolerance: float = _TOLERANCE,
    by: By = "stage",
    steps: Steps = None,
) -> pd.DataFrame:
    """Return the operations whose durations changed from one run to another, the largest change of a step's work first.

    Parameters
    ----------
    before, after : Run or Dataset, dims (event,)
        Two runs of the same stages; their schedules may differ.
    tolerance : float
        Relative change of the median that counts, where it is also above three standard errors of the two medians.
    by : str
        ``"stage"``, or ``"rank"`` for all stages of a pipeline rank together.
    steps : int, slice or sequence of int, optional
        Steps of both runs to use; by default all but the first.

    Returns
    -------
    DataFrame
        One row per (stage or rank) and ``kind``: ``before_s``, ``after_s`` (medians of one action without its waits, s),
        ``ratio`` (after over before) and ``step_s`` (change of the work in one step, s). Empty if nothing changed.

    Raises
    ------
    CostError
        If the runs have other stages, or ``by`` is unknown.
    """
    table = _compare(before, after, by, steps)
    moved = (table.after_s - table.before_s).abs()
    changed = (moved > tolerance * table.before_s) & (moved > _SIGMAS * table.error_s)
    order = table.step_s.abs().where(changed, -1.0).sort_values(ascending=False, kind="stable").index
    columns = [by, "kind", "before_s", "after_s", "ratio", "step_s"]
    return table.loc[order[: int(changed.sum())], columns].reset_index(drop=True)


def predictable(
    before: Run | xr.Dataset,
    after: Run | xr.Dataset,
    *,
    tolerance: float = _TOLERANCE,
    by: By = "rank",
    steps: Steps = None,
) -> Predictability:
    """Return whether a run's steps can be predicted from the costs of another run, and if not, what changed.

    Parameters
    ----------
    before, after : Run or Dataset, dims (event,)
        The run that costs would be fitted on, and the one to predict.
    tolerance : float
        As of :func:`changed_costs`.
    by : str
        ``"rank"`` or ``"stage"``: what durations are compared of.
    steps : int, slice or sequence of int, optional
        Steps of both runs to use; by default all but the first.

    Notes
    -----
    A simulation moves work about; it does not know that work takes longer beside other work. Where operations themselves
    changed (copies of messages on the same processor, clocks, another batch), no schedule of the old costs gives the new run.
    """
    changed = changed_costs(before, after, tolerance=tolerance, by=by, steps=steps)
    table = _compare(before, after, "rank", steps).groupby("rank")[["work_before_s", "work_after_s"]].sum().max()
    ratio = float(table.work_after_s / table.work_before_s) if table.work_before_s else 1.0
    if not len(changed):
        return Predictability(True, f"every operation is within {tolerance:.0%} of its duration there", changed, ratio)
    words = [
        f"{by} {getattr(row, by)} {row.kind}: {_ms(row.before_s)} -> {_ms(row.after_s)} (×{row.ratio:.2f})"
        for row in changed.itertuples()
    ]
    more = f" and {len(words) - 6} more" if len(words) > 6 else ""
    why = (
        f"not predictable: {len(words)} operations changed by more than {tolerance:.0%}: " + "; ".join(words[:6]) + more
    )
    return Predictability(False, why, changed, ratio)


def _ms(seconds: object) -> str:
    return f"{float(str(seconds)) * 1e3:.3g} ms"


def _compare(before: Run | xr.Dataset, after: Run | xr.Dataset, by: By, steps: Steps) -> pd.DataFrame:
    """Return both runs' durations side by side, one row per (stage or rank) and kind."""
    if by not in ("stage", "rank"):
        raise CostError(f"by is {by!r}; expected 'stage' or 'rank'")
    one, two = (_samples(run, steps) for run in (before, after))
    stages = [set(f.stage) for f in (one, two)]
    if stages[0] != stages[1]:
        raise CostError(
            f"the runs have stages 0 to {max(stages[0])} and 0 to {max(stages[1])}; compare runs of the same stages"
        )
    if set(one.kind) != set(two.kind):
        one, two = _whole(one), _whole(two)
    keys = [by, "kind"]
    parts = [_medians(f, keys) for f in (one, two)]
    both = pd.concat([p.add_suffix(w) for p, w in zip(parts, ("_before", "_after"), strict=True)], axis=1, join="inner")
    both = both.reset_index()
    out = both[keys].copy()
    out["before_s"], out["after_s"] = both.median_before, both.median_after
    out["ratio"] = (both.median_after / both.median_before.where(both.median_before > 0)).fillna(np.inf)
    out["error_s"] = np.hypot(both.error_before, both.error_after)
    out["work_before_s"], out["work_after_s"] = both.work_before, both.work_after
    out["step_s"] = both.work_after - both.work_before
    return out


def _samples(run: Run | xr.Dataset, steps: Steps) -> pd.DataFrame:
    measured = measure(run, steps=steps)
    frame = measured.actions[measured.actions.alone].copy()
    frame["global_rank"] = frame["rank"]
    frame["rank"] = pipeline_ranks(measured.events)[frame["rank"]]
    return frame


def _whole(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the samples with I and W of one backward added up to B."""
    split = frame.kind.isin(_SPLIT)
    if not split.any():
        return frame
    keys = ["incarnation", "step", "rank", "global_rank", "stage", "microbatch"]
    joined = frame[split].groupby(keys).seconds.sum().reset_index().assign(kind=str(Kind.BACKWARD.value))
    parts: list[pd.DataFrame] = [frame.loc[~split], joined]
    return pd.concat(parts, ignore_index=True)


def _medians(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return median, its standard error (from the quartiles), and the work in a step of one rank, s."""
    groups = frame.groupby(keys).seconds
    spread = (groups.quantile(0.75) - groups.quantile(0.25)) / 1.349
    sizes = groups.size()
    per_step = frame[[*keys, "incarnation", "step", "global_rank"]].drop_duplicates().groupby(keys).size()
    medians = groups.median()
    work = groups.sum() / per_step
    return pd.DataFrame({"median": medians, "error": 1.2533 * spread / np.sqrt(sizes), "work": work})
