"""NCCL Inspector files, written as its README shows them: identity, times, holes, and bad input."""

import io
import json

import numpy as np
import pytest

import mappnb
from mappnb.analysis import match
from mappnb.capture.importers import TraceImportError, import_trace
from mappnb.capture.importers._formats import ImportOptions
from mappnb.capture.importers._sources import Source
from mappnb.capture.importers.nccl_inspector import read_nccl_inspector
from mappnb.terms import Flag

T0 = 1_752_867_229_000_000  # µs


def record(sn, rank, *, comm="0xe62dedaa97644a", n_ranks=4, pid=None, host=None, verbose=True, p2p=None, **more):
    """One record; call ``sn`` starts at ``sn`` ms, the GPU of rank r arrives r ms/10 later, and all leave together."""
    issue, start, stop = T0 + 1000 * sn, T0 + 1000 * sn + 100 * rank, T0 + 1000 * sn + 900
    kind = "p2p" if p2p else "coll"
    perf = {
        kind: p2p or "ReduceScatter",
        f"{kind}_sn": sn,
        f"{kind}_msg_size_bytes": 65536,
        f"{kind}_exec_time_us": stop - start,
        f"{kind}_timing_source": "kernel_gpu",
        f"{kind}_algobw_gbs": 19.065018,
        f"{kind}_busbw_gbs": 18.469236,
    }
    if verbose:
        channels = [
            {"channel_id": c, "kernel_start_ts": start + c, "kernel_stop_ts": stop - c, "kernel_record_ts": stop}
            for c in range(2)
        ]
        perf["event_trace_sn"] = {f"{kind}_start_sn": 1, f"{kind}_stop_sn": 2, "kernel_events": []}
        perf["event_trace_ts"] = {f"{kind}_start_ts": issue, f"{kind}_stop_ts": issue + 5, "kernel_events": channels}
    perf.update(more)
    return {
        "header": {"id": comm, "rank": rank, "n_ranks": n_ranks, "nnodes": 2},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "9019a1912-dirty",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": T0 + 50_000,
            "hostname": host or f"node{rank // 2}",
            "pid": pid if pid is not None else 100 + rank,
        },
        f"{kind}_perf": perf,
    }


def write(path, records, **options):
    path.write_text("".join(json.dumps(r, **options) + "\n" for r in records))
    return path


def job(folder, *, sns=range(5), verbose=True):
    folder.mkdir(exist_ok=True)
    for rank in range(4):
        pair, place = f"0xpair{rank // 2}", rank % 2
        rows = [record(sn, rank, verbose=verbose) for sn in sns]
        rows += [
            record(sn, place, comm=pair, n_ranks=2, pid=100 + rank, host=f"node{rank // 2}", verbose=verbose)
            for sn in (10, 11)
        ]
        write(folder / f"node{rank // 2}-pid{100 + rank}.log", rows)
    return folder


def test_verbose_records(tmp_path):
    report = import_trace(job(tmp_path / "in"), tmp_path / "run")
    assert report.format == "nccl_inspector" and report.num_events == report.num_read == 28
    assert not report.skipped and not report.repairs and sorted(report.ranks) == [0, 1, 2, 3]
    run = mappnb.attach(tmp_path / "run")
    events = run.sel()
    calls = match(events)
    assert calls.complete.values.all() and calls.sizes["call"] == 5 + 4 and calls.attrs["groups_by_order"] == 0
    world = calls.isel(call=calls.seq.values < 10)
    lag = world.start_ns - world.start_ns.min("member")
    assert np.ptp(lag.values, axis=0).tolist() == [0, 0, 0, 0] and lag.values[0].tolist() == [
        0,
        10**5,
        2 * 10**5,
        3 * 10**5,
    ]
    assert (world.end_ns.values == world.end_ns.values[:, :1]).all()
    assert set(events.op.values) == {"reduce_scatter"} and set(events.bytes.values.tolist()) == {65536}
    assert ((events.start_ns.values - events.start_ns.values.min()) % 1000 == 0).all()  # whole µs, exactly
    assert sorted(set(run.meta["hosts"])) == ["node0", "node1"]


def test_ranks_of_a_small_communicator_are_global(tmp_path):
    import_trace(job(tmp_path / "in"), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    small = events.isel(event=events.seq.values >= 10)
    assert sorted(set(small["rank"].values.tolist())) == [0, 1, 2, 3] and len(set(small.group.values.tolist())) == 2


def test_holes_are_allowed_and_counted(tmp_path):
    report = import_trace(job(tmp_path / "in", sns=(0, 1, 4, 7)), tmp_path / "run")
    assert any(n.startswith("16 sequence numbers are missing") for n in report.notes)
    assert match(mappnb.attach(tmp_path / "run").sel()).complete.values.all()


def test_records_without_times_end_where_they_were_written_out(tmp_path):
    report = import_trace(job(tmp_path / "in", verbose=False), tmp_path / "run")
    assert report.repairs == {"time_from_dump": 28} and any("VERBOSE" in n for n in report.notes)
    events = mappnb.attach(tmp_path / "run").sel()
    assert (events.flags.values & Flag.REPAIRED).all()
    first = events.isel(event=(events["rank"].values == 0) & (events.seq.values < 10)).sortby("start_ns")
    assert first.seq.values.tolist() == [0, 1, 2, 3, 4]
    end = first.start_ns.values + first.duration_ns.values
    assert (end[:-1] == first.start_ns.values[1:]).all()
    assert match(mappnb.attach(tmp_path / "run").sel()).complete.values.all()


def test_later_form_of_events(tmp_path):
    rows = []
    for rank in range(2):
        row = record(0, rank, n_ranks=2)
        for event in row["coll_perf"]["event_trace_ts"].pop("kernel_events"):
            times = {k: v for k, v in event.items() if k.startswith("kernel")}
            row["coll_perf"].setdefault("events", []).append(
                {"event_type": "KernelCh", "channel_id": event["channel_id"], "event_trace_ts": times}
            )
        rows.append(row)
    import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    assert sorted(events.duration_ns.values.tolist()) == [800_000, 900_000]


def test_transfers(tmp_path):
    rows = [record(n, 0, n_ranks=2, p2p="Send", p2p_peer=1) for n in range(3)]
    rows += [record(n + 5, 1, n_ranks=2, p2p="Recv", p2p_peer=0) for n in range(3)]
    import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    assert set(events.category.values) == {"p2p"} and sorted(set(events.peer.values.tolist())) == [0, 1]
    calls = match(events)
    assert calls.sizes["call"] == 3 and calls.complete.values.all()


def test_indented_objects_one_after_the_other(tmp_path):
    path = write(tmp_path / "a.json", [record(n, r) for n in range(2) for r in range(4)], indent=2)
    assert import_trace(path, tmp_path / "run").num_events == 8


def test_cut_last_line_is_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", [record(n, 0, n_ranks=1) for n in range(3)])
    path.write_text(path.read_text()[:-30])
    report = import_trace(path, tmp_path / "run")
    assert report.num_events == 2 and report.repairs == {"damaged_line": 1}


def test_no_communicator_of_all_ranks(tmp_path):
    rows = [record(0, r % 2, comm=f"0x{r // 2}", n_ranks=2, pid=r, host="h") for r in range(6)]
    report = import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert sorted(report.ranks) == list(range(6)) and report.world_size == 6
    assert any("numbered by host and process" in n for n in report.notes)


def test_missing_processes(tmp_path):
    rows = [record(0, r) for r in (1, 3)]
    report = import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert sorted(report.ranks) == [1, 3] and report.world_size == 4
    assert not match(mappnb.attach(tmp_path / "run").sel()).complete.values.any()


def test_another_start_of_the_job_is_left_out(tmp_path):
    rows = [record(0, r, comm="0xold") for r in range(4)] + [record(9, r, comm="0xnew", pid=900 + r) for r in range(4)]
    for row in rows[:4]:
        row["metadata"]["dump_timestamp_us"] -= 10**9
        for event in row["coll_perf"]["event_trace_ts"]["kernel_events"]:
            event.update({k: v - 10**9 for k, v in event.items() if k.startswith("kernel")})
    report = import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert report.num_events == 4 and report.skipped == {"processes of another job": 4}


def test_two_processes_of_one_rank(tmp_path):
    rows = [record(0, 0, n_ranks=2, pid=1), record(0, 0, n_ranks=2, pid=2)]
    with pytest.raises(TraceImportError, match="written by two processes"):
        import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")


def test_the_same_file_twice(tmp_path):
    rows = [record(n, r, n_ranks=2) for n in range(3) for r in range(2)]
    report = import_trace([write(tmp_path / f"{c}.jsonl", rows) for c in "ab"], tmp_path / "run")
    assert report.num_events == 6 and report.skipped == {"records of a call that is there already": 6}


def test_several_ranks_in_one_process(tmp_path):
    rows = [record(0, r, pid=7, host="h") for r in range(4)]
    rows += [record(0, r, comm="0xsub", n_ranks=2, pid=7, host="h") for r in range(2)]
    report = import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert sorted(report.ranks) == [0, 1, 2, 3] and sum(report.skipped.values()) == 2


@pytest.mark.parametrize("field", ["coll", "coll_sn", "id", "rank", "n_ranks", "header", "metadata", "coll_perf"])
def test_missing_fields(tmp_path, field):
    rows = [record(n, 0, n_ranks=1) for n in range(2)]
    for part in (rows[1], rows[1]["header"], rows[1]["coll_perf"]):
        if part.pop(field, None) is not None:
            break
    report = import_trace(write(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert report.num_events == 1 and sum(report.skipped.values()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("{}\n[]\n1\n", "3 values that are no record"),
        ('{"header": {"id": "0x1"}', "1 damaged line"),
        ("[" * 100_000, "1 damaged line"),
        (json.dumps({**record(0, 0), "coll_perf": None}), "1 values that are no record"),
    ],
)
def test_nothing_to_import(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(TraceImportError, match=message):
        import_trace(path, tmp_path / "run", format="nccl_inspector")


def test_no_times_at_all(tmp_path):
    row = record(0, 0, verbose=False)
    del row["metadata"]["dump_timestamp_us"]
    with pytest.raises(TraceImportError, match="no record has a time"):
        import_trace(write(tmp_path / "a.jsonl", [row]), tmp_path / "run")


def test_mutations_never_crash(tmp_path):
    """Bytes changed, cut out and doubled; numbers of every size; what comes is an import or our own error."""
    rows = [record(n, r, n_ranks=2, p2p="Send" if n else None, p2p_peer=1 - r) for n in range(2) for r in range(2)]
    good = write(tmp_path / "good", rows).read_bytes()
    rng, imported = np.random.default_rng(1), 0
    odd = [b"-1", b"1e400", b"NaN", b"18446744073709551615", b"null", b'"7"', b"{}", b"[[1]]", b"true", b"1.5"]
    numbers = [m for m in range(len(good)) if good[m : m + 1].isdigit() and not good[m - 1 : m].isdigit()]
    for number in range(2500):
        data = bytearray(good)
        for _ in range(1 + number % 4):
            at = int(rng.integers(len(data)))
            if number % 3 == 0:
                data[at] = rng.integers(256)
            elif number % 3 == 1:
                at = int(rng.choice(numbers))
                end = at
                while end < len(data) and bytes(data[end : end + 1]).isdigit():
                    end += 1
                data[at:end] = odd[int(rng.integers(len(odd)))]
            else:
                del data[at : at + int(rng.integers(1, 60))]
        source = Source("a.jsonl", True, lambda data=bytes(data): io.BytesIO(data))
        try:
            got = read_nccl_inspector([source], ImportOptions())
            imported += sum(len(r.columns["site"]) > 0 for r in got.ranks) > 0
        except TraceImportError:
            continue
    assert imported > 1000
