"""Flight-recorder dumps: real ones of gloo ranks, NCCL ones built after torch's format, and pickles that mean harm."""

import io
import json
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

import mappnb
from mappnb.analysis import match
from mappnb.capture.importers import TraceImportError, import_trace
from mappnb.capture.importers._formats import ImportOptions
from mappnb.capture.importers._plain_pickle import MAX_DEPTH, PlainPickleError, load_plain
from mappnb.capture.importers._sources import Source
from mappnb.capture.importers.flight_recorder import CALL_FIELDS, MOST_CALLS, read_flight_recorder
from mappnb.terms import Flag

T0 = 1_724_779_239_000_000_000


def entry(n, name="nccl:all_reduce", *, group=("0", "default_pg"), state="completed", seq=None, p2p=False, **more):
    """One entry as torch 2.13 writes it for NCCL with timing: 1 ms apart, 0.4 ms long."""
    created = T0 + n * 10**6
    done = state == "completed"
    out = {
        "frames": [
            {"name": "all_reduce", "filename": "torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "train_step", "filename": "train.py", "line": 100 + n % 3},
        ],
        "record_id": n,
        "pg_id": int(group[0]),
        "process_group": group,
        "thread_name": "pt_main",
        "thread_id": "140189360020352",
        "collective_seq_id": 0 if p2p else (n + 1 if seq is None else seq),
        "p2p_seq_id": n + 1 if p2p else 0,
        "op_id": n + 1,
        "profiling_name": name,
        "time_created_ns": created,
        "input_sizes": ((3, 4),),
        "input_dtypes": ["Float"],
        "output_sizes": ((3, 4),),
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": created + 100_000 if state != "scheduled" else None,
        "time_discovered_completed_ns": created + 600_000 if done else None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": p2p,
        **({"duration_ms": 0.4} if done else {}),
    }
    return {**out, **more}


def dump(entries, ranks=(0, 1), **more):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(ranks))}}
    status = {"0": {"last_enqueued_collective": 3, "last_started_collective": 2, "last_completed_collective": 2}}
    whole = {"version": "2.10", "comm_lib_version": "2.27.5", "pg_config": config, "pg_status": status}
    return {**whole, "entries": entries, "nccl_comm_state": {}, **more}


def write(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def two_ranks(folder, **options):
    folder.mkdir()
    for rank in range(2):
        last = [entry(2, state="started" if rank else "scheduled")]
        write(folder / f"nccl_trace_rank_{rank}", dump([entry(0), entry(1), *last]), **options)
    return folder


@pytest.mark.parametrize("protocol", range(6))
def test_dumps_of_nccl(tmp_path, protocol):
    report = import_trace(two_ranks(tmp_path / "in", protocol=protocol), tmp_path / "run")
    assert report.format == "flight_recorder" and report.num_events == 6
    assert not report.skipped and not report.repairs and not report.notes
    events = mappnb.attach(tmp_path / "run").sel()
    assert events.seq.values.tolist() == [1, 1, 2, 2, 3, 3] and set(events.bytes.values.tolist()) == {48}
    assert events.duration_ns.values.tolist() == [400_000] * 4 + [0, 100_000] or events.duration_ns.values.tolist() == [
        400_000
    ] * 4 + [100_000, 0]
    assert ((events.flags.values & Flag.OPEN) > 0).tolist() == [False] * 4 + [True] * 2
    assert match(events).complete.values.all()


def test_json_form(tmp_path):
    for rank in range(2):
        content = json.loads(json.dumps(dump([entry(0), entry(1, state="scheduled")])))
        for e in content["entries"]:
            e.pop("frames")
            e["time_discovered_completed_ns"] = e["time_discovered_completed_ns"] or 0
        (tmp_path / f"dump_{rank}.json").write_text(json.dumps(content, sort_keys=True))
    import_trace([tmp_path / "dump_0.json", tmp_path / "dump_1.json"], tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    assert ((events.flags.values & Flag.OPEN) > 0).tolist() == [False, False, True, True]


def test_stacks_are_kept_with_the_calls(tmp_path):
    import_trace(two_ranks(tmp_path / "in"), tmp_path / "run")
    facts = json.loads((tmp_path / "run/inc=000/ranks/rank=00001.json").read_text())["flight_recorder"]
    assert facts["fields"] == list(CALL_FIELDS) and facts["pg_status"][facts["group_names"]["0"]]["completed"] == 2
    last = dict(zip(facts["fields"], facts["calls"][-1], strict=True))
    assert last["state"] == "started" and last["seq"] == 3
    stack = [facts["frames"][i] for i in facts["stacks"][last["stack"]]]
    assert stack == ["torch/distributed/distributed_c10d.py:3245 all_reduce", "train.py:102 train_step"]
    assert len(facts["frames"]) == 4 and len(facts["stacks"]) == 3


def test_many_calls_keep_what_is_open(tmp_path):
    entries = [entry(0, state="started"), *(entry(n) for n in range(1, MOST_CALLS + 100))]
    import_trace(write(tmp_path / "trace_0", dump(entries, ranks=(0,))), tmp_path / "run")
    calls = json.loads((tmp_path / "run/inc=000/ranks/rank=00000.json").read_text())["flight_recorder"]["calls"]
    assert len(calls) == MOST_CALLS and calls[0][4] == "started" and calls[-1][0] == MOST_CALLS + 99


def test_transfers_are_numbered_by_pair(tmp_path):
    a = [
        entry(0, "nccl:send 0->1", p2p=True),
        entry(1, "nccl:recv 0<-1", p2p=True),
        entry(2, "nccl:send 0->1", p2p=True),
    ]
    b = [
        entry(0, "nccl:recv 1<-0", p2p=True),
        entry(1, "nccl:recv 1<-0", p2p=True),
        entry(2, "nccl:send 1->0", p2p=True),
    ]
    for rank, entries in enumerate((a, b)):
        write(tmp_path / f"x{rank}", dump(entries, ranks=(4, 7)))
    report = import_trace([tmp_path / "x0", tmp_path / "x1"], tmp_path / "run")
    assert sorted(report.ranks) == [4, 7] and len(report.notes) == 2  # told by the sides of the transfers
    events = mappnb.attach(tmp_path / "run").sel()
    calls = match(events)
    assert calls.sizes["call"] == 3 and calls.complete.values.all()
    assert set(events.peer.values.tolist()) == {4, 7}


def test_a_ring_that_lost_its_beginning(tmp_path):
    entries = [entry(n, "nccl:send 0->1", p2p=True) for n in (50, 51)]
    report = import_trace(write(tmp_path / "trace_rank_0", dump(entries)), tmp_path / "run")
    assert any("kept the last 2 of 52" in n for n in report.notes)
    assert mappnb.attach(tmp_path / "run").sel().seq.values.tolist() == [-1, -1]


def test_coalesced_operations(tmp_path):
    entries = [
        entry(0, "nccl:all_gather", seq=5),
        entry(1, "nccl:all_gather", seq=5),
        entry(2, "nccl:coalesced", seq=5),
    ]
    import_trace(write(tmp_path / "trace_rank_0", dump(entries, ranks=(0,))), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    assert events.seq.values.tolist() == [-1, -1, 5] and events.depth.values.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("name", "op", "size"),
    [
        ("nccl:_all_gather_base", "all_gather", 96),
        ("nccl:_reduce_scatter_base", "reduce_scatter", 48),
        ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter", 48),
        ("nccl:ALLGATHER_coalesced", "all_gather", 96),
        ("nccl:all_to_all", "all_to_all", 48),
        ("nccl:all_reduce_barrier", "all_reduce", 48),
        ("gloo:barrier", "barrier", 48),
        ("xccl:something_new", "something_new", 48),
    ],
)
def test_names_and_bytes(tmp_path, name, op, size):
    one = entry(0, name, output_sizes=((6, 4),))
    import_trace(write(tmp_path / "trace_rank_0", dump([one], ranks=(0,))), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    assert (events.op.values[0], int(events.bytes.values[0])) == (op, size)


def test_rank_of_the_content_counts_more_than_the_name(tmp_path):
    entries = [entry(0, "nccl:send 1->0", p2p=True)]
    report = import_trace(write(tmp_path / "trace_rank_0", dump(entries)), tmp_path / "run")
    assert list(report.ranks) == [1] and "by its content this is rank 1" in report.notes[0]
    again = import_trace(tmp_path / "trace_rank_0", tmp_path / "run2", rank_from=r"rank_(\d+)")
    assert list(again.ranks) == [0]


def test_groups_narrow_the_rank(tmp_path):
    content = dump([entry(0)], ranks=(0, 1, 2, 3))
    content["pg_config"] |= {"1": {"name": "1", "desc": "tp", "ranks": "[2, 3]"}, "2": {"name": "2", "ranks": "[1, 3]"}}
    report = import_trace(write(tmp_path / "mine.pkl", content), tmp_path / "run")
    assert list(report.ranks) == [3] and report.world_size == 4


@pytest.mark.parametrize(
    ("names", "contents", "message"),
    [
        (("rank_0", "other/rank_0"), [dump([entry(0)])] * 2, "claimed by both"),
        (("rank_7", "rank_1"), [dump([entry(0)])] * 2, "groups allow only 0, 1"),
        (("a", "b"), [dump([entry(0)])] * 2, "no rank in its content"),
        (("rank_0",), [dump([])], "nothing to show"),
        (("rank_0",), [dump([{"record_id": 1}, 5, None])], "3 entries that lack a field"),
        (("rank_0",), [[1, 2]], "no list 'entries'"),
        (("rank_0",), [{"entries": {}, "pg_config": 1, "pg_status": 2}], "no list 'entries'"),
    ],
)
def test_dumps_that_are_not_clear(tmp_path, names, contents, message):
    (tmp_path / "other").mkdir()
    paths = [write(tmp_path / n, c) for n, c in zip(names, contents, strict=True)]
    with pytest.raises(TraceImportError, match=message):
        import_trace(paths, tmp_path / "run", format="flight_recorder")
    assert not (tmp_path / "run").exists()


class Evil:
    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return self.what


def nested(depth):
    return b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b"."


def laughs(levels):
    """A list of two of a list of two ...: a few bytes that stand for 2**levels values."""
    out = b"\x80\x04]q\x00"
    for i in range(levels):
        out += b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
    return out + b"."


COLLIDING = [b"\x8a\x09" + ((2**61 - 1) * i).to_bytes(9, "little") + b"N" for i in range(99)]
HARM = {
    "os.system": pickle.dumps(Evil(os.system, ("touch HARM",))),
    "os.system, protocol 0": pickle.dumps(Evil(os.system, ("touch HARM",)), 0),
    "os.system, protocol 4": pickle.dumps(Evil(os.system, ("touch HARM",)), 4),
    "in an entry": pickle.dumps(dump([entry(0, name=Evil(eval, ("open('HARM','w')",)))])),
    "eval": pickle.dumps(Evil(eval, ("open('HARM','w')",)), 2),
    "global only": b"cos\nsystem\n.",
    "inst": b"(S'touch HARM'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'touch HARM'\no.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "ext": b"\x80\x02\x82\x01.",
    "persid": b"Pabc\n.",
    "binpersid": b"NQ.",
    "newobj": b"\x80\x02N)\x81.",
    "newobj_ex": b"\x80\x04N)}\x92.",
    "build": b"}}b.",
    "out of band": b"\x80\x05\x97.",
    "deep lists": nested(50_000),
    "deep tuples": b"\x80\x02)" + b"\x85" * 50_000 + b".",
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.",
    "laughs": laughs(200),
    "holds itself": b"\x80\x02]q\x00h\x00a.",
    "holds itself, dict": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
    "huge integer": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"\1" * 100 + b".",
    "negative length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b".",
    "long decimal": b"L" + b"9" * 4000 + b"L\n.",
    "huge memo index": b"\x80\x02Nr\xff\xff\xff\xffj\xfe\xff\xff\xff.",
    "no value": b"\x80\x02.",
    "a mark as value": b"\x80\x02(.",
    "empty stack": b"\x80\x020.",
    "append to nothing": b"\x80\x02Na.",
    "append to a dict": b"\x80\x02}Na.",
    "odd items": b"\x80\x02}(Nu.",
    "no mark": b"\x80\x02]Ne.",
    "bad text": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "protocol 9": b"\x80\x09N.",
    "empty": b"",
    "no end": b"\x80\x02NNNN",
    "colliding keys": b"\x80\x02}(" + b"".join(COLLIDING) + b"u.",
}


@pytest.mark.parametrize("name", HARM)
def test_pickles_that_mean_harm(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    with pytest.raises(PlainPickleError):
        load_plain(HARM[name])
    assert time.monotonic() - began < 5 and not os.path.exists("HARM")
    (tmp_path / "trace_rank_0").write_bytes(HARM[name] or b"\x80\x02")
    with pytest.raises(TraceImportError):
        import_trace(tmp_path / "trace_rank_0", tmp_path / "run", format="flight_recorder")
    assert not os.path.exists("HARM") and not os.path.exists("run")


def test_the_message_of_a_refusal(tmp_path):
    (tmp_path / "x_0").write_bytes(HARM["os.system"])
    with pytest.raises(TraceImportError, match=r"opcode (STACK_)?GLOBAL would build an object or call code: refused"):
        import_trace(tmp_path / "x_0", tmp_path / "run")


def test_a_foreign_pickle_in_a_folder_is_left_alone(tmp_path):
    folder = two_ranks(tmp_path / "in")
    (folder / "optimizer.pkl").write_bytes(HARM["os.system"])
    report = import_trace(folder, tmp_path / "run")
    assert report.num_events == 6 and len(report.files_skipped) == 1


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -1, 255, 256, 65536, -(2**31), 2**63, -(2**90), True, False, None, 1.5, float("inf")]},
        {"t": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), "empty": [{}, [], ""]},
        {"text": "ü\n\\ \u2028 \U0001f600", "long": "x" * 70000},
        [[["same"] * 3] * 3] * 3,
    ],
)
def test_plain_values_come_back(value, protocol):
    assert load_plain(pickle.dumps(value, protocol)) == value == pickle.loads(pickle.dumps(value, protocol))
    assert load_plain(pickletools.optimize(pickle.dumps(value, protocol))) == value


def test_bytes_come_back():
    for value in (b"", b"a" * 10, b"a" * 70000):
        assert load_plain(pickle.dumps(value, 4)) == value


def test_depth_is_bounded_exactly():
    load_plain(nested(MAX_DEPTH))
    with pytest.raises(PlainPickleError, match="levels deep"):
        load_plain(nested(MAX_DEPTH + 1))


def mutate(data, rng, number):
    out = bytearray(data)
    for _ in range(1 + number % 6):
        at = int(rng.integers(len(out)))
        if number % 3 == 0:
            out[at] = rng.integers(256)
        elif number % 3 == 1:
            del out[at : at + int(rng.integers(1, 20))]
        else:
            to = int(rng.integers(len(out)))
            out[to:to] = out[at : at + int(rng.integers(1, 40))]
    return bytes(out[: int(rng.integers(1, len(out) + 1))] if number % 7 == 0 else out)


@pytest.mark.parametrize("form", ["pickle 0", "pickle 2", "pickle 4", "json"])
def test_mutations_never_crash(form):
    """Thousands of damaged dumps: an import, or our own error; never anything else, and never for long."""
    content = dump([entry(0), entry(1, "nccl:send 0->1", p2p=True), entry(2, state="started")])
    good = json.dumps(content).encode() if form == "json" else pickle.dumps(content, int(form[-1]))
    rng, imported, began = np.random.default_rng(0), 0, time.monotonic()
    for number in range(1500):
        data = mutate(good, rng, number)
        source = Source("rank_0", True, lambda data=data: io.BytesIO(data))
        try:
            got = read_flight_recorder([source], ImportOptions())
            imported += sum(len(r.columns["site"]) > 0 for r in got.ranks)
        except TraceImportError:
            continue
    assert imported > 20 and time.monotonic() - began < 60


@pytest.mark.parametrize("seed", range(2))
def test_random_opcodes_never_crash(seed):
    rng = np.random.default_rng(seed)
    codes = np.frombuffer(
        b"(NIJKMFGVX]ael)tu}sdghjpqr.\x80\x85\x86\x87\x88\x89\x8a\x8b\x8c\x94\x95BC01\n\x00\x01\x02", np.uint8
    )
    for _ in range(4000):
        data = bytes(rng.choice(codes, int(rng.integers(1, 60))))
        try:
            load_plain(data + b".")
        except PlainPickleError:
            continue


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
x = torch.ones(3, 4)
dist.all_reduce(x); dist.broadcast(x, 0)
pair = dist.new_group([0, 1])
dist.all_gather([x, x.clone()], x, group=pair)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)  # rank 1 never comes
import time; time.sleep(1)  # until the recorder has seen that the calls before are done
open(f"{out}/dump_{rank}", "wb").write(c10d._dump_fr_trace())
import os; os._exit(0)
"""


@pytest.mark.dist
def test_real_dumps_of_gloo_ranks(tmp_path):
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "200", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "dumps"
    out.mkdir()
    jobs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(r), str(tmp_path / "store"), str(out)], env=env)
        for r in (0, 1)
    ]
    assert [j.wait(120) for j in jobs] == [0, 0]
    for rank in range(2):
        data = (out / f"dump_{rank}").read_bytes()
        assert load_plain(data) == pickle.loads(data)  # of our own making
    report = import_trace(out, tmp_path / "run")
    assert sorted(report.ranks) == [0, 1] and report.num_events == 7
    events = mappnb.attach(tmp_path / "run").sel()
    calls = match(events)
    assert calls.op.values[~calls.complete.values].tolist() == ["all_reduce"]
    still = events.isel(event=(events.flags.values & Flag.OPEN) > 0)
    assert still["rank"].values.tolist() == [0] and still.seq.values.tolist() == [3]
    facts = json.loads((tmp_path / "run/inc=000/ranks/rank=00000.json").read_text())["flight_recorder"]
    assert any("<module>" in f for f in facts["frames"])
