"""One training step with known times: 1F1B over the pipeline, then gradient all-reduce and optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mappnb.layout import Layout
from mappnb.table_specs import TABLES, Columns
from mappnb.terms import Category, Op, Phase

__all__ = ["SyntheticStep", "group_id"]

_MS = 1_000_000


def group_id(axis: str, ranks: tuple[int, ...]) -> int:
    """Return a stable 63-bit id of a group."""
    digest = hashlib.blake2b(f"{axis}{ranks}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Iterator[tuple[str, int]]:
    """Yield ("F"|"B", microbatch) in 1F1B order (PipeDream-Flush, arXiv:2006.09503, Fig. 2b)."""
    warm_up = min(num_stages - stage - 1, num_microbatches)
    yield from (("F", i) for i in range(warm_up))
    for i in range(num_microbatches - warm_up):
        yield "F", warm_up + i
        yield "B", i
    yield from (("B", i) for i in range(num_microbatches - warm_up, num_microbatches))


class SyntheticStep:
    """Times of every event of every rank in one step, in ns from the step's start.

    Parameters
    ----------
    layout : Layout
        Only dp and pp shape the step; ranks that differ in tp or cp do the same work.
    num_microbatches, num_layers : int
        Microbatches a step; layers a stage.
    forward_s, p2p_s : float
        Length of a forward step and of a transfer, s. A backward takes twice a forward.
    slow : mapping of int to float
        Factor on the compute of single ranks.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        num_microbatches: int,
        num_layers: int,
        forward_s: float,
        p2p_s: float,
        slow: Mapping[int, float],
    ) -> None:
        self.layout, self.num_microbatches, self.num_layers = layout, num_microbatches, num_layers
        self.slow = slow
        self.forward_ns, self.p2p_ns = int(forward_s * 1e9), int(p2p_s * 1e9)
        self.times: dict[tuple[int, str, int], tuple[int, int, int]] = {}
        for pipeline in layout.groups("pp"):
            self._simulate(pipeline)
        self.flush_ns = {
            r: max(e for (rank, _, _), (_, _, e) in self.times.items() if rank == r) for r in range(layout.world_size)
        }
        self.reduce_ns = 2 * _MS
        self.reduce_end_ns = {
            r: max(self.flush_ns[m] for m in g) + self.reduce_ns for g in layout.groups("dp") for r in g
        }
        self.optimizer_ns = 3 * _MS
        self.work_ns = max(self.reduce_end_ns.values()) + self.optimizer_ns
        self.length_ns = self.work_ns + 1 * _MS

    def duration_ns(self, rank: int, kind: str) -> int:
        """Return the length of a forward ("F") or backward ("B") on a rank."""
        return int(self.forward_ns * (1 if kind == "F" else 2) * self.slow.get(rank, 1.0))

    def _simulate(self, pipeline: tuple[int, ...]) -> None:
        """Fill ``times``: (rank, kind, microbatch) -> (began to wait for input, start, end)."""
        p = len(pipeline)
        queues = [list(one_f_one_b(s, p, self.num_microbatches)) for s in range(p)]
        free = [0] * p
        while any(queues):
            for s, queue in enumerate(queues):
                while queue:
                    kind, mb = queue[0]
                    source = s - 1 if kind == "F" else s + 1
                    ready = 0
                    if 0 <= source < p:
                        key = (pipeline[source], kind, mb)
                        if key not in self.times:
                            break
                        ready = self.times[key][2] + self.p2p_ns
                    start = max(free[s], ready)
                    end = start + self.duration_ns(pipeline[s], kind)
                    self.times[pipeline[s], kind, mb] = (free[s], start, end)
                    free[s] = end
                    queue.pop(0)

    def columns(self, rank: int, *, name: str = "model") -> tuple[list[tuple[Any, ...]], Columns]:
        """Return the site table and the columns of one step of one rank, step 0 and seq from 0."""
        rows = _Rows(name)
        rows.add(
            ("mark", Op.ITERATION, "", Phase.NONE, -1, ""), 0, self.reduce_end_ns[rank] + self.optimizer_ns, depth=0
        )
        stage = self.layout.coords(rank)["pp"]
        pipeline = next(g for g in self.layout.groups("pp") if rank in g)
        seqs: dict[tuple[str, int], int] = {}
        for kind, mb in one_f_one_b(stage, self.layout.pp, self.num_microbatches):
            waited, start, end = self.times[rank, kind, mb]
            source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            for op, other in ((Op.RECV, source), (Op.SEND, target)):
                if 0 <= other < self.layout.pp:
                    peer = pipeline[other]
                    seq = seqs[op, peer] = seqs.get((op, peer), -1) + 1
                    began, length = (waited, start - waited) if op == Op.RECV else (end, 0)
                    where = {
                        "group": group_id("pp", pipeline),
                        "seq": seq,
                        "peer": peer,
                        "bytes": 4096,
                        "microbatch": mb,
                    }
                    rows.add(
                        (Category.P2P, op, "", Phase.NONE, -1, "float32"), began, length, depth=1, stage=stage, **where
                    )
            rows.action(kind, mb, start, end, stage=stage, num_layers=self.num_layers)
        flush, reduced = self.flush_ns[rank], self.reduce_end_ns[rank]
        dp = next(g for g in self.layout.groups("dp") if rank in g)
        rows.add(
            (Category.COLLECTIVE, Op.ALL_REDUCE, "", Phase.NONE, -1, "float32"), flush, reduced - flush, depth=1,
            group=group_id("dp", dp), seq=0, bytes=1 << 20,
        )  # fmt: skip
        rows.add((Category.OPTIMIZER, Op.OPTIMIZER_STEP, "", Phase.NONE, -1, ""), reduced, self.optimizer_ns, depth=1)
        return rows.sites, rows.columns()


class _Rows:
    """Rows of events, with their sites numbered as they come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sites: list[tuple[Any, ...]] = []
        self._ids: dict[tuple[Any, ...], int] = {}
        self._rows: list[dict[str, int]] = []

    def add(self, site: tuple[Any, ...], start: int, duration: int, **values: int) -> None:
        site = tuple(str(v) if isinstance(v, str) else v for v in site)
        if site not in self._ids:
            self._ids[site] = len(self.sites)
            self.sites.append(site)
        self._rows.append({"site": self._ids[site], "start_ns": start, "duration_ns": duration, **values})

    def action(self, kind: str, mb: int, start: int, end: int, *, stage: int, num_layers: int) -> None:
        op, phase = (Op.FORWARD_STEP, Phase.FORWARD) if kind == "F" else (Op.BACKWARD_STEP, Phase.BACKWARD)
        place = {"stage": stage, "chunk": 0, "microbatch": mb}
        self.add((Category.COMPUTE, op, "", phase, -1, ""), start, end - start, depth=1, **place)
        share = (end - start) // max(num_layers, 1)
        for i in range(num_layers):
            layer = stage * num_layers + (i if kind == "F" else num_layers - 1 - i)
            self.add(
                (Category.COMPUTE, Op.LAYER, self.name, phase, layer, ""), start + i * share, share, depth=2, **place
            )

    def columns(self) -> Columns:
        spec = TABLES["events"]
        defaults = {"thread": 0, "flags": 0}
        return {
            c: np.array([r.get(c, defaults.get(c, -1)) for r in self._rows], spec.numpy_dtype(c)) for c in spec.columns
        }
