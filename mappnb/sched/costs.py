"""Costs: how long each action, transfer and reduction takes, and how much memory an activation holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mappnb.errors import CostError
from mappnb.sched.schedule import Schedule

if TYPE_CHECKING:
    from mappnb.sched.transformer import Device, Transformer

__all__ = ["SEND_MODES", "CostTables", "Costs", "Distribution", "Empirical"]

Floats = npt.NDArray[np.float64]
Number = float | Sequence[float] | Floats
SEND_MODES: tuple[str, ...] = ("async", "sync", "blocking")


@runtime_checkable
class Distribution(Protocol):
    """Durations that vary: anything that draws them, such as a frozen ``scipy.stats`` distribution."""

    def rvs(self, size: int, random_state: np.random.Generator) -> Any:
        """Return ``size`` durations in s."""

    def mean(self) -> Any:
        """Return the mean duration in s."""


@dataclass(frozen=True)
class Empirical:
    """Durations as they were measured, drawn with replacement.

    Attributes
    ----------
    samples : array, dims (sample,)
        Durations, s.
    """

    samples: Floats

    def __post_init__(self) -> None:
        samples = np.asarray(self.samples, np.float64)
        if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all() or (samples < 0).any():
            raise CostError("Empirical: expected at least one sample, each a number of at least 0")
        object.__setattr__(self, "samples", samples)

    def rvs(self, size: int, random_state: np.random.Generator) -> Floats:
        """Return ``size`` samples, drawn with replacement."""
        return random_state.choice(self.samples, size)

    def mean(self) -> float:
        """Return the mean of the samples."""
        return float(self.samples.mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """What the work of a step costs.

    Durations and memory are those of *a rank's whole share* of the model for one microbatch: a chunk costs ``1 / num_chunks`` of it,
    so that the same costs serve every schedule. A number holds for the whole model. An array over the *depth* of the model says
    what each equal part of the depth costs, in the same unit: with as many entries as there are stages, stage i costs
    ``entry[i] / num_chunks``; other lengths are averaged over the depth that a stage covers. A second axis is the microbatch. A
    sequence over the depth may hold distributions (see :class:`Empirical`); then :func:`mappnb.simulate` takes means, or draws.

    Attributes
    ----------
    forward_s, backward_input_s, backward_weight_s : number, array or distribution
        Time of F, I and W, s. A whole backward B takes I + W.
    overlapped_s : number, optional
        Time of one forward and one whole backward that run together as one, s; their sum by default.
    p2p_s : number, or array, dims (source rank, destination rank)
        Latency of a message between stages of different ranks, s.
    message_bytes : number
        Size of a message between stages, bytes.
    bandwidth : number, or array, dims (source rank, destination rank)
        Bandwidth of the link between two ranks in one direction, bytes/s. Messages of one link follow one another.
    send : str
        ``"async"``: the sender goes on at once. ``"sync"``: it goes on when its message has arrived. ``"blocking"``: the message
        occupies the sender's stream while it is on the wire (not during the latency), as a send kernel on the compute stream does.
    ship_bytes : number
        Size of what a disaggregated forward rank sends to the backward rank of its stage for one microbatch, bytes.
    reduce_s : number or array over the depth
        Data-parallel gradient reduction of a rank's whole share, s; that of a chunk begins when its last weight gradient is done.
    optimizer_s : number
        Optimizer step, s; it begins when all gradients of all ranks are reduced, for the norm of the gradient is that of all.
    interference : number
        A compute action runs slower by this fraction while a message or reduction of its rank is under way: 0.1 means 10 %.
    activation : number or array over the depth
        What F makes and the backward frees: 1 by default, so that peaks count microbatches of a rank's whole share; or bytes.
    activation_weight : number or array over the depth, optional
        The part of it that is held from I to W; all of it by default.
    static_memory : number, or array, dims (rank,)
        Weights, gradients and optimizer state of a rank, in the same unit.
    ranks_per_host : int, optional
        Ranks of one host share one network card: the messages between hosts then follow one another there.
    nic_bandwidth : number, optional
        Bandwidth of that card in each direction, bytes/s; that of the links by default.

    Raises
    ------
    CostError
        If a cost is negative, not a number, or of a shape that cannot be.
    """

    forward_s: Any
    backward_input_s: Any
    backward_weight_s: Any
    overlapped_s: float | None = None
    p2p_s: Any = 0.0
    message_bytes: float = 0.0
    bandwidth: Any = np.inf
    send: str = "async"
    ship_bytes: float = 0.0
    reduce_s: Any = 0.0
    optimizer_s: float = 0.0
    interference: float = 0.0
    activation: Any = 1.0
    activation_weight: Any = None
    static_memory: Any = 0.0
    ranks_per_host: int | None = None
    nic_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for field in fields(Costs):
            value = getattr(self, field.name)
            if field.name == "send":
                if value not in SEND_MODES:
                    raise CostError(f"send is {value!r}; expected one of {', '.join(SEND_MODES)}")
            elif value is not None:
                _check(field.name, value)
        if self.ranks_per_host is not None and (
            self.ranks_per_host != int(self.ranks_per_host) or self.ranks_per_host < 1
        ):
            raise CostError(f"ranks_per_host is {self.ranks_per_host!r}; expected a whole number of at least 1")
        for name in ("bandwidth", "nic_bandwidth"):
            value = getattr(self, name)
            if value is not None and (np.asarray(value, np.float64) <= 0).any():
                raise CostError(f"{name} is {value!r}; expected bytes/s above 0")

    @classmethod
    def from_model(
        cls,
        model: Transformer,
        *,
        pipeline_ranks: int,
        device: Device,
        layer_split: Sequence[int] | str | None = None,
        stage_order: str = "interleaved",
    ) -> Costs:
        """Return the costs of a transformer, from its sizes and the speed of the devices: what to plan with before there is a run.

        Parameters
        ----------
        model : Transformer
            Sizes, how it is split, what is recomputed.
        pipeline_ranks : int
            Ranks that share the depth.
        device : Device
            FLOP/s, bandwidths, latency.
        layer_split : sequence of int, or ``"free"``, optional
            Layers of each stage, in model order; by default every part of the depth has as many, and the costs are by layer, so that
            they serve every number of chunks. ``"free"``: by layer too, where the layers do not divide by the ranks, for
            :func:`mappnb.plan` to split (``num_layers=``). The embedding is before the first, output layer and loss behind the last.
        stage_order : str
            ``"interleaved"`` or ``"v"``, as of :class:`mappnb.Layout`: says which rank holds the last stage.

        Returns
        -------
        Costs
            Times in s; ``activation``, ``activation_weight`` and ``static_memory`` in bytes.

        Raises
        ------
        CostError
            If there are fewer layers than ranks, they do not divide by the ranks, or the split does not add up.

        Notes
        -----
        FLOPs and memory of Zero Bubble (arXiv:2401.10241, Table 1) and Korthikanti et al. (arXiv:2205.05198, Table 2), extended to
        gated MLPs, grouped queries, context parallelism and the output layer.
        """
        from mappnb.sched.transformer import costs_of_model

        return costs_of_model(
            model, pipeline_ranks=pipeline_ranks, device=device, layer_split=layer_split, stage_order=stage_order
        )

    def tables(self, schedule: Schedule, *, rng: np.random.Generator | None = None) -> CostTables:
        """Return the costs as arrays for one schedule.

        Parameters
        ----------
        schedule : Schedule
            Gives the numbers of stages, chunks, ranks and microbatches.
        rng : Generator, optional
            Draws each duration from its distribution; without it a distribution counts by its mean.

        Raises
        ------
        CostError
            If an array is for another number of ranks or microbatches.
        """
        s, m, v, r = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks, schedule.num_ranks
        times = {
            n: _over_stages(n, getattr(self, n), s, m, rng) / v
            for n in ("forward_s", "backward_input_s", "backward_weight_s")
        }
        f, i, w = times.values()
        shape = np.broadcast_shapes(f.shape, i.shape, w.shape)
        b = i + w
        again = f if schedule.recompute else 0.0
        duration = np.stack([np.broadcast_to(x, shape) for x in (f, b + again, i + again, w)])
        whole = float(np.mean(f) + np.mean(b)) * v
        ratio = 1.0 if self.overlapped_s is None or whole == 0 else self.overlapped_s / whole
        bandwidth = _over_ranks("bandwidth", self.bandwidth, r)
        host = None
        if self.ranks_per_host is not None:
            host = np.arange(r) // int(self.ranks_per_host)
            if self.nic_bandwidth is not None:
                away = host[:, None] != host[None, :]
                bandwidth = np.where(away, np.minimum(bandwidth, self.nic_bandwidth), bandwidth)
        activation = _over_stages("activation", self.activation, s, 1, None)[:, 0] / v
        held = self.activation if self.activation_weight is None else self.activation_weight
        return CostTables(
            duration_s=np.ascontiguousarray(duration),
            overlap_ratio=ratio,
            latency_s=_over_ranks("p2p_s", self.p2p_s, r),
            transfer_s=self.message_bytes / bandwidth,
            ship_s=self.ship_bytes / bandwidth,
            send=self.send,
            reduce_s=_over_stages("reduce_s", self.reduce_s, s, 1, None)[:, 0] / v,
            activation=activation,
            activation_weight=_over_stages("activation_weight", held, s, 1, None)[:, 0] / v,
            static_memory=_by_rank("static_memory", self.static_memory, r),
            optimizer_s=self.optimizer_s,
            message_bytes=self.message_bytes,
            ship_bytes=self.ship_bytes,
            interference=self.interference,
            host=host,
        )


@dataclass(frozen=True, eq=False)
class CostTables:
    """Costs as arrays for one schedule: what the engines read.

    Attributes
    ----------
    duration_s : array, dims (kind, stage, microbatch or 1)
        Time of each action by its kind's number (F, B, I, W), s.
    overlap_ratio : float
        Time of an overlapped pair over the sum of its two actions.
    latency_s, transfer_s, ship_s : array, dims (source rank, destination rank)
        Latency of a message; time on the wire of a message and of a shipped activation, s.
    send : str
        As of :class:`Costs`.
    reduce_s, activation, activation_weight : array, dims (stage,)
        As of :class:`Costs`, of one chunk.
    static_memory : array, dims (rank,)
        As of :class:`Costs`.
    optimizer_s, message_bytes, ship_bytes, interference : float
        As of :class:`Costs`.
    host : array, dims (rank,), optional
        Host of each rank, where the ranks of a host share a network card.
    """

    duration_s: Floats
    overlap_ratio: float
    latency_s: Floats
    transfer_s: Floats
    ship_s: Floats
    send: str
    reduce_s: Floats
    activation: Floats
    activation_weight: Floats
    static_memory: Floats
    optimizer_s: float = 0.0
    message_bytes: float = 0.0
    ship_bytes: float = 0.0
    interference: float = 0.0
    host: npt.NDArray[np.int64] | None = None

    @property
    def by_events(self) -> bool:
        """Whether messages meet in shared cards, or slow the work: the one pass of :mod:`mappnb.sched.times` cannot time that."""
        shared = self.host is not None and bool((self.transfer_s > 0).any() or (self.ship_s > 0).any())
        return shared or self.interference > 0


def _check(name: str, value: Any) -> None:
    if isinstance(value, Distribution):
        return
    if isinstance(value, (list, tuple)) and any(isinstance(v, Distribution) for v in value):
        for v in value:
            _check(name, v)
        return
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise CostError(f"{name} is {value!r}; expected a number or an array of numbers") from None
    if numbers.ndim > 2 or numbers.size == 0:
        raise CostError(f"{name} has shape {numbers.shape}; expected a number, or one or two axes that are not empty")
    bad = np.isnan(numbers) | (numbers < 0) | (np.isinf(numbers) & (name != "bandwidth"))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        at = f" at {where if len(where) > 1 else where[0]}" if where else ""
        raise CostError(f"{name} is {numbers[where]}{at}; expected a number of at least 0")


def _over_stages(name: str, value: Any, stages: int, microbatches: int, rng: np.random.Generator | None) -> Floats:
    """Return a cost of a whole share by (stage, microbatch or 1), averaged over the depth that each stage covers."""
    if isinstance(value, Distribution):
        value = [value] * stages
    if isinstance(value, (list, tuple)) and any(isinstance(v, Distribution) for v in value):
        rows = [_drawn(v, microbatches, rng) for v in value]
        array = np.stack([np.broadcast_to(r, np.broadcast_shapes(*(x.shape for x in rows))) for r in rows])
    else:
        array = np.asarray(value, np.float64)
    array = array.reshape(1, 1) if array.ndim == 0 else array[:, None] if array.ndim == 1 else array
    if array.shape[1] not in (1, microbatches):
        raise CostError(f"{name}: {array.shape[1]} entries over the microbatches; the schedule has {microbatches}")
    n = len(array)
    if n == stages:
        return array
    if n == 1:
        return np.repeat(array, stages, axis=0)
    # the mean of a step function over each stage's part of the depth, by its integral
    integral = np.concatenate([np.zeros((1, array.shape[1])), np.cumsum(array, axis=0)])
    edge = np.linspace(0, n, stages + 1)
    whole = np.minimum(edge.astype(np.int64), n - 1)
    at = integral[whole] + (edge - whole)[:, None] * array[whole]
    return np.asarray(np.diff(at, axis=0) * (stages / n), np.float64)


def _drawn(value: Any, microbatches: int, rng: np.random.Generator | None) -> Floats:
    if not isinstance(value, Distribution):
        return np.full(1, float(value))
    drawn = (
        np.full(1, float(value.mean())) if rng is None else np.asarray(value.rvs(microbatches, random_state=rng), float)
    )
    return np.asarray(np.maximum(drawn, 0.0), np.float64)


def _by_rank(name: str, value: Any, ranks: int) -> Floats:
    array = np.asarray(value, np.float64)
    if array.ndim and array.shape != (ranks,):
        raise CostError(f"{name}: shape {array.shape}; the schedule has {ranks} ranks: expected ({ranks},) or a number")
    return np.array(np.broadcast_to(array, (ranks,)), np.float64)


def _over_ranks(name: str, value: Any, ranks: int) -> Floats:
    array = np.asarray(value, np.float64)
    if array.ndim == 0:
        return np.full((ranks, ranks), float(array))
    if array.shape != (ranks, ranks):
        raise CostError(
            f"{name}: shape {array.shape}; the schedule has {ranks} ranks: expected ({ranks}, {ranks}) or a number"
        )
    return np.ascontiguousarray(array)
