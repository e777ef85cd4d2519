"""The native self-time table equals its numpy twin on random spans: nested or not, several lanes, transfers with and without numbers."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb import _core, analysis
from mappnb.analysis import _work_feed
from mappnb.analysis._work_reference import reference_table
from mappnb.analysis._work_table import as_dataset, join
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.schema import EVENTS, empty
from mappnb.terms import Flag
from mappnb.testing import generate_run

SITES = [
    ("compute", "forward_step", "", "forward"),
    ("compute", "layer", "", "forward"),
    ("compute", "backward_step", "", "backward"),
    ("compute", "span", "", "recompute"),
    ("compute", "kernel", "", "none"),
    ("optimizer", "optimizer_step", "", "none"),
    ("data", "next_batch", "", "none"),
    ("host", "gc", "", "none"),
    ("mark", "iteration", "", "none"),
    ("checkpoint", "checkpoint_save", "", "none"),
    ("collective", "all_reduce", "", "none"),
    ("collective", "all_to_all", "", "none"),
    ("p2p", "send", "", "none"),
    ("p2p", "recv", "", "none"),
    ("wait", "wait", "send", "none"),
    ("wait", "wait", "recv", "none"),
    ("wait", "wait", "all_reduce", "none"),
]


@st.composite
def datasets(draw):
    """Events on small integer times, so that ties, instants and improper nesting are common."""
    n = draw(st.integers(1, 30))
    data = empty(EVENTS, {"event": n})
    numbers = {
        "rank": st.integers(0, 2), "step": st.integers(-1, 2), "stage": st.integers(-1, 1), "thread": st.integers(0, 1),
        "stream": st.sampled_from([-1, -1, -1, 3]), "group": st.sampled_from([-1, 5, 6]), "seq": st.integers(-1, 3),
        "peer": st.integers(-1, 2), "bytes": st.sampled_from([4, 4, 4, 8]),
        "flags": st.sampled_from([0, 0, 0, int(Flag.ASYNC), int(Flag.CLIPPED)]), "start_ns": st.integers(0, 20),
        "duration_ns": st.integers(0, 12),
    }  # fmt: skip
    for name, values in numbers.items():
        data[name][:] = draw(st.lists(values, min_size=n, max_size=n))
    if draw(st.booleans()):
        data["seq"][data["seq"] > 1] += 10**12  # few numbers in a wide range
    data["peer"][data["peer"] == data["rank"]] = -1  # nobody sends to itself
    data["incarnation"][:] = data["step"] >= draw(st.integers(0, 3))
    data["raw_start_ns"] = data["start_ns"]
    sites = draw(st.lists(st.sampled_from(SITES), min_size=n, max_size=n))
    for i, name in enumerate(("category", "op", "name", "phase")):
        data[name][:] = [s[i] for s in sites]
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


@settings(max_examples=300, deadline=None)
@given(datasets())
def test_native_equals_the_twin(events):
    try:
        native = analysis.work(events)
    except MappnbError:
        assert not (events["step"].values >= 0).any() or not reference_table(events).present.any()
        return
    twin = as_dataset(join([reference_table(events)]), hosts={}, attrs={})
    xr.testing.assert_allclose(native.drop_vars("host"), twin.drop_vars("host"), rtol=0, atol=1e-15)


@settings(max_examples=25, deadline=None)
@given(datasets(), st.integers(-(10**12), 10**12), st.randoms(use_true_random=False))
def test_neither_time_nor_order_of_rows_matters(events, shift, random):
    """A shift of all clocks changes nothing; nor do the places of rows of other ranks between one another."""
    if not (events["step"].values >= 0).any():
        return
    try:
        before = analysis.work(events)
    except MappnbError:
        return
    later = events.assign(start_ns=events.start_ns + shift, raw_start_ns=events.raw_start_ns + shift)
    ranks = sorted(set(events["rank"].values.tolist()))
    random.shuffle(ranks)
    order = np.concatenate([np.flatnonzero(events["rank"].values == r) for r in ranks])
    xr.testing.assert_allclose(analysis.work(later.isel(event=order)), before, rtol=0, atol=1e-15)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    import mappnb

    path = tmp_path_factory.mktemp("work") / "run"
    generate_run(path, layout=Layout(pp=2, dp=2), num_microbatches=3, num_steps=40, seed=8, segment_rows=300)
    return mappnb.attach(path)


@pytest.mark.parametrize("rows", [1, 400, 2000, 10**7])
def test_blocks_of_any_size_give_the_same(run, rows, monkeypatch):
    """Segments of 300 rows, blocks from one row to the whole run: every row counts once."""
    monkeypatch.setattr(_work_feed, "BLOCK_ROWS", rows)
    twin = as_dataset(join([reference_table(run.sel())]), hosts={}, attrs={})
    native = analysis.work(run)
    xr.testing.assert_allclose(native.drop_vars("host"), twin.drop_vars("host"), rtol=0, atol=1e-12)
    part = analysis.work(run, step=slice(7, 19))
    xr.testing.assert_allclose(part.seconds, native.seconds.sel(step=slice(7, 19)))


def test_a_clock_model_that_drifts_is_used(run):
    by_clock = analysis.work(run.align() and run)
    twin = as_dataset(join([reference_table(run.sel())]), hosts={}, attrs={})
    xr.testing.assert_allclose(by_clock.drop_vars("host"), twin.drop_vars("host"), rtol=0, atol=1e-12)
    run.use_clock(None)


def test_what_is_out_of_place_is_refused():
    native = _core.SelfTime(2)
    native.begin(0, 10)
    with pytest.raises(ValueError, match="column: outside the ranks"):
        native.end_rank(0, 2)
    with pytest.raises(ValueError, match="which: no such pass"):
        native.end_rank(1, 0)
    with pytest.raises(ValueError, match="out: shape"):
        native.read_cells(np.zeros((8, 3, 3), np.int64))
    columns = [np.zeros(3, d) for d in ("i8", "i8", "i4", "i4", "i2", "i8", "i8", "i8", "i4", "i4", "i4", "u2")]
    with pytest.raises(ValueError, match="kind: no such kind"):
        native.add(0, 0, 0, *columns, np.array([99], np.int8), np.zeros(1, np.int32))
    columns[5] = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="group: as many values as rows, or one"):
        native.add(0, 0, 0, *columns, np.zeros(1, np.int8), np.zeros(1, np.int32))
