"""The validator against a tiny executor: it finds a fault exactly when the order cannot run."""

from __future__ import annotations

import re
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mappnb.errors import ScheduleError
from mappnb.sched import Action, Costs, Placement, Schedule, schedule
from mappnb.sched.codes import PAIRED
from mappnb.sched.validate import problems, validate
from mappnb.terms import Kind

from .strategies import registered

F, B, BI, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def order(*rows: str, **options) -> Schedule:
    return Schedule([[Action.parse(w) for w in row.split()] for row in rows], **options)


def runs(ranks: list[list[Action]], placement: Placement, pairs: frozenset[tuple[int, int]]) -> bool:
    """Whether an order is whole, in place, and comes to its end: no arrays, nothing of the package but its values."""
    everything = [a for r in ranks for a in r]
    count = Counter(everything)
    microbatches = 1 + max((a.microbatch for a in everything), default=-1)
    whole = set()
    for s in range(placement.num_stages):
        for mb in range(microbatches):
            split = Action(s, BI, mb) in count
            whole |= {Action(s, F, mb)} | ({Action(s, BI, mb), Action(s, W, mb)} if split else {Action(s, B, mb)})
    if not everything or set(count) != whole or max(count.values()) > 1:
        return False
    if any(placement.rank(a.stage, a.kind, a.microbatch) != r for r, row in enumerate(ranks) for a in row):
        return False
    at, done = [0] * len(ranks), set()
    while len(done) < len(everything):
        before = len(done)
        for r, row in enumerate(ranks):
            unit = row[at[r] : at[r] + (2 if (r, at[r]) in pairs else 1)]
            if unit and all(_ready(a, done, placement.num_stages) for a in unit):
                done |= set(unit)
                at[r] += len(unit)
        if len(done) == before:
            return False
    return True


def _ready(a: Action, done: set[Action], stages: int) -> bool:
    s, mb = a.stage, a.microbatch
    if a.kind is F:
        return s == 0 or Action(s - 1, F, mb) in done
    if a.kind is W:
        return Action(s, BI, mb) in done
    above = s == stages - 1 or bool({Action(s + 1, B, mb), Action(s + 1, BI, mb)} & done)
    return Action(s, F, mb) in done and above


@st.composite
def good(draw) -> Schedule:
    """Any registered schedule, some backwards split in two, some neighbours paired where that can run."""
    sched = draw(registered(max_ranks=3))
    if not sched.pairs and draw(st.booleans()):
        split = draw(st.sets(st.sampled_from([a for r in sched.ranks for a in r if a.kind is B] or [None]), max_size=3))
        ranks = [
            [
                x
                for a in r
                for x in ((Action(a.stage, BI, a.microbatch), Action(a.stage, W, a.microbatch)) if a in split else (a,))
            ]
            for r in sched.ranks
        ]
        pair = {
            (r, draw(st.integers(0, len(row) - 2)))
            for r, row in enumerate(ranks)
            if len(row) > 1 and draw(st.booleans())
        }
        pair = frozenset(pair) if runs(ranks, sched.placement, frozenset(pair)) else frozenset()
        sched = Schedule(ranks, placement=sched.placement, pairs=pair)
    return sched


def mutated(draw, rows: list[list]) -> list[list]:
    """One of: nothing, drop, double, swap two of a rank, move to another rank or place."""
    rows = [list(r) for r in rows]
    full = [i for i, r in enumerate(rows) if r]
    r = draw(st.sampled_from(full))
    i, j = (draw(st.integers(0, len(rows[r]) - 1)) for _ in range(2))
    match draw(st.sampled_from(["nothing", "drop", "double", "swap", "swap", "move"])):
        case "drop":
            del rows[r][i]
        case "double":
            rows[r].insert(j, rows[r][i])
        case "swap":
            rows[r][i], rows[r][j] = rows[r][j], rows[r][i]
        case "move":
            other = draw(st.sampled_from(full))
            rows[other].insert(min(j, len(rows[other])), rows[r].pop(i))
    return rows


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_fault_is_found_exactly_when_the_order_cannot_run(data):
    sched = data.draw(good())
    ranks = mutated(data.draw, sched.ranks)
    pairs = frozenset((r, i) for r, i in sched.pairs if i < len(ranks[r]) - 1)
    assume(sum(map(len, ranks)))
    changed = Schedule(ranks, placement=sched.placement, pairs=pairs)
    found = problems(changed)
    assert (not found) == runs(ranks, sched.placement, pairs), found
    for problem in found:
        if problem.position is not None:
            assert "<-- here" in problem.picture
            assert 0 <= problem.position < len(ranks[problem.rank])
    if found and "cannot start" in found[0].text:
        check_cycle(changed, found[0].text)


def check_cycle(sched: Schedule, text: str) -> int:
    """Assert that the chain in a message is a cycle of needs and program order; return its length."""
    text = text.replace("\n", " ")
    m = re.match(r"rank (\d+) cannot start (\S+) \(position (\d+)\): it needs (.*)\. To break the cycle, ", text)
    at = {a: (r, i) for r, row in enumerate(sched.ranks) for i, a in enumerate(row)}
    begin = unit = _unit(m[2])
    assert at[unit[0]] == (int(m[1]), int(m[3]))
    links = re.split(r",\s+which needs ", m[4])
    for link in links:
        need, _, how = link.partition(", which ")
        need = Action.parse(need)
        assert any(need in sched.needs(a) for a in unit)
        if behind := re.fullmatch(r"rank (\d+) runs after (\S+)", how):
            unit = _unit(behind[2])
            assert at[need][0] == at[unit[0]][0] == int(behind[1])
            assert at[unit[-1]][1] < at[need][1]
        elif together := re.fullmatch(r"starts together with (\S+)", how):
            first = Action.parse(together[1])
            assert at[first] in sched.pairs and at[need] == (at[first][0], at[first][1] + 1)
            unit = (first, need)
        else:
            assert how == ""
            unit = (need, sched.ranks[at[need][0]][at[need][1] + 1]) if at[need] in sched.pairs else (need,)
    assert unit == begin
    return len(links)


def _unit(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(w) for w in text.strip("()").split(";"))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_deadlock_is_shown_as_a_cycle(data):
    sched = data.draw(good())
    ranks = [data.draw(st.permutations(r)) if data.draw(st.booleans()) else list(r) for r in sched.ranks]
    pairs = frozenset((r, data.draw(st.integers(0, len(row) - 2))) for r, row in enumerate(ranks) if len(row) > 1)
    changed = Schedule(ranks, placement=sched.placement, pairs=pairs)
    found = problems(changed)
    assert (not found) == runs(ranks, sched.placement, pairs)
    if found:
        assert check_cycle(changed, found[0].text) <= sched.num_ranks


def test_the_deadlock_message():
    bad = order("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3")
    with pytest.raises(ScheduleError) as err:
        bad.validate()
    text = str(err.value)
    assert text.startswith(
        "rank 0 cannot start 0B0 (position 3): it needs 1B0, which rank 1 runs after 1F3, which needs 0F3, "
        "which rank 0 runs after 0B0. To break the cycle, put 1B0 before 1F3 on rank 1, or 0F3 before 0B0 on rank 0"
    )
    assert "position 3  [0B0]   [1F3]  <-- here" in text.splitlines()
    assert check_cycle(bad, problems(bad)[0].text) == 2


def test_a_pair_waits_for_the_needs_of_both():
    rows = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    order(*rows, pairs=[(1, 1)]).validate()
    bad = order(*rows, pairs=[(0, 1), (1, 1)])
    assert "cannot start (0F1;0B0)" in problems(bad)[0].text
    alone = order("0F0 0B0", pairs=[(0, 0)])
    assert problems(alone)[0].text == (
        "rank 0 cannot start (0F0;0B0) (position 0): it needs 0F0. To break the cycle, take the pair apart"
    )


@pytest.mark.parametrize(
    ("rows", "rank", "position", "text"),
    [
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), 0, 2, "0B1 (or 0I1 and 0W1) is missing; it belongs behind 0B0"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"), 1, 0, "1F1 is missing; it belongs behind 1F0"),
        (("0F0 0F1 0B0 0B1", "1B0 1F1 1B1"), 1, None, "1F0 is missing"),
        (("0F0 0F1 0B0 0B1 0F1", "1F0 1B0 1F1 1B1"), 0, 4, "0F1 runs a second time, first on rank 0 at position 1"),
        (("0F0 0B0 0I0 0W0",), 0, 2, "0I0 beside 0B0 of rank 0, position 1"),
        (("0F0 0B0 0W0",), 0, 2, "0W0 beside 0B0"),
        (("0F0 0I0",), 0, 1, "0I0 has no 0W0; put 0W0 behind it"),
        (("0F0 0W0",), None, None, "0B0 (or 0I0 and 0W0) is missing"),
        (("0F0 0W0 0I0",), 0, 1, "cannot start 0W0 (position 1): it needs 0I0, which rank 0 runs after 0W0"),
        (("0F0 0F2 0B0 0B2",), 0, 1, "0F2 is of microbatch 2, but no action is of microbatch 1"),
        (("0F1 0B1",), 0, 0, "no action is of microbatch 0"),
        (("0F0 0B0", "2F0 2B0"), 1, 0, "2F0 is of stage 2, but no action is of stage 1"),
        (("0F0 0B0", "1F0 1B0", "3F0 3B0"), 2, 0, "3F0 is of a stage that the placement does not have (0 to 2)"),
        (("0F0 0B0 0F1", "1F0 1B0", "2F0 2B0"), 0, 2, "0F1 is of microbatch 1, which only 1 of 3 stages have"),
        (("0F0 1F0 0B0", "1B0", "2F0 2B0"), 0, 1, "1F0 belongs on rank 1"),
    ],
)
def test_each_fault_is_named_with_its_place(rows, rank, position, text):
    stages = 3 if rows[-1].startswith(("2", "3")) else len(rows)
    found = problems(order(*rows, placement=Placement.loop(stages)))
    assert text in found[0].text
    if position is not None:
        assert (found[0].rank, found[0].position) == (rank, position)
        assert "<-- here" in str(found[0])


def test_no_action_of_the_last_stage():
    assert "no action of stage 1" in problems(order("0F0 0B0", placement=Placement.loop(2)))[0].text
    empty = Schedule.from_codes(np.zeros(0, np.uint32), np.zeros(2, np.int64), placement=Placement.loop(1))
    assert "no action at all" in problems(empty)[0].text


def test_all_faults_of_one_check_are_listed():
    found = problems(order("0F0 0F1 0B0 0B1 0F1 0F0"))
    assert [(p.rank, p.position) for p in found] == [(0, 5), (0, 4)]


def test_the_picture_of_a_large_schedule_is_small():
    sched = schedule("1f1b", num_stages=32, num_microbatches=64)
    ranks = [list(r) for r in sched.ranks]
    ranks[20].remove(Action(20, B, 30))
    text = str(problems(Schedule(ranks, placement=sched.placement))[0])
    assert len(text.splitlines()) < 20 and "(20 more ranks are not shown)" in text
    assert "rank 20" in text and "[20B29]" in text


def test_a_long_cycle_is_one_line_per_need():
    p = 6  # rank 0 runs its second chunk first
    rows = [f"{s}F0 {s + p}F0 {s + p}B0 {s}B0" for s in range(p)]
    rows[0] = "6F0 0F0 6B0 0B0"
    bad = order(*rows)
    found = problems(bad)[0]
    assert "it needs 5F0,\n  which needs 4F0,\n" in found.text
    assert check_cycle(bad, found.text) == p


def test_a_very_long_cycle_is_cut():
    p = 1024
    ranks = [[Action(s, F, 0), Action(s + p, F, 0), Action(s + p, B, 0), Action(s, B, 0)] for s in range(p)]
    ranks[0][:2] = ranks[0][1::-1]
    start = time.process_time()
    text = problems(Schedule(ranks))[0].text
    assert "\n  which needs … (1000 more) …,\n" in text and len(text) < 1000
    assert time.process_time() - start < 5


def test_a_pair_is_of_two():
    three = order("0F0 0F1 0B0 0B1", pairs=[(0, 0), (0, 1)])
    assert "rank 0, position 1: 0F1 is in a pair that is not of two" in problems(three)[0].text
    codes = three.codes & ~PAIRED
    codes[3] |= PAIRED
    last = Schedule.from_codes(codes, np.array([0, 4]), placement=Placement.loop(1))
    assert "rank 0, position 3: 0B1 is in a pair that is not of two" in problems(last)[0].text


# ------------------------------------------------------------------------------------------------------------ memory
def test_memory_limit():
    sched = schedule("1f1b", num_stages=4, num_microbatches=8)
    sched.validate(memory_limit=4).validate(memory_limit=[4, 3, 2, 1])
    with pytest.raises(
        ScheduleError, match=r"rank 1, position 2: memory exceeds 2 when 1F2 runs; the rank's peak is 3, 0"
    ):
        sched.validate(memory_limit=[4, 2, 2, 1])
    costs = Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, activation=10, static_memory=[5, 5, 5, 500])
    with pytest.raises(ScheduleError, match=r"rank 3, position 0: .* peak is 510, 500 of it static"):
        validate(sched, costs=costs, memory_limit=45)
    validate(sched, costs=costs.tables(sched), memory_limit=510)
    with pytest.raises(ScheduleError, match="memory_limit has shape"):
        validate(sched, memory_limit=[1, 2])


def test_memory_of_a_pair_counts_both():
    sched = order("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", pairs=[(1, 1)])
    sched.validate(memory_limit=2)
    with pytest.raises(ScheduleError, match="rank 1, position 2: memory exceeds 1 when 1F1 runs"):
        sched.validate(memory_limit=[2, 1])


def test_unknown_mode_of_sends():
    with pytest.raises(ScheduleError, match="sends is 'eager'; expected one of buffered, rendezvous"):
        validate(order("0F0 0B0"), sends="eager")


def test_half_a_million_actions_in_seconds():
    sched = schedule("1f1b", num_stages=64, num_microbatches=4096)
    start = time.process_time()
    validate(sched)
    assert time.process_time() - start < 5  # 0.7 s here


# ------------------------------------------------------------------------------------------------------------- torch
@pytest.mark.oracle
def test_the_display_order_of_torchs_1f1b_is_refused():
    """On the last rank its forwards are one microbatch late: 3F1 3B0 3F2 3B1 ..."""
    schedules_ = pytest.importorskip("torch.distributed.pipelining.schedules")
    mock = schedules_.Schedule1F1B.__new__(schedules_.Schedule1F1B)
    mock._num_stages, mock._n_microbatches = 4, 8
    shown = mock._get_pipeline_order()
    rows = [[str(a) for a in shown[r] if a is not None and "REDUCE" not in str(a)] for r in range(4)]
    assert rows[3][:2] == ["3F1", "3B0"]
    sched = order(*(" ".join(r) for r in rows))
    with pytest.raises(
        ScheduleError, match="rank 3, position 14: 3F8 is of microbatch 8, which only 1 of 4 stages have"
    ):
        sched.validate()
    with pytest.raises(ScheduleError, match=r"row 4 \(rank 3\), column \d+ \('3F8'\)"):
        Schedule.from_csv("\n".join(",".join("" if a is None else str(a) for a in shown[r]) for r in range(4)))
