"""Random schedules for property tests."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from mappnb.errors import ScheduleError
from mappnb.sched import Schedule, schedule, schedules
from mappnb.sched.registry import family


@st.composite
def registered(draw, max_ranks: int = 4) -> Schedule:
    """Any registered schedule, of sizes that it takes."""
    name = draw(st.sampled_from(schedules()))
    chunks = family(name).chunks or draw(st.integers(1, 2))
    p, k = draw(st.integers(1, max_ranks)), draw(st.integers(1, 2))
    try:
        return schedule(name, num_stages=p * chunks, num_microbatches=p * chunks * k, num_chunks=chunks)
    except ScheduleError:
        assume(False)
