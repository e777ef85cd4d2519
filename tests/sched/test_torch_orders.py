"""The same schedules as ``torch.distributed.pipelining``, and where torch's are not the same."""

import pytest

from mappnb.errors import ScheduleError
from mappnb.sched import Action, Placement, Schedule, schedule
from mappnb.terms import Kind

torch = pytest.importorskip("torch", reason="compares with torch.distributed.pipelining")
from .torch_orders import torch_orders  # noqa: E402

pytestmark = pytest.mark.oracle


def same(torch_name, name, p, v, m, *, v_shape=False, **options):
    rows, pairs = torch_orders(torch_name, ranks=p, chunks=v, microbatches=m, v_shape=v_shape)
    ours = schedule(name, num_stages=p * v, num_microbatches=m, num_chunks=v, **options)
    assert ours.ranks == rows
    assert ours.pairs == pairs


@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("p", [1, 2, 4, 5])
def test_gpipe(p, m):
    same("GPipe", "gpipe", p, 1, m)


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 4, 5])
def test_interleaved(p, v, rounds):
    """Torch warms up as Megatron does, 2 (p − 1 − r) + (v − 1) p; with one chunk torch keeps the 2, Megatron and we take p − 1 − r."""
    m = p * rounds
    if v > 1:
        same("Interleaved1F1B", "interleaved", p, v, m)
        return
    rows, _ = torch_orders("Interleaved1F1B", ranks=p, microbatches=m)
    ahead = [next(i for i, a in enumerate(row) if a.kind is Kind.BACKWARD) for row in rows]
    assert ahead == [min(m, 2 * (p - 1 - r) + 1) for r in range(p)]


@pytest.mark.parametrize(("p", "m"), [(4, 6), (4, 10), (3, 8), (2, 3)])
def test_rounds_of_torch_are_group_sizes(p, m):
    """Torch takes m // p equal rounds; that is a group size."""
    same("Interleaved1F1B", "interleaved", p, 2, m, group_size=m // (m // p))


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 4), (4, 16), (5, 15), (4, 6), (4, 10), (3, 8)])
def test_interleaved_zero_bubble(p, m, v):
    if v == 1 and m % (m // p):
        pytest.skip("torch refuses one chunk too")
    same("InterleavedZeroBubble", "interleaved_zb", p, v, m)


@pytest.mark.parametrize("m", [1, 2, 7, 13])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_zb_v(p, m):
    same("ZBVZeroBubble", "zb_v", p, 2, m, v_shape=True)


@pytest.mark.parametrize("more", [0, 1, 7])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
def test_dualpipe_v(p, more):
    same("DualPipeV", "dualpipe_v", p, 2, 2 * p + more, v_shape=True)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 3, 8)])
def test_looped_bfs_runs_backwards_from_the_last_microbatch(p, v, m):
    """Torch's LoopedBFS: the same forwards; backwards chunk by chunk too, but the microbatches in reverse."""
    rows, _ = torch_orders("LoopedBFS", ranks=p, chunks=v, microbatches=m)
    ours = schedule("breadth_first", num_stages=p * v, num_microbatches=m, num_chunks=v)
    for mine, theirs in zip(ours.ranks, rows, strict=True):
        assert mine[: m * v] == theirs[: m * v]
        reverse = tuple(Action(a.stage, a.kind, m - 1 - a.microbatch) for a in mine[m * v :])
        assert reverse == theirs[m * v :]
        assert mine != theirs


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 4)])
def test_1f1b_display_order_of_torch_is_wrong_on_the_last_rank(p, m):
    """Torch 2.13's display order has F1 to Fm there instead of F0 to F(m − 1); its runtime uses other code. We must see it."""
    rows, _ = torch_orders("1F1B", ranks=p, microbatches=m)
    ours = schedule("1f1b", num_stages=p, num_microbatches=m)
    assert ours.ranks[:-1] == rows[:-1]
    last = tuple(Action(a.stage, a.kind, a.microbatch - (a.kind is Kind.FORWARD)) for a in rows[-1])
    assert ours.ranks[-1] == last != rows[-1]
    with pytest.raises(ScheduleError):
        Schedule(rows, placement=Placement.loop(p)).validate()
