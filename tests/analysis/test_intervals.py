"""Interval arithmetic against brute force on a grid of instants."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mappnb.analysis._intervals import innermost_segments, segments_reference, union_length

INTERVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), max_size=14)


def arrays(intervals):
    table = np.array(intervals, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 1] + table[:, 2]


@given(INTERVALS)
def test_union_length(intervals):
    group, start, end = arrays(intervals)
    found = union_length(group, start, end, 3)
    for g in range(3):
        covered = np.zeros(64, bool)
        for k, a, b in zip(group, start, end, strict=True):
            covered[a:b] |= k == g
        assert covered.sum() == found[g]


@given(INTERVALS, st.integers(-(2**40), 2**40))
def test_union_does_not_depend_on_the_origin(intervals, shift):
    group, start, end = arrays(intervals)
    np.testing.assert_array_equal(
        union_length(group, start, end, 3), union_length(group, start + shift, end + shift, 3)
    )


@given(INTERVALS)
def test_the_innermost_is_the_one_that_began_last(intervals):
    lane, start, end = arrays(intervals)
    span, left, right = innermost_segments(lane, start, end)
    for k in range(3):
        for t in range(48):
            active = [i for i in range(len(lane)) if lane[i] == k and start[i] <= t < end[i]]
            found = [int(s) for s, a, b in zip(span, left, right, strict=True) if lane[s] == k and a <= t < b]
            assert len(found) == bool(active)
            if active:
                best = max(active, key=lambda i: (start[i], -end[i]))
                assert (start[found[0]], end[found[0]]) == (start[best], end[best])


@given(INTERVALS, st.integers(-(2**60), 2**60))
def test_the_native_segments_equal_the_plain_ones(intervals, shift):
    lane, start, end = arrays(intervals)
    for native, plain in zip(
        innermost_segments(lane, start + shift, end + shift),
        segments_reference(lane, start + shift, end + shift),
        strict=True,
    ):
        assert native.dtype == plain.dtype
        np.testing.assert_array_equal(native, plain)
