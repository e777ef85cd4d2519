"""noise_of(): the noise of a real run, as samples for generated ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

from mappnb.analysis import match
from mappnb.analysis.matching import calls_of
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.terms import Category, Phase
from mappnb.testing._gen_settings import Noise

__all__ = ["noise_of"]

Floats = npt.NDArray[np.float64]
MAX_SAMPLES = 20_000
"""Samples kept of each kind; more are thinned evenly over the sorted values, which keeps every quantile."""
LEAST_CALLS = 5
"""Calls of one kind of transfer that its usual time, the median, is taken of."""
LEAST_PEERS = 3
"""Calls of one kind in a step from which on their median tells an incident of the step from the noise of a call."""
_ACTION = ["rank", "step", "stage", "chunk", "microbatch"]


def noise_of(run: Run | xr.Dataset, *, exclude_ranks: Sequence[int] = (), by_length: bool = False) -> Noise:
    """Return the noise of a run, resampled: what its durations vary by, without what is wrong with it.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        A recorded or imported run with forwards and backwards, or with collectives only.
    exclude_ranks : sequence of int
        Ranks that are left out, such as a culprit, and the transfers that they take part in.
    by_length : bool
        The durations follow the lengths of the samples: the time of a forward (backward) is compared with what the backward
        (forward) of the same microbatch on the same rank lets expect, and what is left is noise of both.

    Returns
    -------
    Noise
        ``compute_ratios``: forwards and backwards over the median of their kind, rank and step. ``rank_ratios``: ranks over the
        ranks of the same stage. ``drift_sigma``, ``drift_memory``: of the medians of a rank from step to step.
        ``collective_ratios``, ``message_ratios``: transfers over the median of their kind and members, and over that of all calls
        of the kind in the step, for one incident is not the noise of each call. ``exit_samples_s``: members' ends after the
        first member's end. No ``jitter``: long delays are in the samples. With ``by_length``, what a rank is slower by all along or
        in a step cannot be told from the lengths: no ``rank_ratios`` and no drift then. Where a run has nothing of a kind, that
        noise is 0.

    Raises
    ------
    MappnbError
        If the run has neither compute nor complete collectives.

    Notes
    -----
    A transfer is its end minus the last arrival of its members, as in StragglerAnalysis (arXiv:2505.05713, 3.2); a message counts
    where its receiver was there before it was sent.
    """
    events = run.sel() if isinstance(run, Run) else run
    compute = _compute(events, exclude_ranks)
    found: dict[str, Any] = _compute_noise(compute, by_length) if len(compute) else {}
    found |= _transfer_noise(events, exclude_ranks)
    if not any(found.get(k) for k in ("compute_ratios", "collective_ratios", "message_ratios", "exit_samples_s")):
        raise MappnbError(
            f"noise_of: the run has no forwards, backwards or complete collectives of ranks other than {list(exclude_ranks)}; "
            "give a run with phases (forward, backward) or with groups and seq of its collectives"
        )
    none = {
        "compute_sigma": 0.0,
        "rank_sigma": 0.0,
        "drift_sigma": 0.0,
        "jitter_probability": 0.0,
        "network_sigma": 0.0,
        "exit_s": 0.0,
    }
    return Noise(**(none | found))


def _compute(events: xr.Dataset, exclude_ranks: Sequence[int]) -> pd.DataFrame:
    """Return forwards and backwards with their durations, s: outermost spans of the phases."""
    phase = events.phase.values
    mine = (events.category.values == Category.COMPUTE) & (phase != str(Phase.NONE))
    mine &= ~np.isin(events["rank"].values, list(exclude_ranks)) & (events.duration_ns.values > 0)
    depth = events.depth.values
    mine &= depth == (depth[mine].min() if mine.any() else 0)
    index = np.flatnonzero(mine)
    columns = {name: events[name].values[index] for name in (*_ACTION, "phase")}
    return pd.DataFrame(columns | {"seconds": events.duration_ns.values[index] / 1e9})


def _compute_noise(compute: pd.DataFrame, by_length: bool) -> dict[str, Any]:
    kind = ["stage", "chunk", "phase"]
    if by_length:
        compute = compute.assign(seconds=_without_length(compute, kind)).dropna(subset=["seconds"])
    own = compute.seconds / compute.groupby(["rank", *kind]).seconds.transform("median")
    level = own.groupby([compute["rank"], compute["step"]]).transform("median")
    if by_length:
        return {"compute_ratios": _thinned(own)}
    out: dict[str, Any] = {"compute_ratios": _thinned(own / level), "rank_ratios": _rank_ratios(compute, kind)}
    steps = np.log(own.groupby([compute["rank"], compute["step"]]).median().unstack("step").to_numpy())
    if steps.shape[1] > 2 and np.isfinite(steps).all():
        centred = steps - steps.mean(axis=1, keepdims=True)
        memory = (centred[:, 1:] * centred[:, :-1]).sum() / max(float((centred**2).sum()), np.finfo(float).tiny)
        out |= {"drift_sigma": float(centred.std()), "drift_memory": float(np.clip(memory, 0.0, 1.0))}
    return out


def _rank_ratios(compute: pd.DataFrame, kind: list[str]) -> tuple[float, ...]:
    """Return ranks over the median of the ranks that have the same work; of those that have peers."""
    ranks = compute.groupby([*kind, "rank"]).seconds.median()
    peers = ranks.groupby(level=kind)
    ratio = (ranks / peers.transform("median"))[peers.transform("size") > 1]
    return _thinned(ratio.groupby(level="rank").median())


def _without_length(compute: pd.DataFrame, kind: list[str]) -> pd.Series:
    """Return durations over what the other phase of the same microbatch lets expect: a quadratic of the logarithms by kind."""
    phases = [str(Phase.FORWARD), str(Phase.BACKWARD)]
    wide = compute.pivot_table(index=_ACTION, columns="phase", values="seconds", aggfunc="sum").reindex(columns=phases)
    out = pd.Series(np.nan, index=compute.index)
    for (_, _, phase), rows in compute[compute.phase.isin(phases)].groupby(kind):
        other = wide[phases[phase == phases[0]]].reindex(pd.MultiIndex.from_frame(rows[_ACTION])).to_numpy()
        x, y, there = np.log(other), np.log(rows.seconds.to_numpy()), np.isfinite(other)
        if there.sum() > 3:
            x0, scale = x[there].mean(), float(x[there].std()) or 1.0
            line = np.polyfit((x[there] - x0) / scale, y[there], 2)
            out.loc[rows.index[there]] = np.exp(y[there] - np.polyval(line, (x[there] - x0) / scale))
    return out


def _transfer_noise(events: xr.Dataset, exclude_ranks: Sequence[int]) -> dict[str, Any]:
    calls = match(events)
    rank = calls["rank"].values
    there = rank >= 0
    kept = calls.complete.values & (there.sum(axis=1) > 1) & ~np.isin(rank, list(exclude_ranks)).any(axis=1)
    if not kept.any():
        return {}
    late_send = _sender_last(events)[kept]
    calls, there = calls.isel(call=np.flatnonzero(kept)), there[kept]
    table = _transfers(calls, there)
    table = table[(table.seconds > 0) & (~table.p2p | late_send)]
    usual = table.groupby(["op", "group", "size", "a", "b"]).seconds
    ratio = (table.seconds / usual.transform("median"))[usual.transform("size") >= LEAST_CALLS]
    ratio = ratio / _of_the_step(ratio, table)
    end = calls.end_ns.values
    after = (end - np.where(there, end, np.iinfo(np.int64).max).min(axis=1)[:, None]) / 1e9
    p2p = table.p2p[ratio.index]
    return {
        "collective_ratios": _thinned(ratio[~p2p]),
        "message_ratios": _thinned(ratio[p2p]),
        "exit_samples_s": _thinned(after[there & (calls.op.values != "send_recv")[:, None]]),
    }


def _sender_last(events: xr.Dataset) -> npt.NDArray[np.bool_]:
    """Return for each call of ``match`` whether its last member to come sends: only then does the receiver see all of the transfer."""
    calls = calls_of(events)
    start = events.start_ns.values[calls.index]
    last = np.lexsort((calls.transfers.sending[calls.entry], start, calls.call))[
        np.append(calls.first[1:], len(start)) - 1
    ]
    return np.asarray(calls.transfers.sending[calls.entry[last]], np.bool_)


def _transfers(calls: xr.Dataset, there: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """Return the time of each call after its last member came, s, and what tells its kind; a and b are the ranks of a message."""
    low = np.iinfo(np.int64).min
    start, end = (np.where(there, calls[name].values, low).max(axis=1) for name in ("start_ns", "end_ns"))
    p2p = calls.op.values == "send_recv"
    table = {name: calls[name].values for name in ("op", "group", "step")}
    table |= {
        "members": there.sum(axis=1),
        "size": calls.bytes.values.max(axis=1),
        "seconds": (end - start) / 1e9,
        "p2p": p2p,
    }
    pair = np.sort(calls["rank"].values, axis=1)
    return pd.DataFrame(table | {name: np.where(p2p, pair[:, i], -1) for name, i in (("a", -2), ("b", -1))})


def _of_the_step(ratio: pd.Series, table: pd.DataFrame) -> pd.Series:
    """Return by how much all calls of a kind were slower together in a step; NaN where too few calls could tell."""
    same = ratio.groupby([table.step, table.op, table["size"], table.members])
    return same.transform("median").where(same.transform("size") >= LEAST_PEERS)


def _thinned(values: Any) -> tuple[float, ...]:
    """Return at most MAX_SAMPLES of the sorted finite values, evenly over their quantiles."""
    values = np.sort(np.asarray(values, np.float64))
    values = values[np.isfinite(values)]
    if len(values) > MAX_SAMPLES:
        values = values[((np.arange(MAX_SAMPLES) + 0.5) * len(values) / MAX_SAMPLES).astype(int)]
    return tuple(values.tolist())
