"""The truth about a generated run: what readers of the run must find, and must not read."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.errors import MappnbError

__all__ = ["ClockTruth", "FaultTruth", "Truth"]

NAME = "truth.json"
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClockTruth:
    """The clocks, by rank: ``raw = offset + t * (1 + drift) + jumps`` for t ns of true time since the run was created.

    Attributes
    ----------
    offset_ns : array, dims (rank,), int64
        Reading of the rank's own monotonic clock when the run was created, ns.
    drift_ppm : array, dims (rank,)
        How much faster than true time it runs, parts per million.
    wall_error_ns : array, dims (rank,), int64
        By how much the host's wall clock is ahead, ns: what remains after the anchors, that is, the error of the run clock.
    jumps : dict of int to list of (float, float)
        By rank: (at s of true time, by s).
    """

    offset_ns: Ints
    drift_ppm: Floats
    wall_error_ns: Ints
    jumps: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def raw_ns(self, rank: int, true_s: npt.ArrayLike) -> Ints:
        """Return what the clock of a rank shows, ns, at a true time, s since the run was created."""
        t_ns = np.asarray(true_s, np.float64) * 1e9
        shown = np.rint(t_ns * (1 + self.drift_ppm[rank] * 1e-6)).astype(np.int64) + self.offset_ns[rank]
        for at_s, by_s in self.jumps.get(rank, ()):
            shown = shown + np.where(t_ns >= at_s * 1e9, round(by_s * 1e9), 0)
        return np.asarray(shown, np.int64)

    def true_ns(self, rank: int, raw_ns: npt.ArrayLike) -> Ints:
        """Return the true time, ns since the run was created, at which the clock of a rank showed ``raw_ns``; within 1 ns."""
        shown = np.asarray(raw_ns, np.int64) - self.offset_ns[rank]
        rate = 1 + float(self.drift_ppm[rank]) * 1e-6
        before = np.zeros_like(shown)
        for at_s, by_s in sorted(self.jumps.get(rank, ())):
            by, at = round(by_s * 1e9), at_s * 1e9 * rate
            before = before + np.where(shown - before >= at + by, by, 0)
        return np.asarray(np.rint((shown - before) / rate), np.int64)


@dataclass(frozen=True, eq=False)
class FaultTruth:
    """One fault and what it did.

    Attributes
    ----------
    kind : str
        Such as ``slow_rank``.
    subject_kind : str
        rank, host, link, stage or job.
    subjects : list of str
        ``"3"`` for a rank or stage, ``"host1"``, ``"3->7"`` for a link.
    ranks : list of int
        Global ranks that are at fault themselves.
    steps : list of int
        Steps in which it happened.
    effect_s : array, dims (step,)
        Makespan of each step with all faults, minus the makespan of the same run (same seed) without this one, s; NaN for steps
        that never ended.
    detail : dict
        The settings of the fault, and for a hang or kill the group, seq and op of the first collective that never ended.
    """

    kind: str
    subject_kind: str
    subjects: list[str]
    ranks: list[int]
    steps: list[int]
    effect_s: Floats
    detail: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Truth:
    """What is true of a generated run.

    Attributes
    ----------
    run_dir : str
        The run.
    step_s : array, dims (step,)
        Makespan of each step in true time, from its first start to its last end over all ranks, s; NaN where it never ended.
    clean_step_s : array, dims (step,)
        The same without any fault, s.
    faults : list of FaultTruth
        In the order they were given.
    clocks : ClockTruth
        The clocks.
    hosts : list of str
        Host of each rank.
    rank_factor : array, dims (rank,)
        What each rank is slower by all along, by noise.
    """

    run_dir: str
    step_s: Floats
    clean_step_s: Floats
    faults: list[FaultTruth]
    clocks: ClockTruth
    hosts: list[str]
    rank_factor: Floats

    def save(self) -> Path:
        """Write ``truth.json`` into the run directory, where no reader looks, and return its path."""
        path = Path(self.run_dir) / NAME
        content = asdict(self)
        del content["run_dir"]
        path.write_text(json.dumps(_plain(content), indent=1))
        return path

    @classmethod
    def load(cls, run_dir: str | os.PathLike[str]) -> Truth:
        """Return the truth that :meth:`save` wrote.

        Raises
        ------
        MappnbError
            If the run was not generated.
        """
        path = Path(run_dir) / NAME
        if not path.exists():
            raise MappnbError(f"{run_dir}: no {NAME}; only runs of mappnb.testing.generate_run have one")
        content = json.loads(path.read_text())
        faults = [FaultTruth(**{**f, "effect_s": _floats(f["effect_s"])}) for f in content["faults"]]
        clocks = content["clocks"]
        jumps = {int(r): [(float(a), float(b)) for a, b in js] for r, js in clocks["jumps"].items()}
        return cls(
            run_dir=os.fspath(run_dir),
            step_s=_floats(content["step_s"]),
            clean_step_s=_floats(content["clean_step_s"]),
            faults=faults,
            clocks=ClockTruth(
                np.array(clocks["offset_ns"], np.int64),
                np.array(clocks["drift_ppm"], np.float64),
                np.array(clocks["wall_error_ns"], np.int64),
                jumps,
            ),
            hosts=list(content["hosts"]),
            rank_factor=_floats(content["rank_factor"]),
        )


def _floats(values: list[float | None]) -> Floats:
    return np.array([math.nan if v is None else v for v in values], np.float64)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
