"""Lanes of traces: numbered in order of first use, however many there are and however the rows are cut into batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mappnb.capture.importers import _traces
from mappnb.capture.importers._traces import Lanes

EDGE = st.sampled_from([0, 1, -1, 7, 2**62, -(2**63), 2**63 - 1])
KEYS = st.lists(st.tuples(EDGE, EDGE | st.integers(0, 60)), max_size=120)


def numbers(lanes, keys):
    pid, tid = np.array(keys, np.int64).reshape(-1, 2).T
    return lanes.number(pid, tid)


@given(st.lists(KEYS, max_size=5))
def test_numbers_are_those_of_a_dictionary(batches):
    lanes, known = Lanes(), {}
    for keys in batches:
        found = numbers(lanes, keys)
        assert found.dtype == np.int32
        assert found.tolist() == [known.setdefault(k, len(known)) for k in keys]
    assert lanes.pairs == list(known)


def test_many_lanes_and_pairs_that_mix_to_the_same_number():
    factor = int(_traces._mixed(np.array([1]), np.array([0]))[0])
    alike = [(0, factor), (1, 0)]
    assert len(set(_traces._mixed(*np.array(alike, np.int64).T).tolist())) == 1
    keys = [*alike, *((i, i % 3) for i in range(2, 200)), *alike]
    lanes, known = Lanes(), {}
    for _ in range(2):
        assert numbers(lanes, keys).tolist() == [known.setdefault(k, len(known)) for k in keys]
