"""Microbatches of unequal work: what the lengths of documents explain, and what evening them out would buy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._skew_cures import ASSUMES, deal, orders, split_by_document
from mappnb.analysis._skew_fit import Fit, fit_lengths
from mappnb.analysis._skew_times import BACKWARD, compute_times, documents_of
from mappnb.analysis._straggler_skew import CORRELATION, VARIATION
from mappnb.analysis._whatif_case import Case
from mappnb.analysis._whatif_model import Model
from mappnb.analysis._whatif_source import Steps, model_of, steps_of
from mappnb.errors import MappnbError
from mappnb.run import Run

__all__ = ["length_model", "length_signature", "skew_cures"]

Array = np.ndarray[Any, Any]


def length_model(run: Run, *, step: Steps | None = None) -> xr.Dataset:
    """Return how compute time grows with the lengths of documents, per stage and phase.

    Parameters
    ----------
    run : Run
        With the metric ``document_tokens``: a value per document, with its step and microbatch.
    step : int, slice or list of int, optional
        Steps to fit; as :func:`what_if` chooses them by default.

    Returns
    -------
    Dataset, dims (stage, phase)
        ``seconds = fixed_s + per_token_s * sum(len) + per_square_s * sum(len**2)`` of a microbatch on one rank: ``fixed_s`` in s,
        ``per_token_s``, ``per_square_s``; ``explained``: share of the variance; ``excess_explained``: of the time above the mean in the
        microbatches above it, the part that the lengths give; ``residual_s``, typical residual, s; ``count`` microbatches. NaN
        where a stage has no such phase. A sum that does not vary (packed sequences) has coefficient 0, and is in ``fixed_s``.

    Raises
    ------
    MappnbError
        If the run has no lengths, or none of the steps has both lengths and compute.

    Notes
    -----
    Huber's robust regression over all ranks, microbatches and steps: a rank that is slow by itself shows as residual.
    """
    table = _measured(run, steps_of(run, step))
    fits = _fits(table)
    stages, phases = sorted({s for s, _ in fits}), sorted({p for _, p in fits})
    units = {
        "fixed_s": ("s", "time whatever the lengths"), "per_token_s": ("s", "per token"), "per_square_s": ("s", "per squared token"),
        "explained": ("1", "share of the variance that the lengths explain"),
        "excess_explained": ("1", "share of the time above the mean that the lengths explain"),
        "residual_s": ("s", "typical residual"), "count": ("1", "microbatches"),
    }  # fmt: skip
    values = {
        name: [[getattr(fits[s, p], name) if (s, p) in fits else np.nan for p in phases] for s in stages]
        for name in units
    }
    return xr.Dataset(
        {n: (("stage", "phase"), values[n], {"units": u, "long_name": meaning}) for n, (u, meaning) in units.items()},
        {"stage": stages, "phase": np.array(phases, object)},
    )


def _measured(run: Run, events: xr.Dataset) -> pd.DataFrame:
    """Return compute times beside the sums of lengths of their microbatches."""
    sums = documents_of(run, steps=np.unique(events["step"].values)).sums()
    table = compute_times(events).join(sums, on=["step", "dp_rank", "microbatch"], how="inner")
    if not len(table):
        raise MappnbError(
            f"{run.path}: no step has both recorded lengths and compute with microbatches; give other steps by step="
        )
    return table


def _fits(table: pd.DataFrame) -> dict[tuple[int, str], Fit]:
    """Return the fit of each stage and phase."""
    out = {}
    for stage in np.unique(table["stage"]).tolist():
        for phase in sorted(set(table["phase"])):
            mine = table[(table["stage"] == stage) & (table["phase"] == phase)]
            if len(mine):
                out[stage, phase] = fit_lengths(*(mine[c].to_numpy() for c in ("seconds", "tokens", "squares")))
    return out


def skew_cures(run: Run, *, step: Steps | None = None) -> xr.Dataset:
    """Return what three cures for unequal microbatches would save, by replay.

    Parameters
    ----------
    run : Run
        With the metric ``document_tokens``.
    step : int, slice or list of int, optional
        Steps to replay; as :func:`what_if` chooses them by default.

    Returns
    -------
    Dataset, dims (step, cure)
        ``fixed_s`` (step, cure), s; ``gain_s`` (cure), mean s per step; ``gain_fraction`` (cure), of the recorded step;
        ``reliable_gain`` (cure); ``assumes`` (cure), in words; ``step_s`` (step), s; ``replay_error`` (). Cures: "balanced packing",
        "reordered microbatches", "context-parallel split by document".

    Raises
    ------
    MappnbError
        As :func:`length_model`.

    Notes
    -----
    Each microbatch's compute is scaled by what the fit of :func:`length_model` gives for its new documents over what it gives for the
    old ones, rank by rank, so that slow ranks stay slow; then the step is replayed with its launch delays. WLB-LLM (arXiv:2503.17924)
    and ByteDance (arXiv:2505.05713) describe the cures.
    """
    events = steps_of(run, step)
    table = _measured(run, events)
    fits = _fits(table)
    model = model_of(run, np.unique(events["step"].values).tolist())
    documents = documents_of(run, steps=model.steps)
    sums = documents.sums()
    usual = float(sums["tokens"].mean())
    fits = {key: fit.movable(usual) for key, fit in fits.items()}
    whole = _whole(fits)
    priced = _Priced(model, fits, sums)
    packed = deal(documents, lambda n: np.asarray(whole.per_token_s * n + whole.per_square_s * n**2)).sums()
    times = {
        "balanced packing": priced.best(orders(packed, whole)),
        "reordered microbatches": priced.best(orders(sums, whole)),
        "context-parallel split by document": priced.times(split_by_document(sums)),
    }
    return _cures(priced.case, times)


def _whole(fits: dict[tuple[int, str], Fit]) -> Fit:
    """Return the sum over stages and phases: what a microbatch costs the whole pipeline."""
    parts = [sum(getattr(f, n) for f in fits.values()) for n in ("fixed_s", "per_token_s", "per_square_s")]
    return Fit(parts[0], max(parts[1], 0.0), max(parts[2], 0.0), np.nan, np.nan, np.nan, 0)


class _Priced:
    """Replays of steps whose microbatches have other documents."""

    def __init__(self, model: Model, fits: dict[tuple[int, str], Fit], sums: pd.DataFrame) -> None:
        self.case, self.fits = Case(model, "median", over_stages=False), fits
        if model.microbatch is None or model.phase is None:
            raise MappnbError("skew_cures: the run does not tell microbatches and phases of its compute")
        self.model, self.microbatch, self.phase = model, model.microbatch, model.phase
        self.old = sums

    def best(self, ordered: dict[str, pd.DataFrame]) -> Array:
        """Return how long the steps take in the best of some orders, dims (step,), s."""
        times = np.stack([self.times(s) for s in ordered.values()])
        return np.asarray(times[times.mean(axis=1).argmin()])

    def times(self, sums: pd.DataFrame) -> Array:
        """Return how long the steps take, dims (step,), s."""
        m = self.model
        keys = pd.MultiIndex.from_arrays([m.steps[m.step], m.dp_rank, self.microbatch], names=self.old.index.names)
        new, old = (s.reindex(keys) for s in (sums, self.old))
        scale = np.ones(len(m))
        for (stage, phase), fit in self.fits.items():
            mine = np.flatnonzero((m.stage == stage) & (self.phase == phase) & old["tokens"].notna().to_numpy())
            before = fit.predict(old["tokens"].to_numpy()[mine], old["squares"].to_numpy()[mine])
            tokens, squares = new["tokens"].fillna(0).to_numpy()[mine], new["squares"].fillna(0).to_numpy()[mine]
            after = np.maximum(fit.predict(tokens, squares), 0)
            scale[mine] = np.where(before > 0, after / np.where(before > 0, before, 1), 1)
        return m.times(m.measured_s * scale, m.graph.delays_s)


def _cures(case: Case, times: dict[str, Array]) -> xr.Dataset:
    recorded = float(case.model.recorded_s.mean())
    fixed = np.stack([times[c] for c in ASSUMES], 1)
    gain = case.delayed_s.mean() - fixed.mean(axis=0)
    s, one = {"units": "s"}, {"units": "1"}
    return xr.Dataset(
        {
            "fixed_s": (("step", "cure"), fixed, s | {"long_name": "length of the step with the cure"}),
            "gain_s": ("cure", gain, s | {"long_name": "mean time that the cure saves in a step"}),
            "gain_fraction": ("cure", gain / recorded, one | {"long_name": "gain_s over the recorded step"}),
            "reliable_gain": (
                "cure",
                np.abs(gain) > case.error * recorded,
                one | {"long_name": "larger than the replay error"},
            ),
            "assumes": (
                "cure",
                np.array(list(ASSUMES.values()), object),
                one | {"long_name": "what the price takes for granted"},
            ),
            "step_s": ("step", case.model.recorded_s, s | {"long_name": "length of the step as recorded"}),
            "replay_error": ((), case.error, one | {"long_name": "how far the replay is from the recording"}),
        },
        {"step": case.model.steps, "cure": np.array(list(ASSUMES), object)},
    )


def length_signature(run: Run | xr.Dataset, *, step: Steps | None = None) -> xr.Dataset:
    """Return whether unequal microbatches look like unequal lengths: forward and backward go together, and the slowest rank changes.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, generated or imported; lengths are not needed.
    step : int, slice or list of int, optional
        Steps to look at; as :func:`what_if` chooses them by default.

    Returns
    -------
    Dataset, dims (rank,)
        ``correlation`` (rank): of forward and backward of the same microbatch, within the rank; ``cv`` (rank): standard deviation of its
        forwards over their mean (each stage of the rank by itself); ``skewed`` (rank): 0.95 and 0.05 at least; ``slowest_share``
        (rank): steps in which the rank's replica computes longest of its stage; ``skewed_share`` (): of ranks; ``moving`` ():
        1 less the largest share of steps in which a replica is the slowest of a stage: 0 where it is always the same one in some stage,
        near 1 - 1/n for n replicas that take turns; NaN where there is one replica. NaN where a rank has fewer than 3 pairs.

    Raises
    ------
    MappnbError
        If no compute tells its microbatch.

    Notes
    -----
    arXiv:2505.05713. Within a rank: pooled over ranks a slow GPU correlates too, for its forwards and backwards are both slow.
    """
    table = compute_times(steps_of(run, step))
    if not len(table):
        raise MappnbError(
            "length_signature: no compute tells its stage and microbatch; record with plan='default' or import such a trace"
        )
    wide = _pairs(table)
    ranks = np.unique(table["rank"].to_numpy())
    pairs = wide.dropna(subset=["forward", "backward"]).groupby("rank")
    correlation = pd.Series({r: _correlation(p) for r, p in pairs}, dtype=float).reindex(ranks).to_numpy()
    cv = wide.groupby("rank")["forward"].std(ddof=0).reindex(ranks).to_numpy()
    skewed = (correlation >= CORRELATION) & (cv >= VARIATION)
    share, moving = _slowest(table)
    one = {"units": "1"}
    return xr.Dataset(
        {
            "correlation": (
                "rank",
                correlation,
                one | {"long_name": "of forward and backward of a microbatch, within the rank"},
            ),
            "cv": ("rank", cv, one | {"long_name": "standard deviation of the forwards of a rank over their mean"}),
            "skewed": (
                "rank",
                skewed,
                one | {"long_name": f"correlation at least {CORRELATION} and cv at least {VARIATION}"},
            ),
            "slowest_share": (
                "rank",
                share.reindex(ranks).to_numpy(),
                one | {"long_name": "steps in which its replica is slowest"},
            ),
            "skewed_share": ((), float(skewed.mean()), one | {"long_name": "ranks that are skewed"}),
            "moving": ((), moving, one | {"long_name": "how much the slowest replica changes from step to step"}),
        },
        {"rank": ranks},
    )


def _pairs(table: pd.DataFrame) -> pd.DataFrame:
    """Return forward and backward of each microbatch on each rank, over the mean of its stage there."""
    kind = np.where(table["phase"].isin(BACKWARD), "backward", np.where(table["phase"] == "forward", "forward", ""))
    keys = ["step", "rank", "dp_rank", "stage", "microbatch"]
    wide: pd.DataFrame = (
        table.assign(kind=kind)[kind != ""].pivot_table("seconds", keys, "kind", aggfunc="sum").reset_index()
    )
    for name in ("forward", "backward"):
        if name not in wide:
            wide[name] = np.nan
        wide[name] /= wide.groupby(["rank", "stage"])[name].transform("mean")
    return wide


def _correlation(pairs: pd.DataFrame) -> float:
    x, y = pairs["forward"].to_numpy(), pairs["backward"].to_numpy()
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return np.nan
    return float(np.corrcoef(x, y)[0, 1])


def _slowest(table: pd.DataFrame) -> tuple[pd.Series, float]:
    """Return the share of steps in which each rank's replica is the slowest of its stage, and how much that changes."""
    total = table.groupby(["step", "stage", "dp_rank"], as_index=False)["seconds"].sum()
    if total["dp_rank"].nunique() < 2:
        return pd.Series(dtype=float), np.nan
    worst = total.loc[total.groupby(["step", "stage"])["seconds"].idxmax()]
    counts = worst.groupby(["stage", "dp_rank"]).size() / total["step"].nunique()
    places = table[["rank", "stage", "dp_rank"]].drop_duplicates()
    share = pd.Series(
        counts.reindex(pd.MultiIndex.from_frame(places[["stage", "dp_rank"]])).fillna(0).to_numpy(), places["rank"]
    )
    return share.groupby(level=0).mean(), 1 - float(counts.groupby("stage").max().max())
