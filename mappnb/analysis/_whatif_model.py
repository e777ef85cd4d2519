"""What a what-if is asked of: operations of several steps as one replay graph, what each is, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.replay import Graph, replay

__all__ = ["Model", "Words"]

Array = np.ndarray[Any, Any]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Words:
    """What the operations are, in words: ``label`` counts in ``labels``, and each label stands for several ``names``.

    Attributes
    ----------
    labels : tuple of str
        Kinds of operation as results name them.
    label : array, dims (op,)
        Kind of each operation.
    names : tuple of frozenset of str
        For each class of operation, all the words that a ``fix`` may name it by.
    name : array, dims (op,)
        Class of words of each operation.
    """

    labels: tuple[str, ...]
    label: Array
    names: tuple[frozenset[str], ...]
    name: Array


@dataclass(frozen=True, eq=False)
class Model:
    """Operations of some steps, in the order of the steps.

    Attributes
    ----------
    source : str
        ``"straggler_analysis"`` (the artifact's dependency model) or ``"recorded"`` (recorded identities).
    graph : Graph
        ``duration_s`` as measured: of work its length, of a transfer what it took after the last had arrived, s; ``delay_s``: from
        the end of what an operation waited for to its start, s.
    steps : array, dims (step,)
        Numbers of the steps.
    step : array, dims (op,)
        Which of ``steps``.
    recorded_s : array, dims (step,)
        Length of each step as recorded, first start to last end, s.
    final : bool array, dims (op,)
        Operations whose end may be the step's.
    rank, dp_rank, stage : array, dims (op,)
        Where it runs; -1: nowhere. Of a message: where it was sent.
    sender, receiver : array, dims (op,)
        Ranks of the link that a message takes; -1 for other operations.
    words : Words
        What it is.
    kind : array, dims (op,)
        Operations of one kind should take equally long, whatever their rank, stage, step and microbatch.
    twin : array, dims (op,)
        Operations that the ranks of one stage do in one step at the same place in it.
    by_mean : bool array, dims (op,)
        ``ideal="mean"`` takes the mean of these, of others the median.
    single : bool array, dims (op,)
        Measured in float32: the middle of two is rounded to it.
    unit : array, dims (op,), optional
        Operations that are pieces of one event have one number; without it, each is its own.
    place : array, dims (op,), optional
        Stage that an operation is compared within; -1 for those that are the same everywhere. ``stage`` by default.
    layer : array, dims (op,), optional
        Layer that it is compared within, where stages are not compared.
    occasional : bool array, dims (op,), optional
        Operations that ideally do not happen.
    microbatch, phase : array, dims (op,), optional
        Of compute; -1 and ``""`` of other operations.
    around_s : array, dims (step,), optional
        Time before the first and after the last operation, s: it counts as launch delay.
    num_gpus : int
        GPUs that the run used.
    order : dict of int to int
        The run's own number of each rank, where it is another: ties go to the lower.
    attrs : dict
        What to say about all this in results.
    """

    source: str
    graph: Graph
    steps: Array
    step: Array
    recorded_s: Floats
    final: Mask
    rank: Array
    dp_rank: Array
    stage: Array
    sender: Array
    receiver: Array
    words: Words
    kind: Array
    twin: Array
    by_mean: Mask
    single: Mask
    num_gpus: int
    order: dict[int, int] = field(default_factory=dict)
    unit: Array | None = None
    place: Array | None = None
    layer: Array | None = None
    occasional: Mask | None = None
    microbatch: Array | None = None
    phase: Array | None = None
    around_s: Floats | None = None
    attrs: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.graph)

    @property
    def measured_s(self) -> Floats:
        """``graph.duration_s``."""
        return self.graph.duration_s

    @property
    def first(self) -> Array:
        """First operation of each step, dims (step,)."""
        return np.searchsorted(self.step, np.arange(len(self.steps)))

    def times(self, duration_s: Floats, delay_s: Floats | None = None) -> Floats:
        """Return how long each step takes with other durations, dims (step,), s; delays are 0 unless given.

        A step lasts from its first start to the last end of a final operation, with delays also what is around these.
        """
        delay = np.zeros(len(self)) if delay_s is None else delay_s
        done = replay(replace(self.graph, duration_s=duration_s, delay_s=delay))
        first = self.first
        ends = np.where(self.final, done.end_s, -np.inf)
        begins = done.start_s if delay_s is None or self.around_s is None else np.zeros(len(self))
        length = np.maximum.reduceat(ends, first) - np.minimum.reduceat(begins, first)
        return np.asarray(length if delay_s is None or self.around_s is None else length + self.around_s, np.float64)
