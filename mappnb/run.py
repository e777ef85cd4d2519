"""Run and attach(): lazy handles on the datasets of one run. Draws nothing; views come from a registry."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import xarray as xr

from mappnb import datasets
from mappnb.clockmodel import ClockModel, anchor_model, shared_clocks
from mappnb.devices import peak_flops_of
from mappnb.display import run_html, run_text
from mappnb.errors import MappnbError, did_you_mean
from mappnb.layout import Layout
from mappnb.store import Incarnation, Store
from mappnb.tables import TableReader, step_range
from mappnb.terms import Category

__all__ = ["Run", "attach"]

VIEWS_GROUP = "mappnb.views"
FOLLOW_S, LIVE_S = 1.0, 5.0
_T = TypeVar("_T")


def attach(run_dir: str | os.PathLike[str], *, follow: bool = False) -> Run:
    """Open a run directory, while the job writes or afterwards.

    Parameters
    ----------
    run_dir : path or URL
        The folder given to :func:`mappnb.record`; anything that fsspec opens.
    follow : bool
        Look for new data by itself at each access, at most once a second. Otherwise call :meth:`Run.refresh`.

    Returns
    -------
    Run
        Handles only: the folders are listed, the ranks' files are read at the first need of one. Reading never writes.

    Raises
    ------
    NotARunError
        If the folder is missing, empty, no run, or holds several; the message names the cure.
    FormatVersionError
        If a newer mappnb wrote it.
    """
    return Run(run_dir, follow=follow)


class Run:
    """One recorded run: datasets, selections and views. Made by :func:`attach`."""

    def __init__(self, run_dir: str | os.PathLike[str], *, follow: bool = False) -> None:
        self.store = Store(run_dir)
        self.follow = follow
        self._lock = threading.RLock()
        self._readers: dict[str, TableReader] = {}
        self._datasets: dict[str, Any] = {}
        self._looked_s = 0.0
        self._chosen: ClockModel | None = None
        self._look()

    # ------------------------------------------------------------------------------------------- what is there
    def _look(self) -> None:
        self._incarnations = self.store.incarnations()
        self.__dict__.pop("_clock", None)
        self._datasets = {}
        self._attributes: dict[str, Any] | None = None
        self._looked_s = time.monotonic()

    @cached_property
    def _clock(self) -> ClockModel:
        return self._chosen or anchor_model(self._incarnations, int(self.store.info["created_wall_ns"]))

    def refresh(self) -> Run:
        """Look again at what is on disk; returns the run itself. Closed segments are not read twice."""
        with self._lock:
            self._look()
            numbers = [i.number for i in self._incarnations]
            for reader in self._readers.values():
                reader.refresh(numbers)
        return self

    def _current(self) -> None:
        if self.follow and time.monotonic() - self._looked_s > FOLLOW_S:
            self.refresh()

    def _reader(self, table: str) -> TableReader:
        with self._lock:
            self._current()
            if table not in self._readers:
                self._readers[table] = TableReader(self.store, table, [i.number for i in self._incarnations])
            return self._readers[table]

    @property
    def path(self) -> str:
        """The run directory."""
        return str(self.store.root)

    @property
    def incarnations(self) -> tuple[Incarnation, ...]:
        """Restarts of the job, the oldest first."""
        self._current()
        return tuple(self._incarnations)

    @property
    def layout(self) -> Layout:
        """Parallel layout of the newest incarnation; plain data parallelism where no rank has told yet."""
        for incarnation in reversed(self._incarnations):
            for info in incarnation.ranks.values():
                if info.get("layout"):
                    return Layout.from_dict(info["layout"])
        return Layout(dp=max(1, self._incarnations[-1].world_size if self._incarnations else 1))

    @property
    def groups(self) -> dict[int, dict[str, Any]]:
        """Process groups: id -> global ranks, backend, description."""
        return {
            int(gid): group
            for incarnation in self._incarnations
            for info in incarnation.ranks.values()
            for gid, group in (info.get("groups") or {}).items()
        }

    @property
    def ranks(self) -> pd.DataFrame:
        """One row per (incarnation, rank): host, device, coordinates, state, and what was lost."""
        rows = []
        for inc in self.incarnations:
            for rank, info in sorted(inc.ranks.items()):
                ended = info.get("ended") or {}
                rows.append(
                    {
                        "incarnation": inc.number,
                        "rank": rank,
                        "host": info.get("host", ""),
                        "device": info.get("device", ""),
                        **{f"{k}_rank": v for k, v in (info.get("coords") or {}).items()},
                        "ended": ended.get("reason", ""),
                        "degraded": info.get("degraded") or "",
                        "dropped": int(info.get("dropped", 0)),
                    }
                )
        return pd.DataFrame(rows).set_index(["incarnation", "rank"]) if rows else pd.DataFrame()

    @property
    def meta(self) -> dict[str, Any]:
        """What is known of the run as a whole, as a small dictionary.

        ``degraded`` maps ranks whose recorder turned itself off to the reason, ``degraded_activations`` those that captured no more
        activations; ``missing_ranks`` left no file; ``problems`` maps files that could not be read to the reason.
        """
        self._current()
        last = self._incarnations[-1] if self._incarnations else None
        infos: Mapping[int, dict[str, Any]] = last.ranks if last else {}
        first = infos[min(infos)] if infos else {}
        return {
            "run_id": self.store.info["run_id"],
            "format_version": self.store.info["format_version"],
            "created": pd.Timestamp(int(self.store.info["created_wall_ns"]), unit="ns", tz="UTC"),
            "world_size": last.world_size if last else 0,
            "num_incarnations": len(self._incarnations),
            "plan": first.get("plan", ""),
            "hosts": sorted({str(i.get("host", "")) for i in infos.values()}),
            "versions": first.get("versions", {}),
            "model": self._models().get(last.number, {}) if last else {},
            "state": self._state(last),
            **{k: {r: i[k] for r, i in infos.items() if i.get(k)} for k in ("degraded", "degraded_activations")},
            "dropped": sum(int(i.get("dropped", 0)) for i in infos.values()),
            "missing_ranks": last.missing_ranks if last else [],
            "missing_points": sorted({p for i in infos.values() for p in i.get("missing_points", [])}),
            "clock_model": self._clock.name,
            "problems": dict(self.store.problems),
        }

    def _state(self, last: Incarnation | None) -> str:
        """Return "recording", "ended" or "stopped" (no end was written and nothing comes any more)."""
        if last is None:
            return "recording"
        if last.ranks and not last.missing_ranks and all(i.get("ended") for i in last.ranks.values()):
            return "ended"
        return "recording" if time.time() - self.last_seen_s < LIVE_S else "stopped"

    @property
    def last_seen_s(self) -> float:
        """Time of the last change of the newest incarnation's live files, in seconds since 1970."""
        if not self._incarnations or not self.store.local:
            return 0.0
        newest = self._incarnations[-1].number
        paths = [s.path for t in ("events", "telemetry") for s in self.store.segments(t, newest)]
        paths.append(os.path.join(self.path, f"inc={newest:03d}", "ranks"))
        times = [os.stat(p).st_mtime for p in paths if os.path.exists(p)]
        return max(times, default=0.0)

    def _models(self) -> dict[int, dict[str, Any]]:
        out: dict[int, dict[str, Any]] = {}
        for incarnation in self._incarnations:
            merged: dict[str, Any] = {}
            for info in incarnation.ranks.values():
                merged.update({k: v for k, v in (info.get("model") or {}).items() if v is not None})
                if peak := info.get("peak_flops") or peak_flops_of(str(info.get("device", ""))):
                    merged["peak_flops"] = peak
            out[incarnation.number] = merged
        return out

    def _attrs(self) -> dict[str, Any]:
        """Return what every dataset carries; the same until the run is looked at again."""
        if self._attributes is None:
            self._attributes = datasets.dataset_attrs(
                run_id=self.store.info["run_id"],
                layout=self.layout,
                groups=self.groups,
                clock=self._clock,
                shared_clocks={i.number: shared_clocks(i) for i in self._incarnations},
                imported=next((x for i in self._incarnations if (x := i.info.get("launch", {}).get("imported"))), None),
            )
        return self._attributes

    def _dataset(self, name: str, make: Callable[[], _T]) -> _T:
        self._current()
        with self._lock:
            if name not in self._datasets:
                self._datasets[name] = make()
            found: _T = self._datasets[name]
            return found

    # -------------------------------------------------------------------------------------------------- datasets
    @property
    def events(self) -> xr.Dataset:
        """Every event, dims (event,), by rank and segment; a column is read when it is looked at. For a window use :meth:`sel`."""
        return self._dataset("events", lambda: datasets.events_lazy(self._reader("events"), self._clock, self._attrs()))

    @property
    def collectives(self) -> xr.Dataset:
        """Events of collectives and point-to-point transfers, dims (event,), in order of start: one row per member of a call."""
        return self._dataset("collectives", lambda: self.sel(category=(Category.COLLECTIVE, Category.P2P)))

    @property
    def steps(self) -> xr.Dataset:
        """Step table, dims (step, rank): times, loss, grad_norm, lr, tokens, memory; per step ``step_s``, ``tokens_per_s``, ``mfu``."""
        return self._dataset(
            "steps",
            lambda: datasets.steps_dataset(self._reader("steps"), self._clock, self._attrs(), models=self._models()),
        )

    @property
    def telemetry(self) -> xr.Dataset:
        """Clocks, power, temperature, throttling, memory and host load, dims (sample,); NaN where the machine does not tell."""
        return self._dataset(
            "telemetry", lambda: datasets.samples(self._reader("telemetry"), self._clock, self._attrs())
        )

    @property
    def metrics(self) -> xr.Dataset:
        """Per-microbatch and user-registered numbers (tokens, expert_tokens, ...), dims (sample,)."""
        return self._dataset("metrics", lambda: datasets.samples(self._reader("metrics"), self._clock, self._attrs()))

    @property
    def activations(self) -> xr.DataTree:
        """Captured activations, lazy: a child per stream, see :func:`mappnb.activations.open_activations`; empty where none are."""
        from mappnb.activations import tree_of_run  # opening a run needs none of it

        return self._dataset("activations", lambda: tree_of_run(self))

    def sel(
        self,
        *,
        step: int | slice | None = None,
        rank: int | slice | Iterable[int] | None = None,
        category: str | Iterable[str] | None = None,
        op: str | Iterable[str] | None = None,
        time: slice | None = None,
        incarnation: int | None = None,
    ) -> xr.Dataset:
        """Read the events of a window; segments outside it are not touched.

        Parameters
        ----------
        step : int or slice, optional
            One step, or ``slice(first, last)`` with both ends included, as label slices are in xarray.
        rank : int, slice or list of int, optional
            Global ranks.
        category, op : str or list of str, optional
            Words of ``mappnb.terms.Category`` and ``mappnb.terms.Op``.
        time : slice, optional
            ``slice(t0, t1)`` in seconds on the run clock; events that overlap it are taken whole.
        incarnation : int, optional
            One restart of the job; all by default.

        Returns
        -------
        Dataset, dims (event,)
            In memory, in order of start.

        Raises
        ------
        MappnbError
            If a rank, category or incarnation does not exist.
        """
        self._current()
        reader = self._reader("events")
        keys = self._keys(rank, incarnation)
        window = None if time is None else self._raw_window(time)
        columns, inc, ranks = reader.window(
            keys=keys, time_ns=window, steps=step_range(step), sites=self._site_mask(reader, category, op)
        )
        return datasets.events_window(reader, self._clock, self._attrs(), columns, inc, ranks)

    def _keys(self, rank: Any, incarnation: int | None) -> set[tuple[int, int]]:
        known = {(i.number, r) for i in self._incarnations for r in range(i.world_size)}
        if incarnation is not None:
            numbers = sorted({i for i, _ in known})
            if incarnation not in numbers:
                raise MappnbError(f"{self.path}: no incarnation {incarnation}; there are {numbers}")
            known = {k for k in known if k[0] == incarnation}
        if rank is None:
            return known
        if isinstance(rank, slice):
            lo, hi = rank.start or 0, np.inf if rank.stop is None else rank.stop
            return {k for k in known if lo <= k[1] <= hi}
        wanted = {int(r) for r in np.atleast_1d(np.asarray(list(rank) if isinstance(rank, Iterable) else rank))}
        if unknown := sorted(wanted - {r for _, r in known}):
            raise MappnbError(
                f"{self.path}: no rank {unknown[0]}; the run has ranks 0 to {max((r for _, r in known), default=-1)}"
            )
        return {k for k in known if k[1] in wanted}

    def _raw_window(self, window: slice) -> Callable[[tuple[int, int]], tuple[int, int]]:
        lo = -(2**62) if window.start is None else int(window.start * 1e9)
        hi = 2**62 if window.stop is None else int(window.stop * 1e9)
        return lambda key: (self._clock.own_ns(key, lo), self._clock.own_ns(key, hi))

    def _site_mask(self, reader: TableReader, category: Any, op: Any) -> np.ndarray[Any, Any] | None:
        mask = None
        for field, value in (("category", category), ("op", op)):
            if value is None:
                continue
            wanted = {str(v) for v in ([value] if isinstance(value, str) else value)}
            known = (
                {*map(str, Category), *reader.sites.values(field)}
                if field == "category"
                else set(reader.sites.values(field))
            )
            if field == "category" and (unknown := sorted(wanted - known)):
                raise MappnbError(
                    f"no category {unknown[0]!r}; known: {', '.join(map(str, Category))}{did_you_mean(unknown[0], known)}"
                )
            one = reader.sites.where(field, wanted)
            mask = one if mask is None else mask & one
        return mask

    @property
    def clock_model(self) -> ClockModel:
        """What turned the ranks' own clocks into the run clock."""
        return self._clock

    def use_clock(self, model: ClockModel | None) -> Run:
        """Read with another clock model from now on; returns the run itself.

        Parameters
        ----------
        model : ClockModel or None
            As :func:`mappnb.analysis.clock_model` makes it of an alignment (``run.align()`` does both); None: the hosts' anchors again.
            Nothing on disk changes, and datasets that were read before keep their times.
        """
        with self._lock:
            self._chosen = model
            self._look()
        return self

    # ------------------------------------------------------------------------------------------------------ views
    def __getattr__(self, name: str) -> Any:
        """Return a view of the registry (entry-point group ``mappnb.views``) bound to this run."""
        if name.startswith("_"):
            raise AttributeError(name)
        views = {e.name: e for e in entry_points(group=VIEWS_GROUP)}
        if name in views:
            view = views[name].load()
            return lambda **options: view(self, **options)
        raise AttributeError(f"Run has no {name!r}{did_you_mean(name, [*views, *dir(type(self))])}")

    def __dir__(self) -> list[str]:
        """List the views too, for completion."""
        return sorted({*super().__dir__(), *(e.name for e in entry_points(group=VIEWS_GROUP))})

    def __repr__(self) -> str:
        return run_text(self)

    def _repr_html_(self) -> str:
        return run_html(self)
