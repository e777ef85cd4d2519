"""Simulating a schedule: our native pass against a numba version of it, plain Python, and torch's own simulator, in one run.

All are given the same interleaved order. Thread CPU time, best of several rounds in turn; ours and numba's fill start and end of every
action. torch simulates its lowered list (with sends and receives) and has no durations; its figure is per compute action.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mappnb.sched import Costs, schedule
from mappnb.sched.reference import times_reference
from mappnb.sched.schedule import Schedule
from mappnb.sched.simulate import simulate
from mappnb.sched.times import hops, times

SIZES = ((8, 64, 1), (8, 64, 4), (16, 128, 2), (16, 256, 2), (64, 256, 1), (64, 1024, 4))
COSTS = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, p2p_s=0.1)


def numba_pass() -> Callable[..., int] | None:
    """Return the worklist pass compiled by numba, or None where numba is not installed."""
    try:
        import numba
    except ImportError:
        return None

    @numba.njit(cache=False)
    def run(codes, offsets, stages, m, p, cost, latency, start, end):  # type: ignore[no-untyped-def]
        ranks = len(offsets) - 1
        come = np.full((2, stages, m), -1.0)
        clock = np.zeros(ranks)
        at = offsets[:-1].copy()
        work = np.empty(ranks + 1, np.int64)
        n = ranks
        for r in range(ranks):
            work[r] = ranks - 1 - r
        while n:
            n -= 1
            r = work[n]
            i, now, stop = at[r], clock[r], offsets[r + 1]
            while i < stop:
                code = codes[i]
                k, s, b = (code >> 29) & 3, (code >> 17) & 0xFFF, code & 0x1FFFF
                ready = now
                if k != 0 or s != 0:
                    side = 1 if k else 0
                    t = come[side, s, b]
                    if t < 0:
                        come[side, s, b] = -2.0 - r
                        break
                    ready = max(ready, t)
                now = ready + cost[k]
                start[i] = ready
                end[i] = now
                i += 1
                side, to, hop = (0, s + 1, latency) if k == 0 else (1, s - 1, latency)
                if k == 0 and s == stages - 1:
                    side, to, hop = 1, s, 0.0
                if 0 <= to < stages:
                    was = come[side, to, b]
                    come[side, to, b] = now + hop
                    if was < -1.0:
                        work[n] = int(-2.0 - was)
                        n += 1
            at[r], clock[r] = i, now
        return int((at - offsets[:-1]).sum())

    return run


def torch_seconds(sched: Schedule) -> float | None:
    """Return the CPU time of torch's ``_simulate_comms_compute`` on the same order, or None without torch."""
    try:
        from torch.distributed.pipelining.schedules import _Action as TorchAction
        from torch.distributed.pipelining.schedules import _add_send_recv, _simulate_comms_compute
    except ImportError:
        return None
    order = {r: [TorchAction.from_str(str(a)) for a in row] for r, row in enumerate(sched.ranks)}
    place = sched.placement.forward
    lowered = _add_send_recv(order, stage_to_rank=lambda s: place[s], num_stages=sched.num_stages)
    begun = time.thread_time()
    _simulate_comms_compute(lowered, stage_to_rank=lambda s: place[s], num_stages=sched.num_stages)
    return time.thread_time() - begun


def best(call: Callable[[], Any], rounds: int) -> float:
    """Return the least thread CPU time of a call, s."""
    least = np.inf
    for _ in range(rounds):
        begun = time.thread_time()
        call()
        least = min(least, time.thread_time() - begun)
    return float(least)


def one_size(p: int, m: int, v: int, rounds: int, compiled: Callable[..., int] | None) -> dict[str, float]:
    """Return M actions/s of each way for one size."""
    sched = schedule("interleaved", num_stages=p * v, num_microbatches=m, num_chunks=v)
    tables, n = COSTS.tables(sched), len(sched)
    where, out = hops(sched, tables), (np.empty(n), np.empty(n))
    cost = tables.duration_s[:, 0, 0].copy()
    codes = sched.codes.astype(np.int64)
    other = (np.empty(n), np.empty(n))

    def made() -> None:
        times(schedule("interleaved", num_stages=p * v, num_microbatches=m, num_chunks=v), tables, where=where, out=out)

    ways: dict[str, Callable[[], Any]] = {
        "pass": lambda: times(sched, tables, where=where, out=out),
        "pass, new arrays": lambda: times(sched, tables, where=where),
        "with the order": made,
    }
    if compiled is not None:
        ways["numba"] = lambda: compiled(codes, sched.offsets, p * v, m, p, cost, 0.1, *other)
        assert ways["numba"]() == n
    seconds = dict.fromkeys(ways, np.inf)
    for _ in range(4):  # in turn, so that a slow moment hits all
        for name, call in ways.items():
            seconds[name] = min(seconds[name], best(call, rounds))
    if compiled is not None:
        np.testing.assert_array_equal(out[1], other[1])
    speed = {name: n / s / 1e6 for name, s in seconds.items()}
    if n <= 40_000:
        speed["plain Python"] = n / best(lambda: times_reference(sched, tables), 1) / 1e6
        took = torch_seconds(sched)
        if took is not None:
            speed["torch"] = n / took / 1e6
    return speed


def redraw(rounds: int) -> float:
    """Return the least CPU time of simulate() with its whole dataset for 16 ranks, 128 microbatches, 2 chunks, ms."""
    sched = schedule("interleaved", num_stages=32, num_microbatches=128, num_chunks=2)
    return best(lambda: simulate(sched, COSTS), rounds) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    compiled = numba_pass()
    rows = {(p, m, v): one_size(p, m, v, args.rounds, compiled) for p, m, v in SIZES}
    names = list(dict.fromkeys(n for row in rows.values() for n in row))
    print("M actions/s".ljust(24) + "".join(n.rjust(18) for n in names))
    for (p, m, v), row in rows.items():
        label = f"p{p} m{m} v{v} ({2 * p * m * v:,})".ljust(24)
        print(label + "".join(f"{row[n]:18.3g}" if n in row else " " * 18 for n in names))
    for other in ("numba", "torch"):
        ratio = [row["pass"] / row[other] for row in rows.values() if other in row]
        if ratio:
            print(f"pass over {other}: {min(ratio):.2f} to {max(ratio):.2f}")
    print(f"simulate(), all of its dataset, p16 m128 v2: {redraw(args.rounds * 2):.1f} ms")


if __name__ == "__main__":
    main()
