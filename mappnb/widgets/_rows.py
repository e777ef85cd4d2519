"""Display rows: lanes put in the order that the reader asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.layout import Layout
from mappnb.widgets.lanes import Block, Group, Lanes, group_of

__all__ = ["Rows"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The order of the lanes on the screen.

    Attributes
    ----------
    lane : int array, dims (display row,)
        Lane row of each display row.
    place : int array, dims (lane row,)
        Display row of each lane row; -1 where it is not shown.
    blocks, groups : tuple
        Of ranks and of groups, by display row.
    """

    lane: Array
    place: Array
    blocks: tuple[Block, ...]
    groups: tuple[Group, ...]

    @classmethod
    def of(
        cls, lanes: Lanes, *, layout: Layout, group_by: str, ranks: list[int] | None, hosts: Mapping[int, str]
    ) -> Rows:
        """Arrange lanes: ranks of one group together, those not wanted left out."""
        named = {b.rank: group_of(b.rank, group_by, layout, hosts) for b in lanes.blocks}
        wanted = [b for b in lanes.blocks if ranks is None or b.rank in ranks]
        wanted.sort(key=lambda b: (named[b.rank][0], b.rank))
        lane = np.concatenate([np.empty(0, np.int64), *(np.arange(b.first, b.first + b.num_rows) for b in wanted)])
        place = np.full(lanes.num_rows, -1, np.int64)
        place[lane] = np.arange(len(lane))
        blocks: list[Block] = []
        groups: list[Group] = []
        at = 0
        for b in wanted:
            label = named[b.rank][1]
            blocks.append(Block(b.rank, b.label, label, at, b.num_rows))
            if groups and groups[-1].label == label:
                groups[-1] = Group(label, groups[-1].first, groups[-1].num_rows + b.num_rows)
            else:
                groups.append(Group(label, at, b.num_rows))
            at += b.num_rows
        return cls(lane, place, tuple(blocks), tuple(groups))
