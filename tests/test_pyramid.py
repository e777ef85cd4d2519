"""Pixel truth: what a window shows equals a brute-force drawing of all spans, to one pixel; sizes, limits and messages."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.errors import MappnbError
from mappnb.pyramid import NOTHING, SpanIndex, Window

HOUR, US, MOST = 3_600_000_000_000, 1_000, 2**62 - 1
SURE = 0.6  # share of a pixel from which on its category must be right


# ------------------------------------------------------------------------------------------------- what to draw
@st.composite
def spans(draw):
    """Rows of spans of mixed lengths: nested, overlapping, disjoint, bursts, marks, early and late times."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_rows, origin = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([0, 10**9, -(10**15), MOST - 40 * HOUR, 1 - 2**62])),
    )
    row, start, length, category = [], [], [], []
    for r in range(num_rows):
        for _ in range(draw(st.integers(0, 3))):
            kind = draw(st.sampled_from(["disjoint", "dense", "overlapping", "burst", "marks", "long", "steps"]))
            n = draw(st.integers(1, 1 if kind == "long" else 400))
            unit = int(draw(st.sampled_from([1, 10, US, 50 * US, 10**7, 10**9])))
            at = origin + int(rng.integers(0, 10 * HOUR)) * int(rng.integers(0, 2))
            gap, s, d = rng.integers(0, 4 * unit, n), np.zeros(n, np.int64), np.full(n, unit)
            if kind in ("disjoint", "dense", "steps"):
                d = rng.integers(0, unit + 1, n) if kind != "steps" else np.full(n, unit)
                s = np.cumsum(d + (gap if kind == "disjoint" else 0)) - d
            elif kind == "overlapping":
                s, d = np.cumsum(gap), rng.integers(0, 50 * unit, n)
            elif kind == "burst":
                s, d = rng.integers(0, 20 * unit, n), rng.integers(0, unit + 1, n)
            elif kind == "marks":
                s, d = np.cumsum(gap), np.zeros(n, np.int64)
            elif kind == "long":
                d = np.array([rng.integers(1, 10 * HOUR)])
            s = np.minimum(s + at, MOST - 11 * HOUR)
            row.append(np.full(n, r)), start.append(s), length.append(d)
            category.append(rng.choice(draw(st.sampled_from([[3], [0, 7], [1, 2, 3, 4, 5]])), n))
    arrays = [np.concatenate([np.empty(0, np.int64), *a]) for a in (row, start, length, category)]
    order = rng.permutation(len(arrays[0]))
    return num_rows, *(a[order] for a in arrays)


@st.composite
def windows(draw, start, length):
    """A window at or near the spans, at any zoom."""
    pixels = draw(st.integers(1, 60))
    if not len(start):
        return 0, 1000, pixels
    i = draw(st.integers(0, len(start) - 1))
    lo, hi = int(start.min()), int((start + length).max())
    width = draw(st.sampled_from([1, 7, 100, 60 * US, 10**7, 10**9, HOUR, hi - lo + 1, 2 * (hi - lo + 1)]))
    shift = draw(st.floats(-1.2, 1.2))
    t0 = max(1 - 2**62, min((lo if width > hi - lo else int(start[i])) + int(shift * width) // 2, MOST - width))
    return t0, t0 + width, pixels


def brute(t0, t1, pixels, start, length, category, num_codes=8):
    """Per pixel what the spans cover, by category, and the least distance in pixels to any span; exact."""
    p = Fraction(t1 - t0, pixels)
    cover = [[Fraction(0)] * num_codes for _ in range(pixels)]
    seen = [False] * pixels
    for s, d, c in zip(start.tolist(), length.tolist(), category.tolist(), strict=True):
        if s >= t1 or (s + d <= t0 and s < t0):
            continue
        first, last = max(0, int((s - t0) // p)), min(pixels - 1, max(-int((t0 - s - d) // p) - 1, int((s - t0) // p)))
        for i in range(first, last + 1):
            seen[i] = True
            cover[i][c] += max(min(Fraction(s + d - t0), p * (i + 1)) - max(Fraction(s - t0), p * i), 0) / p
    return np.array(cover, float).reshape(pixels, num_codes), np.array(seen)


def check_window(window: Window, num_rows, row, start, length, category):
    t0, t1, pixels = window.t0_ns, window.t1_ns, window.pixels
    overlaps = (start < t1) & ((start + length > t0) | (start >= t0))
    assert window.num_events == overlaps.sum()
    wide = length.astype(object) * pixels >= window.threshold_px * (t1 - t0)
    expected = np.flatnonzero(overlaps & wide.astype(bool))
    got = window.spans
    np.testing.assert_array_equal(np.sort(got.event), expected)
    for name, given_ in (("row", row), ("start_ns", start), ("duration_ns", length), ("category", category)):
        np.testing.assert_array_equal(getattr(got, name), given_[got.event])
    assert sorted(zip(got.row, got.start_ns, strict=True)) == list(zip(got.row, got.start_ns, strict=True))
    small = np.setdiff1d(np.flatnonzero(overlaps), expected)
    if window.grid is None:
        assert not len(small)
        return
    assert window.grid.busy.shape == window.grid.category.shape == (num_rows, pixels)
    assert window.grid.busy.dtype == window.grid.category.dtype == np.uint8
    for r in range(num_rows):
        mine = small[row[small] == r]
        cover, seen = brute(t0, t1, pixels, start[mine], length[mine], category[mine])
        busy, drawn = window.grid.busy[r], window.grid.category[r]
        check_row(busy, drawn, cover, seen, len(np.unique(category[row == r])) if len(mine) else 0)


def near(mask):
    out = mask.copy()
    out[1:] |= mask[:-1]
    out[:-1] |= mask[1:]
    return out


def check_row(busy, drawn, cover, seen, num_categories):
    np.testing.assert_array_equal(busy > 0, drawn != NOTHING)
    assert not (seen & ~near(busy > 0)).any(), "a covered pixel is not drawn"
    assert not ((busy > 0) & ~near(seen)).any(), "something is drawn where nothing is"
    total = cover.sum(1)
    share = np.divide(cover.max(1), total, out=np.zeros_like(total), where=total > 0)
    best = np.where((share > SURE) & (cover.max(1) > SURE), cover.argmax(1), -1)
    for i in range(len(busy)):
        around = best[max(0, i - 1) : i + 2]
        if (around == best[i]).all() and best[i] >= 0:
            assert drawn[i] == best[i], f"pixel {i}: {cover[i]}"
    # what a pixel holds may be drawn in its neighbours, and nowhere else
    inner = slice(1, -1)
    most = total[:-2] + total[1:-1] + total[2:]
    assert (busy[inner] <= np.minimum(255, np.ceil(255 * most) + 1)).all(), "busier than the pixel and its neighbours"
    drawn_around = busy[:-2].astype(int) + busy[1:-1] + busy[2:]
    assert (drawn_around >= 255 * np.minimum(total[inner], 1) - 1).all(), "less busy than what is there"


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_pixel_truth(data):
    num_rows, row, start, length, category = data.draw(spans())
    t0, t1, pixels = data.draw(windows(start, length))
    index = SpanIndex.build(row, start, length, category, num_rows=num_rows)
    max_spans = data.draw(st.sampled_from([20_000, 20_000, 30, 3, 0]))
    window = index.query(t0, t1, pixels=pixels, max_spans=max_spans)
    assert len(window.spans.event) <= max_spans
    check_window(window, num_rows, row, start, length, category)


@pytest.mark.parametrize("zoom", [1.0, 0.3, 0.1, 0.03, 0.003])
@pytest.mark.parametrize("pixels", [150, 1100])
def test_pixel_truth_of_many_spans(rng, zoom, pixels):
    n = 20_000
    length = np.where(rng.random(n) < 0.01, 40 * US, 1) * rng.integers(0, US, n)
    start = np.cumsum(length + rng.integers(0, US, n) * (rng.random(n) < 0.5)) - length
    category = np.cumsum(rng.random(n) < 0.02) % 4
    row = np.zeros(n, np.int64)
    width = int((start[-1] + length[-1]) * zoom)
    t0 = int((start[-1] - width) * 0.4) if zoom < 1 else 0
    window = SpanIndex.build(row, start, length, category, num_rows=1).query(
        t0, t0 + width, pixels=pixels, max_spans=50
    )
    assert window.threshold_px in (1, 2, 4, 8, 16, 32, 64)
    check_window(window, 1, row, start, length, category)


# ------------------------------------------------------------------------------------------------- rows and sizes
def some(n=1000, num_rows=5, seed=0):
    rng = np.random.default_rng(seed)
    length = rng.integers(0, 90, n)
    return rng.integers(0, num_rows, n), np.arange(n) * 100, length, rng.integers(0, 6, n).astype(np.uint8)


def test_rows_in_any_order_and_again():
    arrays = some()
    index = SpanIndex.build(*arrays, num_rows=7)
    whole, wanted = index.query(0, 50_000, pixels=700), np.array([4, 6, 0, 4])
    part = index.query(0, 50_000, pixels=700, rows=wanted)
    for name in ("busy", "category"):
        np.testing.assert_array_equal(getattr(part.grid, name), getattr(whole.grid, name)[wanted])
    for place, row in enumerate(wanted):
        mine, of_row = part.spans.row == place, whole.spans.row == row
        np.testing.assert_array_equal(part.spans.event[mine], whole.spans.event[of_row])
    none = index.query(0, 50_000, pixels=700, rows=np.empty(0, np.int64))
    assert (none.num_events, none.num_rows, none.grid, len(none.spans.event)) == (0, 0, None, 0)


def test_the_picture_does_not_depend_on_the_order_of_events(rng):
    arrays = some()
    order = rng.permutation(1000)
    one, other = (
        SpanIndex.build(*a, num_rows=5).query(-7, 90_000, pixels=333) for a in (arrays, [v[order] for v in arrays])
    )
    np.testing.assert_array_equal(one.grid.busy, other.grid.busy)
    np.testing.assert_array_equal(one.grid.category, other.grid.category)
    np.testing.assert_array_equal(one.spans.event, order[other.spans.event])


def test_nothing_one_span_and_a_mark():
    for rows in (0, 3):
        index = SpanIndex.build([], [], [], [], num_rows=rows)
        window = index.query(0, 10, pixels=5)
        assert (window.num_events, window.grid, len(window.spans.event), index.extent_ns) == (0, None, 0, (0, 0))
    one = SpanIndex.build([1], [10], [5], [3], num_rows=2)
    assert one.extent_ns == (10, 15) and one.num_rows == 2 and one.num_events == 1
    window = one.query(0, 20, pixels=20)
    assert window.grid is None and window.spans.event.tolist() == [0] and window.spans.row.tolist() == [1]
    for start in (0, 10, 19):
        window = SpanIndex.build([0], [start], [0], [9], num_rows=1).query(0, 20, pixels=20)
        assert np.flatnonzero(window.grid.busy[0]).tolist() == [start] and window.grid.category[0, start] == 9
    assert SpanIndex.build([0], [20], [0], [9], num_rows=1).query(0, 20, pixels=20).num_events == 0


def test_the_threshold_doubles_until_the_spans_are_few_enough():
    length = 2 ** np.arange(10)
    start = np.arange(10) * 1000
    index = SpanIndex.build(np.zeros(10, int), start, length, np.zeros(10, int), num_rows=1)
    for most in range(11):
        window = index.query(0, 10_000, pixels=10_000, max_spans=most)
        assert len(window.spans.event) == most and window.threshold_px == 2 ** (10 - most)


def test_busy_is_the_share_of_the_pixel():
    start = np.arange(4000) * 10
    index = SpanIndex.build(np.zeros(4000, int), start, np.full(4000, 3), np.full(4000, 2), num_rows=1)
    grid = index.query(0, 40_000, pixels=40).grid
    assert (np.abs(grid.busy[0] / 255 - 0.3) < 0.01).all() and (grid.category == 2).all()


def test_a_majority_wins_however_the_blocks_fall():
    near_tie = [(1, 26), (2, 25), (1, 25), (2, 24)]  # category 1 leads a block of 4 by a hair
    category, length = (np.array(v * 100) for v in zip(*(near_tie * 4 + [(2, 25)] * 4), strict=True))
    start = np.cumsum(length) - length
    assert length[category == 2].sum() / length.sum() < 0.6
    index = SpanIndex.build(np.zeros_like(start), start, length, category, num_rows=1)
    for pixels in (1, 3, 10):
        assert (index.query(0, int(length.sum()), pixels=pixels).grid.category == 2).all()


def test_renamed_and_memory():
    arrays = some(100_000, num_rows=20)
    index = SpanIndex.build(*arrays, num_rows=20)
    assert index.nbytes / index.num_events < 35
    names = np.arange(100_000)[::-1]
    a, b = (i.query(0, 10**5, pixels=2000).spans.event for i in (index, index.renamed(names)))
    np.testing.assert_array_equal(names[a], b)


def test_messages():
    with pytest.raises(MappnbError, match="2 rows, 1 starts, 2 lengths and 2 categories"):
        SpanIndex.build([0, 0], [1], [1, 1], [0, 0], num_rows=1)
    with pytest.raises(MappnbError, match="rows 0 to 4; expected 0 to 3"):
        SpanIndex.build([0, 4], [1, 1], [1, 1], [0, 0], num_rows=4)
    with pytest.raises(MappnbError, match="category 255 stands for nothing"):
        SpanIndex.build([0], [1], [1], np.array([255]), num_rows=1)
    index = SpanIndex.build([0], [1], [1], [0], num_rows=1)
    for window in ((5, 5), (6, 5), (0, 2**63)):
        with pytest.raises(MappnbError, match="expected t0 < t1"):
            index.query(*window, pixels=10)
    with pytest.raises(MappnbError, match="at most 100 cells: ask for fewer rows"):
        index.query(0, 5, pixels=101, max_cells=100)
    with pytest.raises(MappnbError, match="the index has rows 0 to 0"):
        index.query(0, 5, pixels=10, rows=np.array([1]))
