"""What the stragglers view can show of a rank in a step: its own time, against its peers, and what it waits and makes others wait."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._straggler_base import baseline, own_baseline, roles_of
from mappnb.analysis._work_parts import COMPUTE_KINDS
from mappnb.errors import MappnbError, did_you_mean
from mappnb.layout import Layout

__all__ = ["OTHERS", "Measures", "Metric", "PartRows"]

Array = np.ndarray[Any, Any]
OTHERS: tuple[str, ...] = ("waits for others", "transfers", "makes others wait")
"""What a rank has to do with others, by step, beside its own parts."""
_WORDS = {
    "compute": "compute of no phase",
    "gc": "garbage collection",
    "host": "host and holes",
    "data": "data loading",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One quantity of a rank in a step.

    Attributes
    ----------
    key, label, says : str
        Name in code, in the list of the view, and a sentence.
    scale : str
        ``"ratio"`` (1 is like the peers), ``"above"`` (s, 0 is like the peers), ``"seconds"`` or ``"share"`` (0 to 1).
    """

    key: str
    label: str
    scale: str
    says: str


@dataclass(frozen=True, slots=True)
class PartRows:
    """One rank by part.

    Attributes
    ----------
    names : tuple of str
        Parts, then ``wait``, ``transfer``, ``makes others wait``.
    seconds, peers : float array, dims (part, step)
        s; the median of the peers, or of the rank's own steps where it has none. NaN where nothing was recorded.
    num_peers : int
    """

    names: tuple[str, ...]
    seconds: Array
    peers: Array
    num_peers: int


class Measures:
    """The self-time table (:func:`mappnb.analysis.work`) as the view looks at it; each quantity is worked out once.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
    layout : Layout
        Tells roles where the compute has no stage.
    """

    def __init__(self, work: xr.Dataset, layout: Layout) -> None:
        self.work, self.layout = work, layout
        self.ranks = work["rank"].values.astype(np.int64)
        self.steps = work["step"].values.astype(np.int64)
        self.hosts = [str(h) for h in work["host"].values]
        self.present: Array = work["present"].values
        self._known: dict[str, Array] = {}

    @cached_property
    def role(self) -> Array:
        """Return a number per rank; ranks of equal number work on the same stages: they are peers."""
        return roles_of(self.work, self.layout)

    @cached_property
    def kinds(self) -> list[str]:
        """Kinds of parts that took any time."""
        kind, total = self.work["part_kind"].values.astype(str), self.work["seconds"].values.sum((0, 1))
        return list(dict.fromkeys(k for k, t in zip(kind.tolist(), total.tolist(), strict=True) if t > 0))

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """What can be shown, by key; the first is the default."""
        phases = [k for k in self.kinds if k in COMPUTE_KINDS]
        out = [
            Metric(
                "ratio", "compute, times its peers'", "ratio", "self time in compute over that of its peers in the step"
            ),
            Metric("above_s", "compute above its peers, s", "above", "self time in compute less that of its peers, s"),
            Metric("compute_s", "compute, s", "seconds", "self time in compute, s"),
        ]
        if len(phases) > 1:
            said = ((p, _WORDS.get(p, p.replace("_", " "))) for p in phases)
            out += [
                Metric(_key(p, "ratio"), f"{w}, times its peers'", "ratio", f"self time in {w} over its peers'")
                for p, w in said
            ]
        for kind in self.kinds:
            word = _WORDS.get(kind, kind.replace("_", " "))
            if kind not in phases or len(phases) > 1:
                out.append(Metric(_key(kind, "s"), f"{word}, s", "seconds", f"self time in {word}, s"))
        out += [
            Metric(
                "wait_s", "waits for others, s", "seconds", "blocked in transfers before the last member had come, s"
            ),
            Metric("transfer_s", "transfers, s", "seconds", "blocked in transfers after the last member had come, s"),
            Metric(
                "imposed_s",
                "makes others wait, s",
                "seconds",
                "how much later than the last but one it came, over its calls, s",
            ),
            Metric("last_fraction", "comes last, share of calls", "share", "share of its calls to which it came last"),
        ]
        return {m.key: m for m in out}

    def metric(self, key: str) -> Metric:
        """Return a metric by its key, or raise MappnbError."""
        if key not in self.metrics:
            raise MappnbError(
                f"no metric {key!r}; this run has {', '.join(self.metrics)}{did_you_mean(key, self.metrics)}"
            )
        return self.metrics[key]

    def values(self, key: str) -> Array:
        """Return a quantity, float array, dims (step, rank); NaN where the rank has no events, or no peer and no usual."""
        if key not in self._known:
            self._known[key] = np.where(self.present, self._values(self.metric(key).key), np.nan)
        return self._known[key]

    def _values(self, key: str) -> Array:
        if key in ("wait_s", "transfer_s", "imposed_s"):
            return np.asarray(self.work[key].values, np.float64)
        if key == "last_fraction":
            calls = self.work["calls"].values
            return np.asarray(self.work["last_calls"].values / np.where(calls > 0, calls, np.nan))
        if key in ("ratio", "above_s"):
            own, base = self.compute, self.base
        elif key.endswith("_ratio"):
            own = np.where(self.present, self.seconds_of(_kind(key, "ratio")), np.nan)
            base = self._base(own)
        else:
            return self.compute if key == "compute_s" else self.seconds_of(_kind(key, "s"))
        if key == "above_s":
            return own - base
        with np.errstate(divide="ignore", invalid="ignore"):
            out = own / base
        return np.where(np.isfinite(out), out, np.nan)

    def seconds_of(self, kind: str) -> Array:
        """Return the self time in parts of one kind, s, dims (step, rank)."""
        mine = self.work["part_kind"].values.astype(str) == kind
        return np.asarray(self.work["seconds"].values[:, :, mine].sum(2))

    @cached_property
    def compute(self) -> Array:
        """Self time in compute of all phases, s, dims (step, rank); NaN where the rank has no events."""
        mine = np.isin(self.work["part_kind"].values.astype(str), COMPUTE_KINDS)
        return np.where(self.present, self.work["seconds"].values[:, :, mine].sum(2), np.nan)

    @cached_property
    def base(self) -> Array:
        """What each rank's compute is measured by, s, dims (step, rank)."""
        return self._base(self.compute)

    @cached_property
    def alone(self) -> Array:
        """Ranks that have no peer."""
        return np.asarray(np.bincount(self.role)[self.role] < 2)

    def _base(self, seconds: Array) -> Array:
        """Return the level of the peers as the detector takes it; a rank without peers is measured by its own usual steps."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # steps in which nobody was there
            base, _ = baseline(seconds, self.role)
            usual = own_baseline(seconds, self.alone)
        return np.where(self.alone[None, :], usual, base)

    def index(self, rank: int) -> int:
        """Return the position of a rank, or raise MappnbError."""
        at = np.flatnonzero(self.ranks == rank)
        if not len(at):
            known = f"{int(self.ranks.min())} to {int(self.ranks.max())}" if len(self.ranks) else "none"
            raise MappnbError(f"no rank {rank} with events of a step; there are {known}")
        return int(at[0])

    def peers_of(self, index: int) -> Array:
        """Return the positions of the peers of a rank."""
        return np.flatnonzero((self.role == self.role[index]) & (np.arange(len(self.role)) != index))

    def parts(self, index: int) -> PartRows:
        """Return one rank by part, against the median of its peers."""
        peers = self.peers_of(index)
        work = self.work
        stack = [work["seconds"].values[:, :, p] for p in range(work.sizes["part"])]
        names = [str(n) for n in work["part"].values]
        names += OTHERS
        stack += [work[n].values for n in ("wait_s", "transfer_s", "imposed_s")]
        seen = [np.where(self.present, s, np.nan) for s in stack]
        mine = np.stack([s[:, index] for s in seen])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            if len(peers):
                level = np.stack([np.nanmedian(s[:, peers], axis=1) for s in seen])
            else:
                level = np.repeat(np.nanmedian(mine, axis=1, keepdims=True), mine.shape[1], axis=1)
        there = (np.nan_to_num(mine) > 0).any(1) | (np.nan_to_num(level) > 0).any(1)
        return PartRows(tuple(n for n, t in zip(names, there, strict=True) if t), mine[there], level[there], len(peers))


def _key(kind: str, of: str) -> str:
    return f"{'no_phase' if kind == 'compute' else kind}_{of}"


def _kind(key: str, of: str) -> str:
    kind = key.removesuffix(f"_{of}")
    return "compute" if kind == "no_phase" else kind
