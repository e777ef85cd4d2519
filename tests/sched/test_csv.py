"""CSV files: exact round trips, torch's files, and faults shown at their cell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mappnb.errors import ScheduleError
from mappnb.sched import Action, Placement, Schedule, schedule
from mappnb.sched.csvfiles import from_csv, to_csv

from .strategies import registered

P, M = 2, 4  # ranks and microbatches of torch's schedules here


def bare(sched: Schedule) -> Schedule:
    """The same without what is not in a file."""
    return Schedule.from_codes(sched.codes, sched.offsets, placement=sched.placement)


@settings(max_examples=60, deadline=None)
@given(sched=registered(), communications=st.booleans())
def test_round_trip(sched, communications):
    text = to_csv(sched, communications=communications)
    read = from_csv(text, placement=sched.placement)
    assert read == bare(sched)
    assert to_csv(read, communications=communications) == text
    full = sched.with_communications().communications if communications else sched.ranks
    assert read.communications == (full if full != sched.ranks else None)  # none needed, none in the file
    if sched.placement.mirrored is None:
        assert from_csv(text) == read


def test_a_file(tmp_path):
    sched = schedule("1f1b", num_stages=2, num_microbatches=3)
    path = tmp_path / "plan.csv"
    assert sched.to_csv(path) == path.read_text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    for source in (path, str(path), path.read_text()):
        assert Schedule.from_csv(source) == sched


def test_pairs_and_bubbles_and_cells_of_sharded_weights():
    text = "0UNSHARD, 0F0 ,0F1,,0B0,0B1,0REDUCE_GRAD,0RESHARD\r\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\r\n\r\n"
    with pytest.raises(ScheduleError, match=r"row 2 \(rank 1\), column 4 \('\(1F1;1B1\)OVERLAP_F_B'\): rank 1 cannot"):
        from_csv(text)
    sched = from_csv("0F0,0F1,,0B0,0B1,0REDUCE_GRAD\n,1F0,(1F1 ; 1B0)OVERLAP_F_B,1B1\n")
    assert sched.pairs == {(1, 1)} and sched.num_ranks == 2
    assert to_csv(sched) == "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    assert "(1F1;1B0)OVERLAP_F_B,1SEND_B0," in to_csv(sched, communications=True)


def test_rows_of_any_length_and_a_rank_that_runs_nothing():
    assert from_csv("0F0,,,0B0,,,,\n,1F0,1B0\n") == from_csv("0F0,0B0\n1F0,1B0")
    sched = from_csv("0F0,0B0\n\n1F0,1B0\n\n\n")
    assert sched.num_ranks == 3 and sched.placement == Placement((0, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1\n",
            r"CSV text, row 2 \(rank 1\), column 2 \('1B0'\): .* 1B1 \(or 1I1 and 1W1\) is missing",
        ),
        ("0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,,1B1,1F1\n", r"row 2 \(rank 1\), column 6 \('1F1'\): .* runs a second time"),
        (
            "0F0,0F1,,0B1,0B0\n1F0,1B0,1F1,,1B1\n,2B0,2F0,2F1,2B1",
            r"row 3 \(rank 2\), column 2 \('2B0'\): rank 2 cannot start 2B0",
        ),
        (
            "0F0,0F1,1F1,0F2,0B0,0B1,0B2\n1F0,1F2,1B0,,1B1,1B2\n",
            r"row 1 \(rank 0\), column 3 \('1F1'\): .* belongs on rank 1",
        ),
        ("0F0,0B0\n1F0,1X0\n", r"row 2 \(rank 1\), column 2 \('1X0'\): cannot read it; expected <stage>"),
        ("0F0,0F\n", r"row 1 \(rank 0\), column 2 \('0F'\): cannot read it"),
        ("0F0,0B0x\n", r"column 2 \('0B0x'\): cannot read it"),
        ("0F0,(0F1;0B0)\n", r"column 2 \('\(0F1;0B0\)'\): cannot read it"),
        ("0F0,(0F1;0SEND_F0)OVERLAP_F_B\n", r"column 2 .*: cannot read it"),
        ("0F0,(0F1;0B0;0B1)OVERLAP_F_B\n", r"column 2 .*: cannot read it"),
        ("0F0,0F131072\n", r"column 2 \('0F131072'\): stages go from 0 to 4095, microbatches from 0 to 131071"),
        ("0F0,0F" + "9" * 5000, r"column 2 \('0F9{58}…'\): cannot read it"),
        ("0F٣,0B0\n", r"column 1 .*: cannot read it"),
        ('0F0,"0B0\n', r"CSV text, line 1: unexpected end of data"),
        ("0F0,0B0\n2F0,2B0\n", r"row 2 \(rank 1\), column 1 \('2F0'\): .* no action is of stage 1"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n",
            r"row 2 \(rank 1\), column 1 \('1F0'\): .* 1RECV_F0 is missing",
        ),
        (
            "0F0,,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
            r"row 1 \(rank 0\), column 4 \('0SEND_F0'\): .* second",
        ),
        ("", "CSV text: no action; expected one row for each rank"),
        (",,,\n\n", "CSV text: no action"),
    ],
)
def test_faults_are_shown_at_their_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        ScheduleError, match=r"cannot read '.*none.csv': No such file or directory; give a CSV file, or its text"
    ):
        from_csv(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match=r"cannot read '0F0\\x00': embedded null byte"):
        from_csv("0F0\0")
    path = tmp_path / "with, comma.csv"
    path.write_text("0F0,0B0")
    assert len(from_csv(str(path))) == 2
    path = tmp_path / "plan.csv"
    path.write_bytes("0F0,0B0\n".encode("utf-16"))
    with pytest.raises(ScheduleError, match=r"plan.csv: byte 0 is not UTF-8"):
        from_csv(path)
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert from_csv(path).ranks == ((Action.parse("0F0"), Action.parse("0B0")),)
    path.write_bytes(b"")
    with pytest.raises(ScheduleError, match=r"plan.csv: no action"):
        from_csv(path)
    path.write_bytes(b"\x00\x01\n")
    with pytest.raises(ScheduleError, match=r"plan.csv, (line|row) 1"):
        from_csv(path)


def test_two_copies_of_a_stage_need_their_placement():
    text = "0F0,0B0,1F1,1B1\n1F0,1B0,0F1,0B1\n"
    with pytest.raises(ScheduleError, match=r"belongs on rank 0, .* or give the placement that has it here"):
        from_csv(text)
    assert from_csv(text, placement=Placement.bidirectional(2, mirrored_from=1)).num_stages == 2


def test_disaggregated_schedules_are_read_with_their_backward_ranks():
    sched = from_csv("0F0\n1F0\n0B0\n1B0\n")
    assert sched.placement == Placement.disaggregated(2)
    full = to_csv(sched, communications=True)
    assert full == "0F0,0SEND_F0\n1RECV_F0,1F0\n0RECV_B0,0B0\n1B0,1SEND_B0\n"
    assert from_csv(full) == sched


# ------------------------------------------------------------------------------------------------------------- torch
def stages(style: str, rank: int, chunks: int) -> list:
    """Stand-ins for the stages of one rank."""
    mine = [rank, 2 * P - 1 - rank] if style == "v" else [rank + P * c for c in range(chunks)]
    return [
        SimpleNamespace(
            stage_index=s,
            num_stages=P * chunks,
            group_size=P,
            group_rank=rank,
            group=None,
            is_first=s == 0,
            is_last=s == P * chunks - 1,
            has_backward=True,
            submod=None,
            device="cpu",
        )
        for s in mine
    ]


def runtime(torch, *, num_stages: int, num_microbatches: int, ranks: int):
    """A torch schedule that reads files and nothing else."""
    mock = torch._PipelineScheduleRuntime.__new__(torch._PipelineScheduleRuntime)
    mock.pipeline_order, mock._stages, mock._defer_pp_recv = {}, [], False
    mock.pp_group_size, mock._num_stages, mock._n_microbatches = ranks, num_stages, num_microbatches
    return mock


@pytest.mark.oracle
@settings(max_examples=30, deadline=None)
@given(sched=registered(), communications=st.booleans())
def test_torch_reads_our_files(sched, communications, tmp_path_factory):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    assume(sched.placement.backward is None and sched.placement.mirrored is None)
    path = tmp_path_factory.mktemp("csv") / "plan.csv"
    sched.to_csv(path, communications=communications)
    mock = runtime(torch, num_stages=sched.num_stages, num_microbatches=sched.num_microbatches, ranks=sched.num_ranks)
    mock._load_csv(str(path), format="compute_comms" if communications else "compute_only")
    assert [mock.stage_index_to_group_rank[s] for s in range(sched.num_stages)] == list(sched.placement.forward)
    out = path.with_name("torch.csv")
    if communications:
        mock._dump_csv(str(out), format="compute_comms")
        assert out.read_bytes().replace(b"\r\n", b"\n") == path.read_bytes()
        if not sched.pairs:
            mock._simulate()
    else:
        mock._dump_csv(str(out), format="compute_comms")  # torch has put its transfers in
        assert from_csv(out) == bare(sched)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "chunks", "style"),
    [
        ("ScheduleInterleaved1F1B", 2, "loop"),
        ("ScheduleLoopedBFS", 2, "loop"),
        ("ScheduleInterleavedZeroBubble", 2, "loop"),
        ("ScheduleZBVZeroBubble", 2, "v"),
        ("ScheduleDualPipeV", 2, "v"),
    ],
)
def test_torchs_files_are_read(name, chunks, style, tmp_path):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = getattr(torch, name)(stages(style, 0, chunks), n_microbatches=M, loss_fn=None)
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        theirs._dump_csv(str(path), format=form)
        sched = from_csv(path)
        assert (sched.num_ranks, sched.num_stages, sched.num_microbatches) == (P, P * chunks, M)
        assert sched.placement == (Placement.wave(P) if style == "v" else Placement.loop(P, chunks))
        assert (sched.communications is not None) == (form == "compute_comms")
        for r, row in enumerate(sched.ranks):
            flat = [str(x) for a in theirs.pipeline_order[r] if a is not None for x in (a.sub_actions or (a,))]
            assert [str(a) for a in row] == [w for w in flat if "REDUCE" not in w]
        assert bool(sched.pairs) == (name == "ScheduleDualPipeV")
