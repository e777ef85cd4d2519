"""The levels of the stragglers view: all ranks or hosts by step, one host, one rank by part and step, one step by operation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mappnb.errors import MappnbError, did_you_mean
from mappnb.widgets._strag_data import StragglerData
from mappnb.widgets._strag_evidence import value_text
from mappnb.widgets._strag_grid import Grid, Row, arrange, bins, orders, reduce
from mappnb.widgets._strag_measures import OTHERS
from mappnb.widgets._strag_ops import MOST_PEERS, Ops, op_rows
from mappnb.widgets._strag_where import AGAINST, Where

__all__ = ["Picture", "columns", "crumbs", "picture"]

Array = np.ndarray[Any, Any]
AUTO_ROWS = 64
"""Ranks that have a row each unless asked otherwise; of more, and several hosts, hosts have one: more labels do not fit a screen."""
NEUTRAL = 0.1
"""The colours of a ratio span at least 1 ± this: what differs by a few percent looks alike, as GPUs of one model do."""
STEEPEST = 1.0
"""And at most 1 ± this: a rank five times slower must not make one that is 20 % slower look well."""
SHOWN = 0.995
"""Quantile of the cells at which the other colours end: single outliers do not flatten the rest."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn at a place.

    Attributes
    ----------
    where : Where
    grid : Grid or None
        Cells; None at the level of one step.
    ops : Ops or None
        Bars of one step.
    scale : str
        Scale of the values, see :class:`mappnb.widgets._strag_measures.Metric`.
    label, caption : str
        What the colours stand for, and what one cell is.
    low, high : float
        Ends of the colours.
    into : tuple of dict
        Per row, what a double click looks at.
    steps_into : tuple of int
        Per column the step that it leads to.
    """

    where: Where
    grid: Grid | None
    ops: Ops | None
    scale: str
    label: str
    caption: str
    low: float = 0.0
    high: float = 1.0
    into: tuple[dict[str, Any], ...] = ()
    steps_into: tuple[int, ...] = ()


def picture(data: StragglerData, where: Where) -> Picture:
    """Return what is drawn at a place, or raise MappnbError where there is no such place."""
    if where.level == "step":
        return _step(data, where)
    if where.level == "rank":
        return _rank(data, where)
    return _ranks(data, where)


def _ranks(data: StragglerData, where: Where) -> Picture:
    m = data.m
    metric = m.metric(where.metric)
    known = orders(data.layout, m.hosts)
    if where.order not in known:
        raise MappnbError(
            f"no order {where.order!r} here; expected one of {', '.join(known)}{did_you_mean(where.order, known)}"
        )
    only = None
    if where.host is not None:
        only = [i for i, h in enumerate(m.hosts) if h == where.host]
        if not only:
            names = sorted(set(m.hosts))
            raise MappnbError(f"no host {where.host!r}; there are {', '.join(names)}{did_you_mean(where.host, names)}")
    by_host = where.host is None and _by_host(data, where)
    rows = arrange(m.ranks, m.hosts, data.layout, order=where.order, by_host=by_host, only=only)
    cut = bins(m.steps, len(rows))
    values = reduce(m.values(metric.key), rows, cut, where.cell)
    spans = tuple((int(m.steps[a]), int(m.steps[b - 1])) for a, b in cut)
    into = tuple({"host": r.host} if by_host and r.host else {"rank": _worst(data, metric.key, r.ranks)} for r in rows)
    caption = _caption(metric.says, values, max((len(r.ranks) for r in rows), default=1), cut, where.cell)
    missing = data.layout.world_size - len(m.ranks)
    if missing > 0 and where.host is None:
        caption += f" {missing} of the {data.layout.world_size} ranks of the layout left no events of a step."
    low, high = limits(values, metric.scale)
    grid = Grid(values, tuple(rows), spans)
    return Picture(where, grid, None, metric.scale, metric.label, caption, low, high, into, tuple(b for _, b in spans))


def _worst(data: StragglerData, key: str, ranks: Sequence[int]) -> int:
    """Return the rank of a row that a look inside is for: of several the one that usually has the largest value."""
    if len(ranks) == 1:
        return int(data.m.ranks[ranks[0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        usual = np.nanmedian(data.m.values(key)[:, list(ranks)], axis=0)
    return int(data.m.ranks[ranks[int(np.argmax(np.nan_to_num(usual, nan=-np.inf)))]])


def _by_host(data: StragglerData, where: Where) -> bool:
    several = len(set(data.m.hosts)) > 1
    return several and (where.rows == "host" or (where.rows == "auto" and len(data.m.ranks) > AUTO_ROWS))


def _caption(says: str, values: Array, most: int, cut: Sequence[tuple[int, int]], cell: str) -> str:
    size = max((b - a for a, b in cut), default=1)
    of = " and ".join(p for p in (f"{most} ranks" if most > 1 else "", f"{size} steps" if size > 1 else "") if p)
    word = "largest" if cell == "max" else "median"
    said = f"Each cell: {says}" + (f"; the {word} of up to {of}" if of else "") + "."
    return said + (" Hatched: no events." if np.isnan(values).any() else "")


def _rank(data: StragglerData, where: Where) -> Picture:
    m = data.m
    index = m.index(int(where.rank or 0))
    parts = m.parts(index)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {
            "above": parts.seconds - parts.peers,
            "ratio": np.where(parts.peers > 0, parts.seconds / parts.peers, np.nan),
            "seconds": parts.seconds,
        }[where.against]
    rows = tuple(Row(name, f"{name}, rank {where.rank}", (k,), "") for k, name in enumerate(parts.names))
    cut = bins(m.steps, len(rows))
    cells = reduce(values.T, rows, cut, where.cell)
    whose = f"the median of its {parts.num_peers} peers" if parts.num_peers else "its own median step: it has no peer"
    says = {
        "above": f"self time of rank {where.rank} in a part less {whose}, s",
        "ratio": f"self time of rank {where.rank} in a part over {whose}",
        "seconds": f"self time of rank {where.rank} in a part, s",
    }
    spans = tuple((int(m.steps[a]), int(m.steps[b - 1])) for a, b in cut)
    rows = tuple(replace(r, ranks=(index,)) for r in rows)
    own = [
        k for k, name in enumerate(parts.names) if name not in OTHERS
    ]  # waits are longer than the excess that causes them
    low, high = limits(cells[own] if own else cells, where.against)
    caption = _caption(says[where.against], cells, 1, cut, where.cell)
    worst = m.values("above_s")[:, index]
    steps = tuple(int(m.steps[a + int(np.argmax(np.nan_to_num(worst[a:b], nan=-np.inf)))]) for a, b in cut)
    return Picture(
        where, Grid(cells, rows, spans), None, where.against, AGAINST[where.against], caption, low, high,
        tuple({"rank": where.rank} for _ in rows), steps,
    )  # fmt: skip


def _step(data: StragglerData, where: Where) -> Picture:
    m = data.m
    rank, step = int(where.rank or 0), int(where.step or 0)
    index = m.index(rank)
    if step not in m.steps:
        raise MappnbError(f"no step {step} with events; there are {int(m.steps.min())} to {int(m.steps.max())}")
    peers = m.peers_of(index)[:MOST_PEERS]
    ops = op_rows(data.events(step=step, ranks=[rank, *m.ranks[peers].tolist()]), rank)
    whose = f"the median of {ops.num_peers} peers" if ops.num_peers else "no peer to compare with"
    more = f" {ops.left_out} smaller operations are left out." if ops.left_out else ""
    caption = f"Self time of each operation of rank {rank} in step {step}; below it {whose}. Transfers hold the waiting in them.{more}"
    if not len(ops.frame):
        caption = f"Rank {rank} has no events in step {step}."
    return Picture(where, None, ops, "seconds", "self time, s", caption)


def limits(values: Array, scale: str) -> tuple[float, float]:
    """Return the ends of the colours: symmetric around 1 or 0 where values are compared, from 0 where they are not."""
    good = values[np.isfinite(values)]
    if not len(good):
        return {"ratio": (1 - NEUTRAL, 1 + NEUTRAL), "above": (-1e-3, 1e-3)}.get(scale, (0.0, 1.0))
    if scale == "share":
        return 0.0, 1.0
    if scale == "seconds":
        return 0.0, max(float(np.quantile(good, SHOWN)), 1e-9)
    centre = 1.0 if scale == "ratio" else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        usual = np.nanmedian(values, axis=1)
    most = max(
        float(np.quantile(np.abs(good - centre), SHOWN)),
        float(np.nanmax(np.abs(usual - centre), initial=0.0)),
    )
    most = min(max(most, NEUTRAL), STEEPEST) if scale == "ratio" else max(most, 1e-6)
    return centre - most, centre + most


def crumbs(data: StragglerData, where: Where) -> list[dict[str, Any]]:
    """Return the way from all ranks to a place: label and where it leads."""
    top = {"host": None, "rank": None, "step": None}
    out: list[dict[str, Any]] = [{"label": "All hosts" if _by_host(data, where) else "All ranks", "to": top}]
    host = where.host
    if host is None and where.rank is not None and len(set(data.m.hosts)) > 1:
        host = data.m.hosts[data.m.index(where.rank)] or None
    if host is not None:
        out.append({"label": host, "to": {**top, "host": host}})
    if where.rank is not None:
        label = data.layout.label(where.rank) if where.rank < data.layout.world_size > 1 else ""
        out.append(
            {
                "label": f"rank {where.rank}" + (f" ({label})" if label else ""),
                "to": {**top, "host": host, "rank": where.rank},
            }
        )
    if where.step is not None:
        out.append({"label": f"step {where.step}", "to": {**top, "host": host, "rank": where.rank, "step": where.step}})
    return out


def columns(drawn: Picture) -> dict[str, Any]:
    """Return what is drawn as arrays: ``value`` (row, column), ``row``, ``first_step``, ``last_step``; of one step its table."""
    if drawn.ops is not None:
        return {str(k): drawn.ops.frame[k].to_numpy() for k in drawn.ops.frame}
    grid = drawn.grid
    if grid is None:
        return {}
    first, last = (np.array([c[i] for c in grid.columns], np.int64) for i in (0, 1))
    return {
        "value": grid.values,
        "row": np.array([r.label for r in grid.rows], object),
        "first_step": first,
        "last_step": last,
    }


def said_at(drawn: Picture, row: int, column: int) -> str:
    """Return one cell in words."""
    if drawn.grid is None:
        return ""
    first, last = drawn.grid.columns[column]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{drawn.grid.rows[row].title}, {steps}: {value_text(float(drawn.grid.values[row, column]), drawn.scale)}"
