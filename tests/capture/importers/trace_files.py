"""Trace files for tests: the real ones, and small ones made here."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from pathlib import Path
from typing import Any

from mappnb.capture.importers._tracejson import EVENT_FIELDS, TraceText, read_batches

DATA = Path(__file__).parents[4] / "shared" / "data"
NEEDS_DATA = f"needs the traces in {DATA}"
ARGS = (
    ("args", "stream", "i"),
    ("args", "correlation", "i"),
    ("args", "grid", "s"),
    ("args", "blocks per SM", "f"),
    ("args", "name", "s"),
)
FIELDS = (*EVENT_FIELDS, *ARGS)
_SPLICE = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"NaN", b"1e999", b"\\u12", b"\xff", b'"}', b'},{"']


def read_all(text: bytes, *, chunk: int = 1 << 20, fields=FIELDS, **options: Any):
    """Columns as lists with names in place, and what is known beside."""
    trace = TraceText()
    chunks = (text[i : i + chunk] for i in range(0, len(text), chunk))
    out: dict[str, list[Any]] = {}
    for batch in read_batches(chunks, trace, fields=fields, **options):
        for name, values in batch.items():
            out.setdefault(name, []).extend(values.tolist())
    texts = [("" if w == "event" else "args.") + n for w, n, k in fields if k == "s"]
    for name in texts:
        out[name] = [trace.names[i] if i >= 0 else None for i in out.get(name, [])]
    return out, trace


def event(**fields: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 2,
        "ts": 1000,
        "dur": 5,
        "args": {},
    } | fields


def document(events, **more: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, **more, "traceEvents": events}).encode()


def kineto(
    rank: int, world: int = 4, *, num_steps: int = 3, groups: bool = True, offset_us: float = 0.0
) -> dict[str, Any]:
    """A small trace of one rank: steps, CPU ops, launches, gemms, and an all-reduce a step with Seq and group."""
    t0 = 1.7e15 + offset_us
    host, device = {"pid": 100 + rank, "tid": 100 + rank}, {"pid": rank, "tid": 7}
    out = [event(ph="M", name="process_name", args={"name": "python"}, ts=t0, dur=0, cat="", **host)]
    for step in range(num_steps):
        a = t0 + 1000 * step
        out.append(event(cat="user_annotation", name=f"ProfilerStep#{step + 10}", ts=a, dur=900, **host))
        for i, name in enumerate(["sm90_xmma_gemm_bf16", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"]):
            corr = 10 * step + i + 1
            out.append(event(cat="cpu_op", ts=a + 10 + 20 * i, dur=15, args={"External id": corr}, **host))
            out.append(
                event(
                    cat="cuda_runtime",
                    name="cudaLaunchKernel",
                    ts=a + 12 + 20 * i,
                    dur=3,
                    args={"correlation": corr},
                    **host,
                )
            )
            args: dict[str, Any] = {"device": rank, "stream": 7 + 13 * i, "correlation": corr}
            if i:
                args |= {
                    "Collective name": "allreduce",
                    "In msg nelems": 1024,
                    "dtype": "BFloat16",
                    "Group size": world,
                }
            if i and groups:
                args |= {"Process Group Name": "3", "Process Group Ranks": str(list(range(world))), "Seq": 100 + step}
            out.append(
                event(
                    cat="kernel",
                    name=name,
                    ts=a + 50 + 200.5 * i,
                    dur=100.5,
                    args=args,
                    pid=rank,
                    tid=device["tid"] + 13 * i,
                )
            )
            out.append(event(ph="s", id=corr, cat="ac2g", name="ac2g", ts=a + 12 + 20 * i, **host))
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    properties = [{"id": rank, "name": "NVIDIA H100 80GB HBM3"}]
    return {
        "schemaVersion": 1,
        "deviceProperties": properties,
        "distributedInfo": info,
        "host_name": f"host{rank // 2}",
        "traceEvents": out,
    }


def write_kineto(folder: Path, world: int = 4, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        (folder / f"trace_{rank}.json").write_text(json.dumps(kineto(rank, world, **options)))
    return folder


def real_small() -> dict[str, bytes]:
    """The small real traces by name, unpacked."""
    out = {}
    for path in sorted(DATA.glob("hta/**/*.gz")):
        if path.stat().st_size < 4000:
            out["/".join(path.parts[-2:])] = gzip.decompress(path.read_bytes())
    return out


def dlrm_rank0() -> bytes:
    with tarfile.open(DATA / "param" / "dlrm_kineto.tar.gz") as archive:
        member = next(m for m in archive.getmembers() if "worker0" in m.name)
        found = archive.extractfile(member)
        assert found is not None
        return found.read()


def mutated(text: bytes, rng: random.Random) -> bytes:
    """The text with one to four bytes flipped, pieces cut or doubled, or its end cut off."""
    out = bytearray(text)
    for _ in range(rng.randint(1, 4)):
        if not out:
            break
        at = rng.randrange(len(out))
        length = rng.randrange(min(400, len(out) - at)) if len(out) > at else 0
        what = rng.randrange(6)
        if what == 0:
            out[at] = rng.randrange(256)
        elif what == 1:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 2:
            del out[at : at + length]
        elif what == 3:
            out[rng.randrange(len(out)) : 0] = out[at : at + length]
        elif what == 4:
            out[at:at] = rng.choice(_SPLICE)
        else:
            del out[at:]
    return bytes(out)
