"""Communication in a Kineto trace: operation, group, sequence number, peer and bytes of each call."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.capture._groups import group_id
from mappnb.capture.importers._formats import RankRows, SiteRow, places_among
from mappnb.capture.importers._gather import Few
from mappnb.capture.importers._names import collective_op, plain_dtype
from mappnb.capture.importers._tracejson import MISSING
from mappnb.terms import P2P_OPS, Category, Op

__all__ = ["CallIds", "Communication"]

Array = np.ndarray[Any, Any]


@dataclass
class CallIds:
    """The numbers of calls by group and ``Comms Id``, which is the same on all ranks of a call even where their ``Seq`` differs.

    Attributes
    ----------
    numbers : dict of int to dict of str to int
        Group -> Comms Id -> number of the call: the ``Seq`` of the rank that was read first, or the next that is free.
    """

    numbers: dict[int, dict[str, int]] = field(default_factory=dict)
    _used: dict[int, set[int]] = field(default_factory=dict)

    def of(self, group: int, ids: list[str], told: list[int]) -> list[int]:
        """Return the numbers of a rank's calls in a group, in order of issue."""
        known, used = self.numbers.setdefault(group, {}), self._used.setdefault(group, set())
        for call, number in zip(ids, told, strict=True):
            if call not in known:
                free = number if number >= 0 and number not in used else max(used, default=-1) + 1
                known[call] = free
                used.add(free)
        return [known[call] for call in ids]


class Communication:
    """Fills bytes, group, seq and peer, and makes the sites of calls precise.

    Parameters
    ----------
    few : Few
        The args of calls and copies.
    names : list of str
        The texts of the trace.
    info : dict
        ``distributedInfo``.
    world : int
        Number of ranks of the job.
    sites : dict of SiteRow to int
        Sites so far; grows.
    ids : CallIds
        Of all ranks.
    """

    def __init__(
        self,
        few: Few,
        names: list[str],
        info: dict[str, Any],
        world: int,
        sites: dict[SiteRow, int],
        ids: CallIds,
    ) -> None:
        self.few, self.names, self.info, self.world, self.sites, self.ids = few, names, info, world, sites, ids
        config = info.get("pg_config")
        self.config = {
            str(p.get("pg_name")): p for p in (config if isinstance(config, list) else []) if isinstance(p, dict)
        }
        self.backend = str(info.get("backend", "nccl"))
        self.groups: dict[tuple[str, str, str], int] = {}
        self.facts: dict[str, Any] = {}
        self.calls = np.zeros(0, np.int64)
        self.values: dict[str, Array] = {}
        self.assumed = 0

    def fill(self, out: RankRows, annotated: Array, launch: Array) -> None:
        """Fill the columns of ``out``.

        Parameters
        ----------
        out : RankRows
            With its columns but these.
        annotated : array of int
            Rows of the host's annotations that name a collective.
        launch : array of int, dims (event,)
            Row of the launch of device work, -1 for none.
        """
        rows = list(self.sites)
        moves = np.array([s[0] in (Category.COLLECTIVE, Category.P2P) for s in rows], bool)
        calls = np.flatnonzero(moves[out.columns["site"]])
        self.calls, n = calls, len(calls)
        self.values = {name: np.full(n, -1, np.int64) for name in ("group", "seq", "peer", "bytes")}
        self._bytes(out)
        if not n:
            return
        sites, around = out.columns["site"][calls], self._around(out, calls, annotated, launch[calls])
        noted = np.where(around >= 0, out.columns["site"][around], -1)
        row = places_among(self.few.row, calls)  # of the few events that have args
        for alike in self._alike(row, sites, noted):  # in order of their first
            i = alike[0]
            args = self._args(int(row[i])) if row[i] >= 0 else {}
            self._some(out, alike, args, rows[sites[i]], rows[noted[i]][2] if noted[i] >= 0 else "")
        self._number(out, self._column("Seq", row), self._column("Comms Id", row))
        out.few |= {name: (calls, self.values[name]) for name in ("group", "seq", "peer")}
        self._bytes(out)
        out.facts["groups"] = self.facts
        if self.assumed:
            out.notes.append(
                f"collectives that name no process group ({self.assumed} on a rank) are taken as calls of all {self.world} ranks"
            )

    def _bytes(self, out: RankRows) -> None:
        """Put down the bytes of copies, as their args tell, and of calls."""
        sizes = self.few.columns.get("bytes", np.zeros(0, np.int64))
        told = np.flatnonzero(sizes != MISSING)
        rows = np.concatenate([self.few.row[told], self.calls])
        values = np.concatenate([sizes[told], self.values["bytes"]])
        good = values >= 0
        rows, last = np.unique(rows[good][::-1], return_index=True)  # what a call tells counts more
        out.few["bytes"] = (rows, values[good][::-1][last])

    def _args(self, j: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, column in self.few.columns.items():
            value = int(column[j])
            if column.dtype == np.int64:
                out |= {name: value} if value != MISSING else {}
            elif value >= 0:
                out[name] = self.names[value]
        return out

    def _column(self, name: str, row: Array) -> Array:
        """Return what an arg tells of each call, -1 for nothing."""
        if not len(self.few.row):
            return np.full(len(row), -1, np.int64)
        column = self.few.columns[name][row].astype(np.int64)
        return np.where((row < 0) | (column == MISSING), -1, column)

    def _alike(self, row: Array, *beside: Array) -> list[Array]:
        """Return the calls of which all but the number is the same, in order of their first."""
        columns = [*beside, row >= 0]
        for name, column in self.few.columns.items() if len(self.few.row) else ():
            if name not in ("Seq", "Comms Id"):
                columns.append(np.where(row >= 0, column[row], 0))
        unnamed = [k for k, text in enumerate(self.names) if not text]
        comms = self._column("Comms Id", row)  # tells the group where no name does
        columns.append(np.where(np.isin(self._column("Process Group Name", row), [-1, *unnamed]), comms, -1))
        code = np.zeros(len(row), np.int64)
        for column in columns:
            if (column != column[0]).any():
                number = np.unique(column, return_inverse=True)[1]
                code = np.unique(code * (number.max() + 1) + number, return_inverse=True)[1]
        order = np.argsort(code, kind="stable")
        parts: list[Array] = np.split(order, np.flatnonzero(np.diff(code[order])) + 1)
        return sorted(parts, key=lambda part: int(part[0]))

    def _around(self, out: RankRows, calls: Array, notes: Array, begun: Array) -> Array:
        """Return the row of the annotation around each call's launch, -1 for none."""
        found = np.full(len(calls), -1, np.int64)
        start, length, lane = out.columns["start_ns"], out.columns["duration_ns"], out.columns["thread"]
        for thread in np.unique(lane[notes]).tolist():
            mine = notes[lane[notes] == thread]
            mine = mine[np.argsort(start[mine], kind="stable")]
            here = np.flatnonzero((begun >= 0) & (lane[np.maximum(begun, 0)] == thread))
            time = start[begun[here]]
            at = np.searchsorted(start[mine], time, "right") - 1
            inside = (at >= 0) & (time <= (start[mine] + length[mine])[np.maximum(at, 0)])
            found[here[inside]] = mine[at[inside]]
        return found

    def _some(self, out: RankRows, alike: Array, args: dict[str, Any], site: SiteRow, annotation: str) -> None:
        """Put down some calls that are alike."""
        category, op, name, phase, layer, _ = site
        told = collective_op(str(args.get("Collective name", "")))
        if not told and not op:
            told = collective_op(annotation)
        op = told or op or "send_recv"
        category = str(Category.P2P if op in P2P_OPS or op == "send_recv" else Category.COLLECTIVE)
        dtype, size = plain_dtype(str(args["dtype"])) if "dtype" in args else ("", 0)
        new = (category, op, name, phase, layer, dtype)
        out.columns["site"][self.calls[alike]] = self.sites.setdefault(new, len(self.sites))
        elements = max(args.get("In msg nelems", 0), args.get("Out msg nelems", 0) if op == Op.RECV else 0)
        if size and 0 < elements < 1 << 50:
            self.values["bytes"][alike] = elements * size
        ranks, group = self._group(args, category == Category.COLLECTIVE, len(alike))
        self.values["group"][alike] = group
        if category == Category.P2P:
            other = args.get("Dst Rank" if op == Op.SEND else "Src Rank", -1)
            self.values["peer"][alike] = other if 0 <= other < max(self.world, 1) else -1
        elif op in (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER):
            root = args.get("Src Rank", -1)
            self.values["peer"][alike] = root if root in ranks else -1

    def _group(self, args: dict[str, Any], collective: bool, num_calls: int) -> tuple[tuple[int, ...], int]:
        name, text = str(args.get("Process Group Name", "")), str(args.get("Process Group Ranks", ""))
        comms = str(args.get("Comms Id", ""))
        key = (name, text, "" if name else comms)
        if not any(key) and (not collective or self.world < 2 or len(self.config) > 1):
            return (), -1
        if not any(key):
            self.assumed += num_calls
        ranks = self._ranks(name, text, args.get("Group size", self.world if not any(key) else -1))
        if key not in self.groups:
            self.groups[key] = group_id(ranks, f"{self.backend}|{name or key[2]}", 0)
            if ranks:
                config = self.config.get(name, {})
                self.facts[str(self.groups[key])] = {
                    "ranks": list(ranks),
                    "backend": str(config.get("backend_config", self.backend)),
                    "desc": str(args.get("Process Group Description", config.get("pg_desc", ""))),
                    "name": name,
                    "ordinal": 0,
                }
        return ranks, self.groups[key]

    def _ranks(self, name: str, text: str, size: int) -> tuple[int, ...]:
        """Return the members: from the event, else from the list of groups, else all ranks if there are as many; else ()."""
        for given in (text, self.config.get(name, {}).get("ranks")):
            members = _listed(given)
            if members:
                return members
        return tuple(range(self.world)) if size == self.world else ()

    def _number(self, out: RankRows, told: Array, comms: Array) -> None:
        """Give calls their numbers: by their Comms Id or their Seq where all of a group have one, else in the order of issue."""
        issue, start = out.columns["issue_ns"][self.calls], out.columns["start_ns"][self.calls]
        site, group, peer = out.columns["site"][self.calls], self.values["group"], self.values["peer"]
        ops = [op for _, op, *_ in self.sites]
        send, p2p, unclear = (
            np.array([op in some for op in ops], bool)[site] for some in ((Op.SEND,), P2P_OPS, ("send_recv",))
        )
        source = np.where(p2p, np.where(send, out.rank, peer), -1)
        target = np.where(p2p, np.where(send, peer, out.rank), -1)
        order = np.argsort(np.where(issue >= 0, issue, start), kind="stable")
        order = order[((group >= 0) & ~(p2p & (peer < 0)) & ~unclear)[order]]
        order = order[np.lexsort((target[order], source[order], group[order]))]
        change = np.any([np.diff(x[order]) != 0 for x in (group, source, target)], axis=0)
        for queue in np.split(order, np.flatnonzero(change) + 1) if len(order) else ():
            own, known = told[queue], np.unique(comms[queue])
            ids = [self.names[k] for k in comms[queue].tolist()] if known[0] >= 0 and len(known) == len(queue) else []
            if not p2p[queue[0]] and all(ids) and len(set(ids)) == len(queue):
                self.values["seq"][queue] = self.ids.of(int(group[queue[0]]), ids, own.tolist())
                continue
            usable = not p2p[queue[0]] and (own >= 0).all() and len(np.unique(own)) == len(own)
            self.values["seq"][queue] = own if usable else np.arange(len(queue))


def _listed(given: object) -> tuple[int, ...]:
    """Return the members of a list of ranks, or of its text; () if it is none, as one that Kineto cut: "[0, 1, ..., 63]"."""
    if isinstance(given, str):
        try:
            return _listed(json.loads(given)) if given.startswith("[") else ()
        except (ValueError, RecursionError):
            return ()
    good = isinstance(given, list) and all(isinstance(r, int) and 0 <= r < 1 << 24 for r in given)
    return tuple(given) if good and isinstance(given, list) else ()
