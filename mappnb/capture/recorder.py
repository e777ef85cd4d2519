"""The recorder that the rest of mappnb uses: a native or pure-Python core, and the table of its sites."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from mappnb.capture._pyrecorder import PyRecorder
from mappnb.capture._record import (
    DEFAULT_CAPACITY,
    RECORD_DTYPE,
    BeginCall,
    ContextCall,
    EndCall,
    MakeCore,
    RecordCall,
    RecorderCore,
    SpanLike,
    thread_name,
)

__all__ = ["MAX_SITES", "RECORD_DTYPE", "TOO_MANY_NAMES", "Recorder", "Site"]

MAX_SITES: Final = 100_000
"""Distinct sites kept; beyond it a new name shares the site ``TOO_MANY_NAMES`` of its category and op."""

TOO_MANY_NAMES: Final = "<too many names>"
"""Name of the sites that stand for all names beyond ``MAX_SITES``."""

_MAX_SHARED_SITES: Final = 1_000


class Site(NamedTuple):
    """Static description of an event: all that is the same each time it happens."""

    category: str
    op: str
    name: str = ""
    phase: str = "none"
    layer: int = -1
    dtype: str = ""


class Recorder:
    """Records what a training process does, as cheaply as it can be done from Python.

    Parameters
    ----------
    capacity
        Finished records that each thread keeps between two drains; beyond it the oldest are dropped and counted.
    cpu_time
        Measure the thread's CPU time of each span too (``cpu_ns``; costs several hundred ns).
    pure_python
        Use the twin in pure Python; by default only if the environment says ``MAPPNB_PURE_PYTHON=1``.

    Attributes
    ----------
    begin : ``begin(site) -> token``
        Open a span in this thread.
    end : ``end(token=0, bytes=-1, group=-1, seq=-1, peer=-1, flags=0)``
        Close the span of ``token`` (0: the innermost of this thread) and record it. Spans still open inside it are
        closed too, flagged ``Flag.REPAIRED``; an unknown token is counted as mismatched and ignored.
    record : ``record(site, start_ns, duration_ns, ...)``
        Add a finished event that was measured elsewhere.
    set_context : ``set_context(step=None, stage=None, chunk=None, microbatch=None)``
        Set what is stamped on events begun from now on, in every thread; ``None`` keeps the value.
    context : ``context() -> (step, stage, chunk, microbatch)``
        As set now; -1 = not applicable.
    now_ns : ``now_ns() -> int``
        ``CLOCK_MONOTONIC`` in ns, the clock of ``start_ns``.

    Notes
    -----
    Calls of one thread never wait for another. These attributes are the core's own, bound once, so that no Python
    frame is added. A fork leaves the child's recorder off and empty.
    """

    begin: BeginCall
    end: EndCall
    record: RecordCall
    set_context: ContextCall
    context: Callable[[], tuple[int, int, int, int]]
    now_ns: Callable[[], int]

    def __init__(
        self, capacity: int = DEFAULT_CAPACITY, *, cpu_time: bool = False, pure_python: bool | None = None
    ) -> None:
        if pure_python is None:
            pure_python = os.environ.get("MAPPNB_PURE_PYTHON", "0") not in ("", "0")
        self._core = _make_core(pure_python)(capacity, cpu_time, thread_name)
        self.begin = self._core.begin
        self.end = self._core.end
        self.record = self._core.record
        self.set_context = self._core.set_context
        self.context = self._core.context
        self.now_ns = self._core.now_ns
        self._site_ids: dict[tuple[str, str, str, str, int, str], int] = {}
        self._sites: list[Site] = []
        self._num_kept = 0
        self._num_nameless = 0
        self._site_lock = threading.Lock()
        _RECORDERS.add(self)

    @property
    def native(self) -> bool:
        """Whether the core is the compiled one."""
        return not isinstance(self._core, PyRecorder)

    @property
    def enabled(self) -> bool:
        """Whether events are recorded; may be set at any time, from any thread."""
        return self._core.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._core.enabled = value

    @property
    def sites(self) -> list[Site]:
        """All sites so far; their index is the ``site`` of a record. A copy."""
        return self._sites[:]

    def describe(self, site: int) -> Site:
        """Return the description of one site id."""
        return self._sites[site]

    def sites_since(self, start: int) -> list[Site]:
        """Sites from index ``start`` on, for a writer that has stored the earlier ones."""
        return self._sites[start:]

    def site(
        self, *, category: str, op: str, name: str = "", phase: str = "none", layer: int = -1, dtype: str = ""
    ) -> int:
        """Id of this static description; the same for equal descriptions, in every thread.

        Returns
        -------
        int
            Index into :attr:`sites`. Beyond ``MAX_SITES`` that of the shared site of its category and op.
        """
        found = self._site_ids.get((category, op, name, phase, layer, dtype))
        if found is not None:
            return found
        site = Site(str(category), str(op), str(name), str(phase), int(layer), str(dtype))
        with self._site_lock:
            if site not in self._site_ids and self._num_kept >= MAX_SITES:
                return self._shared_site(site)
            return self._intern(site)

    def span(
        self, *, category: str, op: str, name: str = "", phase: str = "none", layer: int = -1, dtype: str = ""
    ) -> SpanLike:
        """``with`` target that records the enclosed code; make it once, use it often, nested or in any thread."""
        return self._core.span(self.site(category=category, op=op, name=name, phase=phase, layer=layer, dtype=dtype))

    def span_of(self, site: int) -> SpanLike:
        """``with`` target for the id that :meth:`site` gave."""
        return self._core.span(site)

    def drain(self) -> NDArray[np.void]:
        """Take the finished records of all threads.

        Returns
        -------
        numpy array of RECORD_DTYPE, dims (event,)
            By thread, then in the order in which they ended.
        """
        return self._core.drain()

    def open_spans(self) -> NDArray[np.void]:
        """Look at the spans that are open now, from any thread: a stuck step can be read from outside.

        Returns
        -------
        numpy array of RECORD_DTYPE, dims (event,)
            Flagged ``Flag.OPEN``; ``duration_ns`` is how long each has been open. By thread, outermost first.
        """
        return self._core.open_spans()

    def threads(self) -> list[tuple[int, int, str]]:
        """Every thread that recorded: index (the ``thread`` of records), native thread id, Python name or ''."""
        return self._core.threads()

    def stats(self) -> dict[str, int]:
        """Count since the start what was recorded, and every way in which something was not.

        Returns
        -------
        dict
            ``recorded`` records written; ``dropped`` of these overwritten before a drain; ``mismatched`` ends without a
            begin and spans left open by a thread that ended; ``too_deep`` spans beyond the depth limit; ``threads``;
            ``sites``; ``nameless`` calls of :meth:`site` that got a shared site.
        """
        return {**self._core.counters(), "sites": len(self._sites), "nameless": self._num_nameless}

    def _intern(self, site: Site) -> int:
        """Id of ``site``, made if need be; the caller holds the lock."""
        found = self._site_ids.get(site)
        if found is None:
            found = len(self._sites)
            self._sites.append(site)
            self._site_ids[site] = found
            self._num_kept += 1
        return found

    def _shared_site(self, site: Site) -> int:
        """Id of the site that stands for all further names of a category and op; the caller holds the lock."""
        self._num_nameless += 1
        shared = Site(site.category, site.op, TOO_MANY_NAMES)
        if shared not in self._site_ids and len(self._sites) >= MAX_SITES + _MAX_SHARED_SITES:
            shared = Site("host", TOO_MANY_NAMES, TOO_MANY_NAMES)
        return self._intern(shared)


_RECORDERS: weakref.WeakSet[Recorder] = weakref.WeakSet()
_FORKING: dict[int, list[RecorderCore]] = {}


def _make_core(pure_python: bool) -> MakeCore:
    """Class of the core: native unless the twin is asked for."""
    if pure_python:
        return PyRecorder
    from mappnb import _core

    return cast(MakeCore, _core.Recorder)


def _before_fork() -> None:
    cores = sorted((recorder._core for recorder in list(_RECORDERS)), key=id)  # one order: two forks cannot deadlock
    _FORKING[threading.get_ident()] = cores
    for core in cores:
        core.before_fork()


def _after_fork_in_parent() -> None:
    for core in _FORKING.pop(threading.get_ident(), []):
        core.after_fork_in_parent()


def _after_fork_in_child() -> None:
    for core in _FORKING.pop(threading.get_ident(), []):
        core.after_fork_in_child()
    _FORKING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
