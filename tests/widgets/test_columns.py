"""Columns that are not in memory, and columns of descriptions kept as codes, read as plain ones do."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mappnb.widgets import _columns
from mappnb.widgets._coded import coded_variable, coding_of
from mappnb.widgets._columns import take
from mappnb.widgets._search import find


def coded(rng, n=500):
    table = np.array(["layer", "mlp", "all_reduce", ""], object)
    codes = rng.integers(-1, 3, n).astype(np.int32)
    plain = xr.Variable(("event",), table[codes])
    return coded_variable(codes, table, like=plain), plain


def test_a_coded_column_reads_like_the_plain_one(rng):
    variable, plain = coded(rng)
    assert coding_of(variable) is not None and coding_of(plain) is None and coding_of(variable[3:]) is None
    for key in (
        slice(None),
        slice(3, 90, 7),
        slice(None, None, -1),
        np.array([5, 5, 2, 499]),
        17,
        np.arange(500) % 3 == 0,
    ):
        np.testing.assert_array_equal(variable[key].values, plain[key].values)


def test_take_reads_what_indexing_reads(rng):
    variable, plain = coded(rng)
    events = xr.Dataset({"coded": variable, "plain": plain})
    index = rng.permutation(500)[:60]
    np.testing.assert_array_equal(take(events, "coded", index), plain.values[index])
    np.testing.assert_array_equal(take(events, "plain", index), plain.values[index])


def test_take_of_a_column_on_disk(make, rng, monkeypatch):
    events = make(num_steps=4, num_microbatches=8).events
    assert not events["bytes"].variable._in_memory
    index = rng.permutation(events.sizes["event"])[:40]
    monkeypatch.setattr(_columns, "NEAR_ROWS", 3)
    got = take(events, "name", index)
    np.testing.assert_array_equal(got, events["name"].values[index])
    monkeypatch.setattr(_columns, "MOST_READS", 2)
    assert take(make("again", num_steps=4, num_microbatches=8).events, "op", index) is None


@pytest.mark.parametrize("text", ["layer", "/^m/", "red", "nothing", ""])
def test_search_over_codes_finds_what_it_finds_over_texts(rng, text):
    variable, plain = coded(rng)
    fields = {"name": plain, "op": variable, "category": plain, "phase": variable}
    fast = xr.Dataset(fields)
    slow = xr.Dataset({k: ("event", v.values) for k, v in fields.items()})
    np.testing.assert_array_equal(find(fast, text), find(slow, text))
