"""Clocks of the hosts of a generated run, and the anchors that its ranks tell of."""

from __future__ import annotations

import numpy as np

from mappnb.errors import LayoutError
from mappnb.testing._gen_graph import Members
from mappnb.testing._gen_settings import Clocks
from mappnb.testing._gen_truth import ClockTruth

__all__ = ["anchors", "make_clocks"]


def make_clocks(clocks: Clocks, members: Members, seed: int) -> ClockTruth:
    """Return the clock of each rank; ranks of one host share one.

    Raises
    ------
    LayoutError
        If a jump names a host that there is not.
    """
    hosts = int(members.host.max()) + 1
    rng = np.random.default_rng([seed, 0, 3])
    uptime_s = rng.uniform(0.01, 1.0, hosts) * clocks.uptime_s
    error_s = rng.standard_normal(hosts) * clocks.offset_s
    drift_ppm = rng.uniform(-1.0, 1.0, hosts) * clocks.drift_ppm
    for host, _, _ in clocks.jumps:
        if not 0 <= host < hosts:
            raise LayoutError(
                f"Clocks: a jump of host {host}; the run has hosts 0 to {hosts - 1}: choose one, or lower ranks_per_host"
            )
    jumps = {
        int(r): [(at, by) for h, at, by in clocks.jumps if h == members.host[r]]
        for r in range(len(members.host))
        if any(h == members.host[r] for h, _, _ in clocks.jumps)
    }
    return ClockTruth(
        offset_ns=np.rint(uptime_s * 1e9).astype(np.int64)[members.host],
        drift_ppm=drift_ppm[members.host],
        wall_error_ns=np.rint(error_s * 1e9).astype(np.int64)[members.host],
        jumps=jumps,
    )


def anchors(
    clocks: Clocks, truth: ClockTruth, rank: int, *, created_wall_ns: int, end_s: float, seed: int
) -> list[list[int]]:
    """Return the anchors of a rank, ``[wall ns, own clock ns, half width ns]``: at the start, and then every ``anchor_every_s``."""
    at_s = np.arange(0.5, max(end_s, 0.6), clocks.anchor_every_s)
    rng = np.random.default_rng([seed, rank, 4])
    half = np.maximum(clocks.uncertainty_s * 1e9 * rng.lognormal(0.0, 0.3, len(at_s)), 1.0)
    off = rng.uniform(-1.0, 1.0, len(at_s)) * half
    wall = created_wall_ns + np.rint(at_s * 1e9 + off).astype(np.int64) + truth.wall_error_ns[rank]
    own = truth.raw_ns(rank, at_s)
    return np.stack([wall, own, np.ceil(half).astype(np.int64)], axis=1).tolist()  # type: ignore[no-any-return]
