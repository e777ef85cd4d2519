"""What our own Chrome export tells of its spans beside names and times, put back: op, phase, layer, group, seq, ..."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mappnb.capture.importers._chrome_rows import OWN_COLUMNS, ChromeRows, SpanTable
from mappnb.capture.importers._formats import RankRows, SiteRow
from mappnb.capture.importers._tracejson import MISSING, TraceText
from mappnb.errors import LayoutError
from mappnb.layout import Layout
from mappnb.terms import Category, Phase

__all__ = ["own_layout", "own_ranks", "put_back"]

Array = np.ndarray[Any, Any]
_INCARNATION = 1_000_000
_SITE_TEXTS = ("category", "op", "name", "phase", "dtype")
_NUMBERS = tuple(n for n in OWN_COLUMNS if n not in (*_SITE_TEXTS, "group", "layer"))


def _other(trace: TraceText) -> Mapping[str, Any]:
    try:
        found = json.loads(trace.metadata.get("otherData", "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def own_ranks(rows: ChromeRows, trace: TraceText) -> dict[int, int]:
    """Return pid -> rank for a file of our export, ``{}`` for any other. Incarnations of a rank are several processes."""
    if _other(trace).get("exporter") != "mappnb" or "pid" not in rows.columns:
        return {}
    return {p: p % _INCARNATION for p in np.unique(rows.columns["pid"]).tolist() if 0 <= p < 1 << 40}


def own_layout(trace: TraceText) -> Layout | None:
    """Return the layout that an export told, None if it did not."""
    told = _other(trace).get("layout")
    try:
        return Layout.from_dict(told) if isinstance(told, dict) else None
    except LayoutError:
        return None


def put_back(out: RankRows, rows: ChromeRows, trace: TraceText, table: SpanTable, mine: Array) -> None:
    """Give the spans ``mine`` of ``out`` what the args of our export tell; spans that have no such args stay as they are."""
    begin = table.begin[mine]
    own = rows.own
    if not len(own.row) or not len(begin):
        return
    at = np.minimum(np.searchsorted(own.row, begin), len(own.row) - 1)
    words = np.array([n in set(map(str, Category)) for n in trace.names], bool)
    category = np.where(own.columns["category"][at] >= 0, own.columns["category"][at], rows.columns["cat"][begin])
    span = np.flatnonzero((own.row[at] == begin) & (category >= 0) & words[np.maximum(category, 0)])
    if not len(span):
        return
    told = {n: own.columns[n][at[span]] for n in OWN_COLUMNS} | {"category": category[span]}
    _put_sites(out, span, told, rows.columns["name"][begin[span]], trace.names)
    for name in _NUMBERS:
        given = told[name] != MISSING
        if given.any():
            column = out.columns.get(name, np.full(len(mine), 0 if name == "flags" else -1, np.int64)).astype(np.int64)
            column[span[given]] = told[name][given]
            out.columns[name] = column
    out.columns["group"] = np.full(len(mine), -1, np.int64)
    out.columns["group"][span] = [_number(trace.names[g]) if g >= 0 else -1 for g in told["group"].tolist()]
    groups = _other(trace).get("groups")
    if isinstance(groups, dict):
        inside = {k: g for k, g in groups.items() if isinstance(g, dict) and out.rank in g.get("ranks", ())}
        out.facts["groups"] = inside


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 20 and int(text) < 1 << 63 else -1


def _put_sites(out: RankRows, span: Array, told: Mapping[str, Array], label: Array, names: list[str]) -> None:
    """Replace the sites of spans by those that were exported."""
    name = np.where(told["name"] >= 0, told["name"], label)  # an own name only where it is not the label
    layer = np.where(told["layer"] == MISSING, -1, told["layer"])
    keys = np.stack([told["category"], told["op"], name, told["phase"], layer, told["dtype"]], axis=1).astype(np.int64)
    found, number = np.unique(keys, axis=0, return_inverse=True)
    sites: dict[SiteRow, int] = {s: i for i, s in enumerate(out.sites)}
    mine = []
    for c, o, n, p, one, d in found.tolist():
        texts = [names[i] if i >= 0 else "" for i in (c, o, n, p, d)]
        row: SiteRow = (texts[0], texts[1], texts[2], texts[3] or str(Phase.NONE), one, texts[4])
        mine.append(sites.setdefault(row, len(sites)))
    out.columns["site"][span] = np.array(mine, np.int32)[number.reshape(-1)]
    out.sites = list(sites)
