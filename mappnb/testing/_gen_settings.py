"""What a generated run is made with: noise, clocks and traffic. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

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


SAMPLES: tuple[str, ...] = ("compute_ratios", "rank_ratios", "collective_ratios", "message_ratios", "exit_samples_s")


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How durations vary where nothing is wrong. :meth:`none` gives a run that repeats itself exactly.

    Where samples are given, such as by :func:`mappnb.testing.noise_of` from a real run, they are drawn from with replacement in the
    place of the distribution.

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
    compute_ratios : tuple of float
        Samples in the place of ``compute_sigma``: a piece of compute over its usual time.
    rank_ratios : tuple of float
        Samples in the place of ``rank_sigma``: a rank over its peers.
    collective_ratios, message_ratios : tuple of float
        Samples in the place of ``network_sigma``: a transfer over its usual time.
    exit_samples_s : tuple of float
        Samples in the place of ``exit_s``, s.
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
    compute_ratios: tuple[float, ...] = ()
    rank_ratios: tuple[float, ...] = ()
    collective_ratios: tuple[float, ...] = ()
    message_ratios: tuple[float, ...] = ()
    exit_samples_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_numbers(self, positive=("jitter_tail",))
        for name in SAMPLES:
            self._check_samples(name)
        for name in ("jitter_probability", "drift_memory"):
            if getattr(self, name) > 1:
                raise CostError(f"Noise: {name} is {getattr(self, name)!r}; expected a number from 0 to 1")

    def _check_samples(self, name: str) -> None:
        """Raise CostError unless samples are finite and above 0 (times: at least 0); keep them as a tuple of floats."""
        values = np.asarray(getattr(self, name), np.float64)
        low = values < 0 if name == "exit_samples_s" else values <= 0
        wrong = np.flatnonzero(~np.isfinite(values) | low)
        if values.ndim != 1 or len(wrong):
            found = f"a {values.ndim}-dimensional array" if values.ndim != 1 else f"{values[wrong[0]]} at {wrong[0]}"
            least = "of at least 0" if name == "exit_samples_s" else "above 0"
            raise CostError(f"Noise: {name} has {found}; expected a sequence of finite numbers {least}")
        object.__setattr__(self, name, tuple(values.tolist()))

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
