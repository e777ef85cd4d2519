"""The rows of a timeline: which rank, thread or stream, and nesting depth each event is drawn in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError, did_you_mean
from mappnb.layout import AXES, Layout
from mappnb.schema import EVENTS, check
from mappnb.terms import Category, Flag
from mappnb.widgets._partition import layers

__all__ = [
    "GROUP_BY",
    "VARIABLES",
    "Block",
    "Group",
    "Lanes",
    "Placed",
    "Track",
    "arranged",
    "group_of",
    "lanes",
    "place",
]

Array = np.ndarray[Any, Any]
GROUP_BY: tuple[str, ...] = ("rank", "dp", "pp", "tp", "cp", "ep", "host")
"""What ranks can be put together by."""

VARIABLES: tuple[str, ...] = ("rank", "thread", "stream", "depth", "start_ns", "duration_ns", "category", "flags")
"""Variables of an events dataset that lanes are made of."""

_UNKNOWN, _IN_FLIGHT, _STREAM = (
    2**32,
    2**32 + 1,
    2**32 + 2,
)  # tracks behind those of threads, whose number is the thread's
_KEY = ("rank", "track", "depth", "layer")


@dataclass(frozen=True, slots=True)
class Track:
    """Rows of one thread, one stream, or the transfers in flight of a rank: ``num_rows`` from ``first``."""

    rank: int
    label: str
    first: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one rank; ``label`` such as ``"rank 3 · pp 1 dp 1"``, ``group`` the label of its group."""

    rank: int
    label: str
    group: str
    first: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of ranks that belong together; the label is empty where ranks are not grouped."""

    label: str
    first: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """Display rows of a timeline, from the top.

    Attributes
    ----------
    row : int32 array, dims (event,)
        Row of each event. No two events of a row overlap, but for marks without length.
    rank : int32 array, dims (row,)
    track : int32 array, dims (row,)
        Position in ``tracks``.
    depth : int16 array, dims (row,)
        Nesting depth in the track, without gaps. Rows of equal depth hold spans that would overlap.
    label : tuple of str, dims (row,)
        Label of the track. Labels are data, not markup.
    tracks, blocks, groups : tuple
        Rows put together by thread or stream, by rank, and by what ``group_by`` says.
    """

    row: Array
    rank: Array
    track: Array
    depth: Array
    label: tuple[str, ...]
    tracks: tuple[Track, ...]
    blocks: tuple[Block, ...]
    groups: tuple[Group, ...]
    keys: pd.DataFrame = field(repr=False)

    @property
    def num_rows(self) -> int:
        """Number of display rows."""
        return len(self.rank)


def lanes(
    events: xr.Dataset,
    *,
    layout: Layout | None,
    group_by: str = "rank",
    hosts: Mapping[int, str] | None = None,
    threads: str = "split",
    names: Mapping[tuple[int, int], str] | None = None,
    known: Lanes | None = None,
) -> Lanes:
    """Return the display rows of events.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Recorded, imported or simulated; ``depth``, ``thread`` and ``stream`` may be -1. All incarnations share the rows.
    layout : Layout or None
        Of the job; None stands for plain data parallelism.
    group_by : str
        One of :data:`GROUP_BY`.
    hosts : mapping of int to str, optional
        Host of each rank.
    threads : str
        ``"split"``: a track for each host thread; ``"merge"``: one for all host threads of a rank.
    names : mapping of (int, int) to str, optional
        Name of (rank, thread).
    known : Lanes, optional
        Rows that were there before and stay, with or without events, in the same order.

    Returns
    -------
    Lanes
        Per rank: the main thread, other threads, transfers in flight, device streams. Where the depth is missing or wrong, spans that
        overlap are put into rows of their own, the outer one first.

    Raises
    ------
    MappnbError
        If ``group_by`` or ``threads`` is none of the words.
    SchemaError
        If a variable is missing.
    """
    placed = place(events, threads=threads)
    return arranged([placed], layout=layout, group_by=group_by, hosts=hosts, names=names, known=known)


@dataclass(frozen=True, slots=True)
class Placed:
    """Events with their rank, track, depth and layer, before rows are ordered: ``keys.iloc[code[i]]`` is where event i belongs."""

    code: Array
    keys: pd.DataFrame


def place(events: xr.Dataset, *, threads: str = "split") -> Placed:
    """Return where events belong, for :func:`arranged`: ranks may be placed one after the other. Parameters as of :func:`lanes`."""
    check(events, {v: EVENTS[v] for v in VARIABLES}, name="events")
    _one_of("threads", threads, ("split", "merge"))
    rank, thread, stream = (events[v].values.astype(np.int64) for v in ("rank", "thread", "stream"))
    start, depth = events.start_ns.values, events.depth.values.astype(np.int64)
    track = np.zeros_like(thread) if threads == "merge" else np.where(thread < 0, _UNKNOWN, thread)
    track = np.where(stream >= 0, _STREAM + stream, track)
    aside = np.flatnonzero((events.flags.values & (Flag.ASYNC | Flag.OVERLAPPED) != 0) & (stream < 0))
    transfer = np.isin(events.category.values[aside], (Category.COLLECTIVE, Category.P2P)) if len(aside) else aside
    track[aside[transfer]] = _IN_FLIGHT
    depth[aside[transfer]] = 0
    (of_rank, ranks), (of_track, tracks), (of_depth, depths) = (pd.factorize(v) for v in (rank, track, depth))
    cell, cells = pd.factorize((of_rank * len(tracks) + of_track) * len(depths) + of_depth)
    layer = layers(cell, start, start + events.duration_ns.values)
    width = int(layer.max(initial=0)) + 1
    code, codes = (cell, np.arange(len(cells))) if width == 1 else pd.factorize(cell * np.int64(width) + layer)
    found, rest = cells[codes // width], codes % width
    at, down = np.divmod(found, max(1, len(depths)))
    columns = (ranks[at // max(1, len(tracks))], tracks[at % max(1, len(tracks))], depths[down], rest)
    return Placed(code.astype(np.int32), pd.DataFrame(dict(zip(_KEY, columns, strict=True)), dtype=np.int64))


def arranged(
    placed: list[Placed],
    *,
    layout: Layout | None,
    group_by: str = "rank",
    hosts: Mapping[int, str] | None = None,
    names: Mapping[tuple[int, int], str] | None = None,
    known: Lanes | None = None,
) -> Lanes:
    """Return the display rows of placed events, one after the other; parameters as of :func:`lanes`."""
    _one_of("group_by", group_by, GROUP_BY)
    keys = [p.keys for p in placed]
    both = pd.concat([*([] if known is None else [known.keys]), *keys, _no_keys()], ignore_index=True)
    both = both.drop_duplicates(list(_KEY))
    ranks = np.unique(both["rank"].to_numpy())
    layout = layout or Layout(dp=max(1, int(ranks.max(initial=0)) + 1))
    group = {r: group_of(r, group_by, layout, hosts or {}) for r in ranks.tolist()}
    order = {r: i for i, r in enumerate(sorted(group, key=lambda r: (*group[r], r)))}
    both = both.assign(place=both["rank"].map(order)).sort_values(["place", *_KEY[1:]], ignore_index=True)[list(_KEY)]
    position = pd.Series(np.arange(len(both), dtype=np.int32), index=pd.MultiIndex.from_frame(both))
    rows = [position.reindex(pd.MultiIndex.from_frame(k)).to_numpy()[p.code] for k, p in zip(keys, placed, strict=True)]
    row = np.concatenate([np.empty(0, np.int32), *rows]).astype(np.int32)
    return _described(row, both, layout, {r: g[1] for r, g in group.items()}, names or {})


def _no_keys() -> pd.DataFrame:
    return pd.DataFrame({k: np.empty(0, np.int64) for k in _KEY})


def _one_of(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise MappnbError(f"{name} is {value!r}; expected one of {', '.join(words)}{did_you_mean(value, words)}")


def group_of(rank: int, group_by: str, layout: Layout, hosts: Mapping[int, str]) -> tuple[Any, str]:
    """Return (place among the groups, label) of the group of a rank; ``group_by`` is one of :data:`GROUP_BY`."""
    if group_by == "rank":
        return 0, ""
    if group_by == "host":
        return (0, hosts[rank]) if hosts.get(rank) else (1, "host not known")
    if not 0 <= rank < layout.world_size:
        return layout.world_size, "outside the layout"
    place = layout.coords(rank)[group_by]
    return place, f"{group_by} {place}"


def _track_label(rank: int, track: int, names: Mapping[tuple[int, int], str]) -> str:
    if track >= _STREAM:
        return f"stream {track - _STREAM}"
    if track == _IN_FLIGHT:
        return "in flight"
    if track == _UNKNOWN:
        return "host"
    return "main" if track == 0 else names.get((rank, track)) or f"thread {track}"


def _rank_label(rank: int, layout: Layout) -> str:
    if rank < 0:
        return "rank not known"
    if not rank < layout.world_size or layout.world_size == 1:
        return f"rank {rank}"
    where = layout.coords(rank)
    return f"rank {rank} · " + " ".join(f"{a} {where[a]}" for a in reversed(AXES) if getattr(layout, a) > 1)


def _runs(*columns: Array) -> list[tuple[int, int]]:
    """Return (first, length) of the runs of rows alike in all columns."""
    n = len(columns[0])
    new = np.zeros(max(n - 1, 0), bool)
    for column in columns:
        new |= column[1:] != column[:-1]
    bounds = [0, *(np.flatnonzero(new) + 1).tolist(), n] if n else [0]
    return [(a, b - a) for a, b in pairwise(bounds)]


def _described(
    row: Array, keys: pd.DataFrame, layout: Layout, groups: Mapping[int, str], names: Mapping[tuple[int, int], str]
) -> Lanes:
    rank, track, depth = (keys[c].to_numpy() for c in _KEY[:3])
    tracks = tuple(
        Track(int(rank[f]), _track_label(int(rank[f]), int(track[f]), names), f, n) for f, n in _runs(rank, track)
    )
    number = np.repeat(np.arange(len(tracks), dtype=np.int32), [t.num_rows for t in tracks])
    dense = np.zeros(len(rank), np.int16)
    for t in tracks:
        part = slice(t.first, t.first + t.num_rows)
        dense[part] = np.unique(depth[part], return_inverse=True)[1]
    blocks = tuple(
        Block(int(rank[f]), _rank_label(int(rank[f]), layout), groups[int(rank[f])], f, n) for f, n in _runs(rank)
    )
    of_group = np.repeat(np.array([b.group for b in blocks], object), [b.num_rows for b in blocks])
    return Lanes(
        row,
        rank.astype(np.int32),
        number,
        dense,
        tuple(t.label for t in tracks for _ in range(t.num_rows)),
        tracks,
        blocks,
        tuple(Group(str(of_group[f]), f, n) for f, n in _runs(of_group)),
        keys,
    )
