"""What a generated run is made with: noise, clocks and traffic. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mappnb.errors import CostError

__all__ = ["Clocks", "Noise", "Traffic"]


def require_numbers(value: object, *, positive: tuple[str, ...] = ()) -> None:
    """Raise CostError unless every numeric field of a dataclass is finite and at least 0 (above 0 for ``positive``)."""
    for field in fields(value):  # type: ignore[arg-type]
        x = getattr(value, field.name)
        if not isinstance(x, (int, float)) or isinstance(x, bool):
            continue
        if not math.isfinite(x) or x < 0 or (x == 0 and field.name in positive):
            least = "above 0" if field.name in positive else "of at least 0"
            raise CostError(f"{type(value).__name__}: {field.name} is {x!r}; expected a number {least}")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How durations vary where nothing is wrong. :meth:`none` gives a run that repeats itself exactly.

    Attributes
    ----------
    compute_sigma : float
        Log-normal sigma of each piece of compute; the mean is kept.
    rank_sigma : float
        Log-normal sigma of what a rank is faster or slower by all along (silicon, cooling).
    drift_sigma, drift_memory : float
        Slow drift of a rank: log-normal sigma, and the correlation of one step with the next (AR(1)).
    jitter_probability, jitter_s, jitter_tail : float
        Host jitter: chance of a delay before a piece of compute, its least length in s, and the Pareto exponent of its length.
    network_sigma : float
        Log-normal sigma of each transfer.
    exit_s : float
        Mean time in s after which a member notices that a collective is done (exponential).
    """

    compute_sigma: float = 0.01
    rank_sigma: float = 0.004
    drift_sigma: float = 0.003
    drift_memory: float = 0.9
    jitter_probability: float = 0.002
    jitter_s: float = 2e-4
    jitter_tail: float = 1.5
    network_sigma: float = 0.08
    exit_s: float = 2e-6

    def __post_init__(self) -> None:
        require_numbers(self, positive=("jitter_tail",))
        for name in ("jitter_probability", "drift_memory"):
            if getattr(self, name) > 1:
                raise CostError(f"Noise: {name} is {getattr(self, name)!r}; expected a number from 0 to 1")

    @classmethod
    def none(cls) -> Noise:
        """Return no noise at all."""
        return cls(
            compute_sigma=0, rank_sigma=0, drift_sigma=0, jitter_probability=0, network_sigma=0, exit_s=0
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The clocks of the hosts. All ranks of a host share one.

    Attributes
    ----------
    offset_s : float
        Standard deviation in s of the hosts' wall clocks from true time: what the anchors cannot tell.
    drift_ppm : float
        The monotonic clocks run at rates drawn from -drift_ppm to +drift_ppm, parts per million.
    uptime_s : float
        The monotonic clocks began up to this many s before the run.
    jumps : tuple of (int, float, float)
        (host, at, by): a monotonic clock jumps ahead ``by`` s at ``at`` s of true time, as after a virtual machine was moved.
    uncertainty_s : float
        Half width in s of a reading of an anchor.
    anchor_every_s : float
        Time in s between two anchors of a rank.
    """

    offset_s: float = 0.0
    drift_ppm: float = 0.0
    uptime_s: float = 1e6
    jumps: tuple[tuple[int, float, float], ...] = ()
    uncertainty_s: float = 2e-7
    anchor_every_s: float = 10.0

    def __post_init__(self) -> None:
        require_numbers(self, positive=("anchor_every_s",))
        if self.drift_ppm > 1000:
            raise CostError(f"Clocks: drift_ppm is {self.drift_ppm!r}; expected at most 1000 (crystals stay within 50)")
        for host, at, by in self.jumps:
            if by < 0:
                raise CostError(
                    f"Clocks: host {host} jumps by {by} s at {at} s; a monotonic clock never goes back: give a number above 0"
                )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What collectives move, and how fast.

    Attributes
    ----------
    layer_bytes : float
        Activations of one microbatch that a layer's tp, cp and ep collectives move, bytes.
    gradient_bytes : float
        Gradients (and parameters) of a rank's whole share, bytes. Times of ``Costs.reduce_s`` come first.
    embedding_bytes : float
        Gradient of an embedding that the first and the last stage share, bytes; 0: not shared.
    host_bandwidth, network_bandwidth : float
        Of groups inside one host and of groups across hosts, bytes/s.
    latency_s : float
        Of any collective, s.
    sequence_parallel : bool
        With ``detail="layers"``: all_gather and reduce_scatter around each layer in the tp group, instead of one all_reduce.
    """

    layer_bytes: float = 32 * 2**20
    gradient_bytes: float = 512 * 2**20
    embedding_bytes: float = 64 * 2**20
    host_bandwidth: float = 300e9
    network_bandwidth: float = 40e9
    latency_s: float = 12e-6
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        require_numbers(self, positive=("host_bandwidth", "network_bandwidth"))
