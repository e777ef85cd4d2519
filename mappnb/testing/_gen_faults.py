"""The faults that a generated run can have: one frozen value of each kind."""

from __future__ import annotations

from dataclasses import dataclass

from mappnb.errors import CostError, did_you_mean
from mappnb.testing._gen_settings import require_numbers

__all__ = [
    "CheckpointStall",
    "DataSkew",
    "Fault",
    "Hang",
    "HostGaps",
    "IntermittentRank",
    "KilledRank",
    "MissingRank",
    "MoeImbalance",
    "SlowHost",
    "SlowLayer",
    "SlowLink",
    "SlowNic",
    "SlowRank",
    "SlowStage",
]

GAPS: tuple[str, ...] = ("gc", "dataloader", "run_queue")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is wrong.

    Attributes
    ----------
    first_step, last_step : int
        Steps in which it happens, both included; to the end of the run by default.
    """

    first_step: int = 0
    last_step: int | None = None

    def __post_init__(self) -> None:
        require_numbers(self, positive=("factor",))
        if self.last_step is not None and self.last_step < self.first_step:
            raise CostError(
                f"{type(self).__name__}: last_step {self.last_step} is before first_step {self.first_step}; give them in order"
            )

    def hits(self, step: int) -> bool:
        """Return whether it happens in a step."""
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    @property
    def kind(self) -> str:
        """The name of the kind: ``slow_rank`` for SlowRank."""
        name = type(self).__name__
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


@dataclass(frozen=True, kw_only=True)
class SlowRank(Fault):
    """All compute of a rank takes ``factor`` times as long; with ``throttle`` its telemetry shows a hot, slowed GPU.

    Attributes
    ----------
    rank : int
        Global rank.
    factor : float
        1.3: 30 % longer.
    throttle : bool
        Telemetry shows the lower clock, the temperature and the reason.
    """

    rank: int
    factor: float
    throttle: bool = False


@dataclass(frozen=True, kw_only=True)
class SlowHost(Fault):
    """All compute of all ranks of a host takes ``factor`` times as long.

    Attributes
    ----------
    host : int
        Number of the host.
    factor : float
        1.3: 30 % longer.
    throttle : bool
        Telemetry shows it.
    """

    host: int
    factor: float
    throttle: bool = False


@dataclass(frozen=True, kw_only=True)
class SlowLayer(Fault):
    """One layer of the model takes one rank ``factor`` times as long, forward and backward.

    Attributes
    ----------
    rank : int
        Global rank; the layer must be on it.
    layer : int
        Layer, counted over the whole model from 0.
    factor : float
        On the compute of that layer. With ``detail="actions"`` it shows as a part of its forwards and backwards only.
    """

    rank: int
    layer: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class SlowLink(Fault):
    """Messages from one rank to another take ``factor`` times as long on the wire, and ``extra_s`` more.

    Attributes
    ----------
    source, destination : int
        Global ranks; messages the other way are not slowed.
    factor, extra_s : float
        Factor on the time on the wire; more time for each message, s.
    """

    source: int
    destination: int
    factor: float = 1.0
    extra_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SlowNic(Fault):
    """The network card of a host: its messages to and from other hosts, and collectives of groups that reach beyond it, are slow.

    Attributes
    ----------
    host : int
        Number of the host.
    factor : float
        On the time of each transfer.
    """

    host: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class IntermittentRank(Fault):
    """In some steps, drawn with ``probability``, all compute of a rank takes ``factor`` times as long.

    Attributes
    ----------
    rank : int
        Global rank.
    factor : float
        Of the steps it happens in.
    probability : float
        Chance of each step.
    """

    rank: int
    factor: float
    probability: float = 0.3


@dataclass(frozen=True, kw_only=True)
class SlowStage(Fault):
    """A stage has more work than the others: all of its ranks take ``factor`` times as long.

    Attributes
    ----------
    stage : int
        Stage in model order.
    factor : float
        On its compute.
    """

    stage: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class DataSkew(Fault):
    """Microbatches of documents of different lengths: compute takes ``a + b * sum(len) + c * sum(len**2)``.

    Attributes
    ----------
    documents : int
        Documents of a microbatch.
    sigma : float
        Log-normal sigma of their lengths.
    packed : bool
        The lengths of a microbatch sum to the sequence length, so that only the squares differ.
    linear, quadratic : float
        Shares of the time that grow with the sum and with the sum of squares, at the expected values; the rest is fixed.

    Notes
    -----
    All ranks of one data-parallel replica have the same microbatches. The lengths are in the metrics table.
    """

    documents: int = 8
    sigma: float = 1.0
    packed: bool = True
    linear: float = 0.6
    quadratic: float = 0.3

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
        if self.documents < 1 or self.linear + self.quadratic > 1:
            raise CostError(
                f"DataSkew: {self.documents} documents, linear {self.linear} + quadratic {self.quadratic}; expected at least one "
                "document and shares that sum to at most 1"
            )


@dataclass(frozen=True, kw_only=True)
class HostGaps(Fault):
    """The host of a rank is late now and then.

    Attributes
    ----------
    rank : int
        Global rank.
    length_s : float
        Length of a gap, s.
    per_step : int
        Gaps in a step.
    gap : str
        ``"gc"``: recorded as garbage collection. ``"dataloader"``: the next batch comes late (ranks that load data only).
        ``"run_queue"``: not recorded; telemetry shows the time in the run queue.
    """

    rank: int
    length_s: float
    per_step: int = 1
    gap: str = "gc"

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
        if self.gap not in GAPS:
            raise CostError(
                f"HostGaps: gap is {self.gap!r}; expected one of {', '.join(GAPS)}{did_you_mean(self.gap, GAPS)}"
            )


@dataclass(frozen=True, kw_only=True)
class MoeImbalance(Fault):
    """The experts of one expert-parallel rank get ``factor`` times the tokens; the part of a layer behind the dispatch takes as long.

    Attributes
    ----------
    ep_rank : int
        Coordinate in the expert-parallel group.
    factor : float
        Its tokens over an even share.
    """

    ep_rank: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class CheckpointStall(Fault):
    """Saving a checkpoint takes a rank ``extra_s`` longer.

    Attributes
    ----------
    rank : int
        Global rank.
    extra_s : float
        More time, s.
    """

    rank: int
    extra_s: float


@dataclass(frozen=True, kw_only=True)
class MissingRank(Fault):
    """A rank that leaves no file at all.

    Attributes
    ----------
    rank : int
        Global rank.
    """

    rank: int


@dataclass(frozen=True, kw_only=True)
class KilledRank(Fault):
    """A rank is killed in a forward or backward of ``first_step``; all that need it wait for ever, and the job never ends.

    Attributes
    ----------
    rank : int
        Global rank.
    at : float
        0 to 1: how far into the step, counted in the rank's pieces of compute.
    wait_s : float
        How long the other ranks went on recording, s.
    """

    rank: int
    at: float = 0.5
    wait_s: float = 30.0

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
        if self.at > 1:
            raise CostError(f"{type(self).__name__}: at is {self.at!r}; expected a number from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Hang(KilledRank):
    """A rank stops before a collective of ``first_step`` and goes on living; the others wait in it for ever.

    Attributes
    ----------
    rank : int
        Global rank.
    at : float
        0 to 1: how far into the step, counted in the rank's collectives.
    wait_s : float
        How long the ranks went on recording, s.
    """
