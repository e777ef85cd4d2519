"""What would it buy: steps replayed with parts of the run made ideal, or with only one part as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._whatif_attribution import attributed
from mappnb.analysis._whatif_case import GROUPINGS, Case
from mappnb.analysis._whatif_fix import Fix, chosen, compares_stages, read_fix
from mappnb.analysis._whatif_ideal import check_ideal
from mappnb.analysis._whatif_model import Model
from mappnb.analysis._whatif_results import attributions, overall, shares
from mappnb.analysis._whatif_source import Steps, hosts_of, model_of
from mappnb.errors import MappnbError, did_you_mean
from mappnb.run import Run

__all__ = ["attribute", "price_fixes", "what_if"]

_BY = ("dp_rank", "stage", "rank", "op")


def what_if(
    run: Run | xr.Dataset,
    *,
    ideal: str = "median",
    fix: Fix | Sequence[Fix] | None = None,
    step: Steps | None = None,
    by: Sequence[str] = _BY,
    over_stages: bool | None = None,
    delays: bool | None = None,
) -> xr.Dataset:
    """Return what stragglers cost: steps as replayed, as they could be, with only one part slow, and with one part fixed.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, generated or imported; of a StragglerAnalysis trace the artifact's own dependency model is used.
    ideal : str
        How long an operation takes where nothing is wrong. ``"mean"``: the mean of work and the median of transfers of its kind, as
        ByteDance's artifact has it; ``"median"`` or ``"min"`` of its kind over steps, ranks and microbatches; ``"peers"``: the median
        over the ranks of its stage, of the same operation of the same step.
    fix : dict, str, tuple or list of these, optional
        What to make ideal while the rest stays as measured: ``{"rank": 5}``, ``{"stage": 1}``, ``{"link": (3, 7)}`` or ``"3->7"``,
        ``{"op": "backward"}``, ``{"step": 4}``, ``{"host": "node3"}``, ``{"dp_rank": 0}``; several keys cross
        (``{"rank": [5, 6], "op": "forward"}``), a list is all of its parts.
    step : int, slice or list of int, optional
        Steps to answer for, both ends of a slice included; all by default, or of a large run evenly spaced ones (``attrs`` say which).
    by : sequence of str
        Attributions to replay: of ``"dp_rank", "stage", "rank", "op", "host", "link"``. The first two also give the worker shares.
    over_stages : bool, optional
        Whether stages, too, should take equally long. By default True for slowdowns; for a fix only where it names a stage, or takes
        in half of the ranks of one or more (which cannot be their own measure), or ``ideal="mean"``; never for ``"peers"``.
    delays : bool, optional
        Whether a fix keeps the launch delays of the rest. By default not for StragglerAnalysis traces, as published; else yes.

    Returns
    -------
    Dataset, dims (step, dp_rank, stage, rank, op)
        ``step_s, replay_s, ideal_s, launch_delay_s, step_slowdown, launch_step_slowdown`` (step); ``slowdown, launch_slowdown,
        wasted_fraction, wasted_gpu_hours, replay_error, reliable`` (); for each grouping ``slowdown_by_X`` (X),
        ``step_slowdown_by_X`` (step, X) and ``reliable_by_X`` (X): the mean length with only X as measured, over all ideal;
        ``slowdown_by_worker`` (dp_rank, stage); ``worst_worker_share, last_stage_share`` (): M_W and M_S, what part of the excess goes
        if these are made ideal (``..._added_share``: comes if only these are as measured), and the lengths behind them.
        With ``fix``: ``fixed_s`` (step), s, ``gain_s`` (), mean s per step, ``gain_fraction`` () of the recorded step,
        ``reliable_gain`` (). Times in s. ``attrs`` say what was done. No conclusion smaller than ``replay_error`` is one:
        ``reliable`` variables are False there.

    Raises
    ------
    MappnbError
        If a word is unknown, a fix names what is not there, or the run has no events of a step.

    Notes
    -----
    arXiv:2505.05713 (Understanding Stragglers in Large Model Training Using What-if Analysis). Starts follow from dependencies only;
    the gap between the end of what an operation waits for and its start is its launch delay, kept apart. ``replay_error`` is, of a
    StragglerAnalysis trace, the difference that leaving out the delays makes, as published; of other runs that of the replay with
    delays. It tells that the graph holds what was recorded, not that the job would have answered to a change as the graph does.
    """
    check_ideal(ideal)
    _check_by(by)
    crossings = None if fix is None else read_fix(fix)
    model, hosts = model_of(run, step), hosts_of(run)
    pooled = ideal != "peers" and (over_stages is None or over_stages)
    case = Case(model, ideal, pooled)
    found, coords = attributions(case, by, hosts)
    out = xr.Dataset({**overall(case), **found}, {"step": model.steps, **coords}, _attrs(model, ideal, pooled))
    if {"slowdown_by_dp_rank", "slowdown_by_stage"} <= set(out):
        out = shares(case, out, by)
    if crossings is None:
        return out
    fixed = _Fixed(model, hosts, ideal, over_stages, delays)
    return _with_fix(out, fixed, crossings, str(fix))


def price_fixes(
    run: Run | xr.Dataset,
    *,
    fixes: Sequence[Fix | Sequence[Fix]],
    ideal: str = "median",
    step: Steps | None = None,
    over_stages: bool | None = None,
    delays: bool | None = None,
) -> xr.Dataset:
    """Return what each of several fixes would save: :func:`what_if` with each, the run read once.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        See :func:`what_if`.
    fixes : sequence
        Each as ``fix`` of :func:`what_if`.
    ideal, step, over_stages, delays
        See :func:`what_if`.

    Returns
    -------
    Dataset, dims (step, fix)
        ``fixed_s`` (step, fix), s; ``gain_s`` (fix), mean s per step; ``gain_fraction`` (fix); ``gain_gpu_hours`` (fix), over the steps
        analysed; ``reliable_gain`` (fix); ``step_s`` (step); ``replay_error`` (). Coordinate ``fix``: the fixes in words.

    Raises
    ------
    MappnbError
        As :func:`what_if`.
    """
    check_ideal(ideal)
    crossings = [read_fix(f) for f in fixes]
    model, hosts = model_of(run, step), hosts_of(run)
    asked = _Fixed(model, hosts, ideal, over_stages, delays)
    times = [asked.times(c) for c in crossings]
    fixed = np.stack([t for t, _, _ in times], 1) if times else np.empty((len(model.steps), 0))
    gain = np.array([float(before.mean() - t.mean()) for t, before, _ in times])
    recorded, error = float(model.recorded_s.mean()), asked.error
    hours = gain * len(model.steps) * model.num_gpus / 3600
    return xr.Dataset(
        {
            "fixed_s": (("step", "fix"), fixed, {"units": "s", "long_name": "length with the fix"}),
            "gain_s": ("fix", gain, {"units": "s", "long_name": "mean time that the fix saves in a step"}),
            "gain_fraction": ("fix", gain / recorded, {"units": "1", "long_name": "gain_s over the recorded step"}),
            "gain_gpu_hours": ("fix", hours, {"units": "h", "long_name": "gain_s times steps analysed and GPUs"}),
            "reliable_gain": (
                "fix",
                np.abs(gain) > error * recorded,
                {"units": "1", "long_name": "larger than the replay error"},
            ),
            "step_s": ("step", model.recorded_s, {"units": "s", "long_name": "length of the step as recorded"}),
            "replay_error": ((), error, {"units": "1", "long_name": "how far the replay is from the recording"}),
        },
        {"step": model.steps, "fix": np.array([str(f) for f in fixes], object)},
        _attrs(model, ideal, over_stages is not False and ideal != "peers"),
    )


@dataclass(eq=False)
class _Fixed:
    """Replays of one model with fixes. Ideals that compare stages, and those that do not, are made when first needed."""

    model: Model
    hosts: dict[int, str]
    ideal: str
    over_stages: bool | None
    delays: bool | None

    def __post_init__(self) -> None:
        self.cases = {wide: Case(self.model, self.ideal, wide) for wide in (False, True)}

    @property
    def kept(self) -> bool:
        """Whether launch delays are kept."""
        return self.model.source != "straggler_analysis" if self.delays is None else self.delays

    @property
    def error(self) -> float:
        """Replay error."""
        return self.cases[False].error

    def case(self, crossings: list[dict[str, list[Any]]], mask: Any) -> Case:
        """Return the case with the ideal that a fix is measured by."""
        wide = self.over_stages
        if wide is None:
            wide = self.ideal == "mean" or compares_stages(crossings, mask, self.model)
        return self.cases[wide and self.ideal != "peers"]

    def times(self, crossings: list[dict[str, list[Any]]]) -> tuple[Any, Any, Case]:
        """Return steps with the fix and without, dims (step,), s, and the case."""
        mask = chosen(crossings, self.model, self.hosts)
        case = self.case(crossings, mask)
        replayed = self.cases[False]
        return case.without(mask, delays=self.kept), replayed.delayed_s if self.kept else replayed.replay_s, case


def _check_by(by: Sequence[str]) -> None:
    for word in by:
        if word not in GROUPINGS:
            raise MappnbError(
                f"what_if: cannot group by {word!r}; known: {', '.join(GROUPINGS)}{did_you_mean(word, GROUPINGS)}"
            )


def _attrs(model: Model, ideal: str, pooled: bool) -> dict[str, Any]:
    says = {
        "mean": "mean of work, median of transfers, of each kind of operation",
        "median": "median of each kind of operation",
        "min": "least of each kind of operation",
        "peers": "median over the ranks of the stage, of the same operation of the same step",
    }[ideal]
    where = "over steps, ranks, microbatches" + (" and stages" if pooled else "") if ideal != "peers" else ""
    return {
        "ideal": f"{ideal}: {says} {where}".rstrip(),
        "error": "no conclusion smaller than replay_error is one; the reliable variables are False there",
        "num_gpus": model.num_gpus,
        **{k: v for k, v in model.attrs.items() if v},
    }


def _with_fix(out: xr.Dataset, asked: _Fixed, crossings: list[dict[str, list[Any]]], words: str) -> xr.Dataset:
    fixed, before, case = asked.times(crossings)
    gain, recorded = float(before.mean() - fixed.mean()), float(asked.model.recorded_s.mean())
    kept = "with the launch delays of the rest" if asked.kept else "without launch delays"
    units = {"units": "s"}
    out = out.assign(
        fixed_s=("step", fixed, {**units, "long_name": f"length with {words} ideal and the rest as measured, {kept}"}),
        gain_s=((), gain, {**units, "long_name": "mean time that the fix saves in a step"}),
        gain_fraction=((), gain / recorded, {"units": "1", "long_name": "gain_s over the recorded step"}),
        reliable_gain=(
            (),
            abs(gain) > case.error * recorded,
            {"units": "1", "long_name": "larger than the replay error"},
        ),
    )
    over = ", stages too" if case.over_stages else ""
    out.attrs.update(fix=words, fix_ideal=f"{case.ideal}{over}", fix_delays=kept)
    return out


def attribute(
    run: Run | xr.Dataset,
    *,
    by: str = "stage",
    method: str = "add_one_in",
    ideal: str = "median",
    step: Steps | None = None,
    over_stages: bool = True,
) -> xr.Dataset:
    """Return what each group makes the steps longer than ideal, by one of three ways of asking.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        See :func:`what_if`.
    by : str
        ``"stage", "dp_rank", "rank", "op", "host"`` or ``"link"``.
    method : str
        ``"add_one_in"``: all ideal but the group; ``"leave_one_out"``: only the group ideal; ``"shapley"``: the mean over all orders in
        which groups can be put back, exact, for at most 8 groups. Only the last sums to the excess.
    ideal, step, over_stages
        See :func:`what_if`.

    Returns
    -------
    Dataset, dims (step, group)
        Dimension ``by``: ``attributed_s`` (group), mean s per step; ``attributed_share`` (group), of the excess;
        ``attributed_step_s`` (step, group); ``reliable`` (group); ``excess_s`` (), mean of replay less ideal; ``residual_s`` (), excess
        less the sum; ``replay_error`` (). Operations of no group are the group ``"other"`` (number -1).

    Raises
    ------
    MappnbError
        If a word is unknown, or there are too many groups for Shapley values.

    Notes
    -----
    Shapley, "A value for n-person games" (1953): 2^n replays. Where two groups hide behind one another (both slow, side by side),
    ``leave_one_out`` gives each nothing and ``add_one_in`` gives each all of it; Shapley values share it.
    """
    check_ideal(ideal)
    _check_by([by])
    model = model_of(run, step)
    case = Case(model, ideal, over_stages and ideal != "peers")
    out = attributed(case, by, method, hosts_of(run))
    return out.assign_attrs(_attrs(model, ideal, case.over_stages) | {"method": method})
