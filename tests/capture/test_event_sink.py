"""What the events table says of a span, however it begins, ends and is flushed: against a model of one thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.capture._collective_calls import first_tensor, num_bytes, payload
from mappnb.capture._megatron_model import lengths_of
from mappnb.capture.recorder import Recorder
from mappnb.capture.writer import EventSink
from mappnb.terms import Flag

ACTIONS = st.sampled_from(["begin", "begin", "end", "end", "flush", "off", "on"])


class Table:
    """Keeps what is appended."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []

    def append(self, rows: Any, *, meta: dict[str, Any]) -> None:
        """Keep a copy: what is written later must not change what was."""
        assert meta["dropped"] == 0
        self.pieces.append(rows.copy())


def final_rows(pieces: list[Any]) -> dict[int, tuple[int, int]]:
    """Flags and duration of the last row of each span, by its start."""
    return {int(r["start_ns"]): (int(r["flags"]), int(r["duration_ns"])) for piece in pieces for r in piece}


@pytest.mark.parametrize("pure_python", [False, True])
@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_every_span_has_its_last_row(pure_python, actions):
    recorder, table = Recorder(pure_python=pure_python), Table()
    sink = EventSink(recorder, SimpleNamespace(table=lambda *_, **__: table))
    site = recorder.site(category="host", op="span")
    stack: list[int] = []  # start of each open span; -1 for one that is not recorded
    shown: set[int] = set()
    expected: dict[int, tuple[int, int]] = {}
    now_ns, num_ended = 100, 0
    for action in actions:
        now_ns += 10
        recorder._core._set_test_clock(now_ns)
        if action in ("on", "off"):
            recorder.enabled = action == "on"
        elif action == "begin":
            recorder.begin(site)
            stack.append(now_ns if recorder.enabled else -1)
        elif action == "end" and stack:
            recorder.end()
            start_ns = stack.pop()
            if start_ns >= 0 and recorder.enabled:
                expected[start_ns] = (0, now_ns - start_ns)
                num_ended += 1
            elif start_ns in shown:
                expected[start_ns] = (int(Flag.OPEN | Flag.CLIPPED), -1)
        elif action == "flush":
            sink.flush()
            shown |= {s for s in stack if s >= 0}
            assert {s for s, (flags, _) in final_rows(table.pieces).items() if flags == Flag.OPEN} == shown & set(stack)
    sink.finish()
    expected |= {s: (int(Flag.OPEN | Flag.CLIPPED), now_ns - s) for s in stack if s >= 0}
    found = final_rows(table.pieces)
    assert found.keys() == expected.keys()
    for start_ns, (flags, duration_ns) in expected.items():
        assert found[start_ns][0] == flags
        assert duration_ns in (-1, found[start_ns][1])
    rows = [r for piece in table.pieces for r in piece if not r["flags"] & Flag.OPEN]
    assert len(rows) == num_ended, "finished rows are written once"


TENSORS = st.integers(0, 5).map(torch.zeros)


@given(value=st.recursive(TENSORS | st.none() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_payload_in_one_look_is_that_in_two(value):
    tensor, size = payload(value)
    assert size == num_bytes(value)
    assert tensor is first_tensor(value) or tensor == first_tensor(value)


@given(lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=4))
def test_document_lengths(lengths):
    width = max((sum(sample) for sample in lengths), default=0)
    lengths = [[*sample, width - sum(sample)] if sum(sample) < width else sample for sample in lengths]
    rows = [np.concatenate([np.arange(n) for n in sample]) for sample in lengths]
    positions = np.array(rows, np.int64).reshape(len(rows), -1 if rows else 1)
    assert lengths_of(positions).tolist() == [n for sample in lengths for n in sample]
