"""What an alignment says of itself, to be read."""

from __future__ import annotations

import numpy as np
from analysis.alignment_runs import collectives

from mappnb.analysis import align, aligned


def test_offset_ms_is_what_moves_against_the_reference():
    events, truth, _, _ = collectives(
        np.random.default_rng(6), num_ranks=4, num_calls=200, drift_ppm=0, offset_ns=3e6, outliers=0
    )
    plain = align(events)  # no anchors: the whole difference of the clocks
    true_ms = -(truth.offset_ns - truth.offset_ns[0]) / 1e6
    np.testing.assert_allclose(plain.offset_ms, true_ms, atol=0.02)
    assert plain.offset_ms.attrs["units"] == "ms" and float(plain.offset_ms[0]) == 0.0
    boots = (
        np.array([0, 7, 40_000, 11]) * 10**12
    )  # own clocks count from boots hours apart, and anchors bring them back
    anchored = events.copy(deep=True)
    anchored["raw_start_ns"] = events.start_ns + boots[events["rank"].values]
    a = align(anchored)
    np.testing.assert_allclose(a.offset_ms, true_ms, atol=0.02)
    assert float(np.abs(a.offset_ns).max()) > 1e16
    np.testing.assert_allclose(align(anchored, reference=2).offset_ms, true_ms - true_ms[2], atol=0.02)
    done = aligned(anchored, a)
    moved = (done.start_ns - anchored.start_ns).values / 1e6
    mean = np.array([moved[anchored["rank"].values == r].mean() for r in range(4)])
    np.testing.assert_allclose(mean - mean[0], a.offset_ms, atol=0.02)
    np.testing.assert_allclose(align(done).offset_ms, 0, atol=0.02)
