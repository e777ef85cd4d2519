"""Transfers against torch's own passes and against channels that are first in, first out."""

from __future__ import annotations

import re
from collections import deque

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mappnb.errors import ScheduleError
from mappnb.sched import Action, Placement, Schedule, Transfer, TransferKind, schedule
from mappnb.sched.action import parse
from mappnb.sched.communications import add_communications
from mappnb.sched.validate import problems
from mappnb.terms import Kind

from .strategies import registered

SENDS = (TransferKind.SEND_F, TransferKind.SEND_B)


def order(*rows: str, **options) -> Schedule:
    """Return a schedule with communications, its actions read off them."""
    full = [[parse(w) for w in row.split()] for row in rows]
    ranks = [[a for a in row if isinstance(a, Action)] for row in full]
    return Schedule(ranks, communications=full, **options)


def peer(sched: Schedule, t: Transfer) -> int:
    """The rank on the other side of a transfer."""
    backward = t.kind in (TransferKind.SEND_B, TransferKind.RECV_B)
    return sched.placement.rank(t.other.stage, Kind.BACKWARD if backward else Kind.FORWARD, t.microbatch)


class Broken(Exception):
    """The wrong message, or one that cannot be."""


class Channels:
    """Ranks that run their communications over channels that are first in, first out."""

    def __init__(self, sched: Schedule, rendezvous: bool) -> None:
        self.sched, self.rendezvous, self.rows = sched, rendezvous, sched.communications
        self.at = [0] * sched.num_ranks
        self.channel: dict[tuple[int, int], deque[Transfer]] = {}
        self.here: list[set] = [set() for _ in self.rows]  # what each rank made or received

    def run(self) -> bool:
        while any(self.step(r) for r in range(len(self.rows)) if self.at[r] < len(self.rows[r])):
            pass
        return self.at == [len(r) for r in self.rows] and not any(self.channel.values())

    def step(self, r: int) -> bool:
        x = self.rows[r][self.at[r]]
        if isinstance(x, Action):
            return self.compute(r)
        if not 0 <= x.other.stage < self.sched.num_stages:
            raise Broken
        return self.send(r, x) if x.kind in SENDS else self.receive(r, x)

    def compute(self, r: int) -> bool:
        number = sum(isinstance(y, Action) for y in self.rows[r][: self.at[r]])
        unit = self.rows[r][self.at[r] : self.at[r] + (2 if (r, number) in self.sched.pairs else 1)]
        if not all(isinstance(y, Action) for y in unit):
            raise Broken
        if not all(self.has(r, y, need) for y in unit for need in self.sched.needs(y)):
            return False
        self.here[r] |= set(unit)
        self.at[r] += len(unit)
        return True

    def has(self, r: int, a: Action, need: Action) -> bool:
        come = Transfer(a.stage, TransferKind.RECV_F if a.kind is Kind.FORWARD else TransferKind.RECV_B, a.microbatch)
        if need in self.here[r] or (need.stage != a.stage and come in self.here[r]):
            return True
        shipped = need.stage == a.stage and self.sched.placement.backward is not None
        return shipped and any(need in h for h in self.here)

    def send(self, r: int, x: Transfer) -> bool:
        kinds = "F" if x.kind is TransferKind.SEND_F else "BI"
        if not any(Action(x.stage, Kind(k), x.microbatch) in self.here[r] for k in kinds):
            raise Broken
        to = peer(self.sched, x)
        if self.rendezvous:
            head = self.rows[to][self.at[to]] if self.at[to] < len(self.rows[to]) else None
            if not isinstance(head, Transfer) or head.kind in SENDS or peer(self.sched, head) != r:
                return False
            self.take(to, head, x)
        else:
            self.channel.setdefault((r, to), deque()).append(x)
        self.at[r] += 1
        return True

    def receive(self, r: int, x: Transfer) -> bool:
        queue = self.channel.get((peer(self.sched, x), r))
        if not queue:
            return False  # with rendezvous the sender takes both on
        self.take(r, x, queue.popleft())
        return True

    def take(self, r: int, x: Transfer, message: Transfer) -> None:
        if message != x.other or x in self.here[r]:
            raise Broken
        self.here[r].add(x)
        self.at[r] += 1


def runs(sched: Schedule, *, rendezvous: bool = False) -> bool:
    """Whether communications come to their end, with the right message each time and the same actions."""
    try:
        done = Channels(sched, rendezvous).run()
    except Broken:
        return False
    whole = [tuple(a for a in row if isinstance(a, Action)) for row in sched.communications] == list(sched.ranks)
    return done and whole and all(map(_consumed, sched.communications))


def _consumed(row: tuple) -> bool:
    """Whether each receive stands before the action that uses it."""
    for i, x in enumerate(row):
        if isinstance(x, Transfer) and x.kind not in SENDS:
            kinds = ("F",) if x.kind is TransferKind.RECV_F else ("B", "I")
            if not any(Action(x.stage, Kind(k), x.microbatch) in row[i + 1 :] for k in kinds):
                return False
    return True


@settings(max_examples=60, deadline=None)
@given(sched=registered())
def test_every_schedule_gets_right_transfers(sched):
    full = add_communications(sched)
    assert full == sched and sched.communications is None
    full.validate()
    full.validate(sends="rendezvous")
    assert runs(full) and runs(full, rendezvous=True)
    for row, actions in zip(full.communications, sched.ranks, strict=True):
        assert tuple(a for a in row if isinstance(a, Action)) == actions
        for i, t in enumerate(row):
            if isinstance(t, Transfer) and t.kind in SENDS:  # right behind its producer, but for receives and its pair
                made = max(
                    j
                    for j in range(i)
                    if isinstance(row[j], Action) and row[j].stage == t.stage and row[j].microbatch == t.microbatch
                )
                assert all(isinstance(x, Transfer) for x in row[made + 1 : i]) or sched.pairs


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_fault_is_found_exactly_when_the_transfers_cannot_run(data):
    full = add_communications(data.draw(registered()))
    rows = [list(r) for r in full.communications]
    r = data.draw(st.integers(0, len(rows) - 1))
    i, j = (data.draw(st.integers(0, len(rows[r]) - 1)) for _ in range(2))
    rendezvous = data.draw(st.booleans())
    match data.draw(
        st.sampled_from(["nothing", "drop", "double", "swap", "swap", "neighbours", "place", "move", "overtake"])
    ):
        case "drop":
            del rows[r][i]
        case "double":
            rows[r].insert(j, rows[r][i])
        case "swap":
            rows[r][i], rows[r][j] = rows[r][j], rows[r][i]
        case "neighbours":
            rows[r][i - 1], rows[r][i] = rows[r][i], rows[r][i - 1]
        case "place":
            rows[r].insert(j, rows[r].pop(i))
        case "overtake":  # one receive goes before another one
            received = [n for n, x in enumerate(rows[r]) if isinstance(x, Transfer) and x.kind not in SENDS]
            assume(len(received) > 1)
            n = data.draw(st.integers(1, len(received) - 1))
            rows[r].insert(received[n - 1], rows[r].pop(received[n]))
        case "move":
            rows[data.draw(st.integers(0, len(rows) - 1))].insert(0, rows[r].pop(i))
    changed = Schedule(
        full.ranks, placement=full.placement, pairs=full.pairs, recompute=full.recompute, communications=rows
    )
    found = problems(changed, sends="rendezvous" if rendezvous else "buffered")
    assert (not found) == runs(changed, rendezvous=rendezvous), [f.text for f in found]
    if found and " cannot " in found[0].text:
        check_cycle(changed, found[0].text, rendezvous=rendezvous)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rendezvous=st.booleans())
def test_a_deadlock_of_transfers_is_shown_as_a_cycle(data, rendezvous):
    """Receives are put as late as can be, in their order: that is right for buffered sends only."""
    full = add_communications(data.draw(registered()))
    rows = []
    for row in full.communications:
        held, out = [], []
        for x in row:
            if isinstance(x, Transfer) and x.kind not in SENDS:
                held.append(x)
                continue
            kind = TransferKind.RECV_F if x.kind is Kind.FORWARD else TransferKind.RECV_B
            if isinstance(x, Action) and (mine := Transfer(x.stage, kind, x.microbatch)) in held:
                while mine in held:
                    early = held.pop(0)
                    out.insert(len(out), early)
            out.append(x)
        rows.append(out)
    pairs = full.pairs
    late = Schedule(full.ranks, placement=full.placement, pairs=pairs, recompute=full.recompute, communications=rows)
    found = problems(late, sends="rendezvous" if rendezvous else "buffered")
    assert (not found) == runs(late, rendezvous=rendezvous)
    assert rendezvous or pairs or not found
    if found and " cannot " in found[0].text:
        check_cycle(late, found[0].text, rendezvous=rendezvous)


def check_cycle(sched: Schedule, text: str, *, rendezvous: bool) -> None:
    """Assert that the chain in a message is a cycle of needs, messages and program order."""
    m = re.match(
        r"rank (\d+) cannot (start|finish) (\S+) \(position (\d+)\): it needs (.*)\. To break the cycle, ",
        text.replace("\n", " "),
    )
    at = {x: (r, i) for r, row in enumerate(sched.communications) for i, x in enumerate(row)}
    begin = unit = [parse(w) for w in m[3].strip("()").split(";")]
    assert at[unit[0]] == (int(m[1]), int(m[4]))
    for link in re.split(r",\s+which needs ", m[5]):
        need, _, how = link.partition(", which ")
        need = parse(need)
        if isinstance(need, Action):
            assert any(need in sched.needs(a) for a in unit)
        else:
            assert [need.other] == unit and (rendezvous or need.kind in SENDS)
        if behind := re.fullmatch(r"rank (\d+) runs after (\S+)", how):
            unit = [parse(w) for w in behind[2].strip("()").split(";")]
            assert at[need][0] == at[unit[0]][0] == int(behind[1])
            assert at[unit[-1]][1] < at[need][1]
        elif how:
            unit = [parse(how.removeprefix("starts together with ")), need]
        else:
            unit = [need, *(b for b in begin[1:] if need == begin[0])]
    assert unit == begin


def test_no_transfer_between_stages_of_one_rank():
    sched = schedule("interleaved", num_stages=3, num_chunks=3, num_microbatches=2).with_communications()
    assert sched.communications == sched.ranks
    wave = Schedule(
        [[Action.parse(w) for w in row.split()] for row in ("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")]
    ).with_communications()
    assert " ".join(map(str, wave.communications[1])) == "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0"


def test_transfers_are_made_anew():
    old = schedule("gpipe", num_stages=2, num_microbatches=1).with_communications()
    stale = Schedule(old.ranks, communications=[[], []])
    assert add_communications(stale).communications == old.communications


def test_an_order_that_cannot_run_gets_none():
    with pytest.raises(ScheduleError, match=r"rank 0 cannot start 0B0 \(position 0\)"):
        add_communications(Schedule([[Action.parse("0B0"), Action.parse("0F0")]]))


def test_disaggregated_transfers_are_those_between_stages():
    rows = ("0F0", "1F0", "0B0", "1B0")
    sched = Schedule([[Action.parse(r)] for r in rows], placement=Placement.disaggregated(2)).with_communications()
    assert [" ".join(map(str, r)) for r in sched.communications] == [
        "0F0 0SEND_F0",
        "1RECV_F0 1F0",
        "0RECV_B0 0B0",
        "1B0 1SEND_B0",
    ]
    sched.validate(sends="rendezvous")


@pytest.mark.parametrize(
    ("rows", "rank", "position", "text"),
    [
        (
            ("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            0,
            0,
            "0SEND_F0 is missing (1RECV_F0 of rank 1 would wait for ever); put it behind 0F0",
        ),
        (
            ("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"),
            1,
            0,
            "1RECV_F0 is missing (0SEND_F0 of rank 0 would wait for ever); put it before 1F0",
        ),
        (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"), 1, 2, "1SEND_B0 is missing (its other side is missing, too)"),
        (
            ("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            0,
            2,
            "0SEND_F0 is there a second time, first at position 1",
        ),
        (
            ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            0,
            0,
            "0SEND_F0 comes before 0F0, which makes what it sends",
        ),
        (
            ("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            0,
            3,
            "0RECV_B0 comes after 0B0, which uses what it receives",
        ),
        (("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0"), 0, 4, "0SEND_B0 is not needed"),
        (("0F0 0SEND_F0 0RECV_B0 0B0 1RECV_F0", "1F0 1B0 1SEND_B0"), 0, 4, "1RECV_F0 belongs on rank 1"),
    ],
)
def test_each_fault_of_transfers_is_named_with_its_place(rows, rank, position, text):
    found = problems(order(*rows))[0]
    assert text in found.text and found.in_communications
    assert (found.rank, found.position) == (rank, position)
    assert "<-- here" in found.picture


def test_two_receives_in_another_order():
    bad = order(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    with pytest.raises(
        ScheduleError,
        match="rank 1, position 0: 1RECV_F1 comes before 1RECV_F0, but rank 0 sends 0SEND_F0 before 0SEND_F1; receive in",
    ):
        bad.validate()


def test_sends_that_wait_for_each_other():
    bad = order(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    bad.validate()
    with pytest.raises(ScheduleError) as err:
        bad.validate(sends="rendezvous")
    assert str(err.value).startswith(
        "rank 0 cannot finish 0SEND_F1 (position 3): it needs 1RECV_F1, which rank 1 runs after 1SEND_B0, which needs "
        "0RECV_B0, which rank 0 runs after 0SEND_F1. To break the cycle, put 1RECV_F1 before 1SEND_B0 on rank 1, or "
        "0RECV_B0 before 0SEND_F1 on rank 0, or use sends that do not wait for their receive\n"
    )
    assert "position 3  [0SEND_F1]  [1SEND_B0]  <-- here" in str(err.value).splitlines()


def test_communications_run_the_same_order():
    sched = schedule("gpipe", num_stages=1, num_microbatches=2)
    a, b = sched.ranks[0][:2]
    text = "rank 0, position 0: 0F1, but the order without transfers has 0F0 here"
    swapped = Schedule(sched.ranks, communications=[[b, a, *sched.ranks[0][2:]]])
    assert text in problems(swapped)[0].text
    assert (
        "3 actions in the communications, 4"
        in problems(Schedule(sched.ranks, communications=[sched.ranks[0][:3]]))[0].text
    )
    assert "communications of 2 ranks" in problems(Schedule(sched.ranks, communications=[sched.ranks[0], []]))[0].text


def test_nothing_stands_inside_a_pair():
    bad = order(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        pairs=[(1, 1)],
    )
    assert "rank 1, position 3: 1SEND_B0 stands inside a pair" in problems(bad)[0].text


# ------------------------------------------------------------------------------------------------------------- torch
@pytest.mark.oracle
@settings(max_examples=60, deadline=None)
@given(sched=registered())
def test_the_same_transfers_as_torch(sched):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    assume(sched.placement.backward is None and sched.placement.mirrored is None)
    read = torch._Action.from_str
    rank = sched.placement.rank
    rows = {
        r: [read(f"{w}OVERLAP_F_B" if w.startswith("(") else w) for w in sched.words(r)] for r in range(sched.num_ranks)
    }
    theirs = torch._add_send_recv(rows, stage_to_rank=rank, num_stages=sched.num_stages)
    full = add_communications(sched)
    for r, row in enumerate(full.communications):
        flat = [str(x) for a in theirs[r] for x in (a.sub_actions or (a,))]
        assert [str(a) for a in row] == flat
    lone = {r: [read(str(a)) for a in row] for r, row in enumerate(full.communications)}
    steps = torch._simulate_comms_compute(lone, rank, sched.num_stages)
    assert sum(a is not None for row in steps.values() for a in row) == sum(map(len, full.communications))
