"""A session that keeps everything in memory, for the tests of the probes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mappnb.capture.points import Plan, Probe, parse_plan
from mappnb.capture.recorder import RECORD_DTYPE, Recorder
from mappnb.capture.steps import Deferred, Pending
from mappnb.layout import Layout

__all__ = ["FakeSession"]


class FakeSession:
    """Implements ``SessionLike``; errors of ours are collected in ``failures`` instead of logged."""

    def __init__(self, plan: str | Plan = "default", *, pure_python: bool = True) -> None:
        self.plan = parse_plan(plan)
        self.recorder = Recorder(pure_python=pure_python)
        self.meta: dict[str, Any] = {}
        self.failures: list[tuple[str, BaseException]] = []
        self.values: list[tuple[int, dict[str, Any]]] = []
        self.metrics: list[dict[str, Any]] = []
        self.groups: dict[int, dict[str, Any]] = {}
        self.model: dict[str, Any] = {}
        self.layout: Layout | None = None
        self.coords: dict[str, int] = {}
        self.rank = (-1, -1)
        self.deferred: list[Any] = []
        self.steps: list[int] = []
        self._step = -1
        self._token = 0
        self._site = self.recorder.site(category="mark", op="iteration")
        self._probes: list[Probe] = []

    def begin_step(self, step: int | None = None) -> None:
        if self._token:
            return
        self._step = self._step + 1 if step is None else step
        self.steps.append(self._step)
        self.recorder.set_context(step=self._step, microbatch=-1)
        self._token = self.recorder.begin(self._site)

    def end_step(self) -> None:
        if self._token:
            self.recorder.end(self._token)
            self._token = 0

    def step_values(self, **values: Any) -> None:
        self.values.append((self._step, values))

    def metric(
        self, name: str, value: Any, *, microbatch: int = -1, chunk: int = -1, layer: int = -1, index: int = 0
    ) -> None:
        self.metrics.append(
            {
                "name": name,
                "value": Pending(value).values() if isinstance(value, Deferred) else value,
                "microbatch": microbatch,
                "chunk": chunk,
                "layer": layer,
                "index": index,
                "step": self._step,
            }
        )

    def set_layout(self, layout: Layout, coords: dict[str, int]) -> None:
        self.layout, self.coords = layout, coords

    def add_group(self, group_id: int, *, ranks: list[int], backend: str, desc: str, name: str, ordinal: int) -> None:
        self.groups[group_id] = {"ranks": ranks, "backend": backend, "desc": desc, "name": name, "ordinal": ordinal}

    def set_model(self, **info: Any) -> None:
        self.model.update(info)

    def note(self, **facts: Any) -> None:
        self.meta.update(facts)

    def folder(self, name: str) -> str | None:
        return None

    def set_rank(self, rank: int, world_size: int) -> None:
        self.rank = (rank, world_size)

    def fail(self, where: str, err: BaseException) -> None:
        self.failures.append((where, err))
        self.recorder.enabled = False
        self.meta["degraded"] = f"{where}: {err!r}"

    def defer(self, fn: Any) -> None:
        self.deferred.append(fn)

    def start(self, *probes: Probe) -> FakeSession:
        """Install probes."""
        self._probes = list(probes)
        for probe in probes:
            probe.install(self)
        return self

    def stop(self) -> None:
        """Uninstall them, the last first."""
        for probe in reversed(self._probes):
            probe.uninstall()
        self.end_step()

    def events(self) -> list[dict[str, Any]]:
        """All events so far, as dictionaries with their site's fields, in the order of their start."""
        sites = self.recorder.sites
        rows = []
        for record in self.recorder.drain():
            row = {key: int(record[key]) for key in RECORD_DTYPE.names or ()}
            row.update(sites[row.pop("site")]._asdict())
            rows.append(row)
        return sorted(rows, key=lambda row: (row["start_ns"], -row["duration_ns"], row["depth"]))

    def step_sums(self) -> dict[int, dict[str, float]]:
        """Step values: the last given, tokens and microbatches summed."""
        sums: dict[int, dict[str, float]] = defaultdict(dict)
        for step, values in self.values:
            for key, value in values.items():
                total = sums[step].get(key, 0.0) if key in ("tokens", "microbatches") else 0.0
                sums[step][key] = total + float(value)
        return dict(sums)
