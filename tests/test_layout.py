"""Layout: the maps are inverse to one another, and agree with Megatron-core's own rank generator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mappnb.errors import LayoutError
from mappnb.layout import AXES, Layout

SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw) -> Layout:
    tp, cp, dp, pp = (draw(SIZES) for _ in range(4))
    order = "-".join(draw(st.permutations(AXES)))
    return Layout(tp=tp, cp=cp, dp=dp, pp=pp, num_chunks=draw(st.sampled_from([1, 2, 3])), order=order)


@given(layouts())
def test_rank_and_coords_are_inverse(layout):
    seen = set()
    for rank in range(layout.world_size):
        where = layout.coords(rank)
        assert layout.rank(**{a: where[a] for a in ("tp", "cp", "dp", "pp")}) == rank
        seen.add(tuple(where[a] for a in ("tp", "cp", "dp", "pp")))
    assert len(seen) == layout.world_size


@given(layouts(), st.sampled_from(["interleaved", "v"]))
def test_stage_and_place_are_inverse(layout, order):
    layout = Layout(pp=layout.pp, num_chunks=layout.num_chunks, stage_order=order)
    stages = [layout.stage(p, c) for p in range(layout.pp) for c in range(layout.num_chunks)]
    assert sorted(stages) == list(range(layout.num_stages))
    assert all(layout.stage(*layout.place(s)) == s for s in stages)


def test_v_shape_turns_at_the_last_rank():
    layout = Layout(pp=4, num_chunks=2, stage_order="v")
    assert [layout.place(s)[0] for s in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]  # ZB-V, arXiv:2401.10241, Fig. 6


@given(layouts(), st.sampled_from(["tp", "cp", "dp", "pp", "dp-cp", "tp-pp"]))
def test_groups_partition_the_ranks(layout, axes):
    groups = layout.groups(axes)
    assert sorted(r for g in groups for r in g) == list(range(layout.world_size))


@pytest.mark.oracle
@pytest.mark.parametrize(
    "sizes",
    [
        dict(tp=2, pp=2, dp=2, cp=1, ep=1, etp=2),
        dict(tp=2, pp=3, dp=4, cp=2, ep=1, etp=2),
        dict(tp=2, pp=2, dp=4, cp=1, ep=4, etp=1),
        dict(tp=1, pp=2, dp=8, cp=1, ep=2, etp=2),
    ],
)
def test_groups_equal_megatrons(sizes):
    parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core is not installed")
    layout = Layout(**sizes)
    dense = parallel_state.RankGenerator(
        tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=layout.order
    )
    for axes in ("tp", "pp", "dp", "cp", "dp-cp", "tp-pp"):
        assert sorted(layout.groups(axes)) == sorted(map(tuple, dense.get_ranks(axes)))
    expert = parallel_state.RankGenerator(
        tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=layout.order
    )
    assert sorted(layout.groups("ep")) == sorted(map(tuple, expert.get_ranks("ep")))


def test_round_trip_through_a_dict():
    layout = Layout(tp=2, pp=4, dp=3, num_chunks=2, stage_order="v")
    assert Layout.from_dict({**layout.to_dict(), "from_the_future": 1}) == layout


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Layout(tp=0), "tp is 0; expected an integer of at least 1"),
        (lambda: Layout(order="tp-dp"), "expected each of tp, cp, ep, dp, pp once"),
        (lambda: Layout(dp=2, ep=3), "does not divide the 2 ranks of a stage"),
        (lambda: Layout(dp=2).coords(2), "rank 2: the layout dp2 has ranks 0 to 1"),
        (lambda: Layout(dp=2).groups("ddp"), "did you mean 'dp'?"),
        (lambda: Layout(pp=2).place(2), "stage 2"),
    ],
)
def test_messages(make, text):
    with pytest.raises(LayoutError) as err:
        make()
    assert text in str(err.value)
