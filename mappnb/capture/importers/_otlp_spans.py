"""Reads OpenTelemetry spans: OTLP in JSON, and the JSON that the SDK's own exporters print."""

from __future__ import annotations

import calendar
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from mappnb.capture.importers._rows import as_int, as_text

__all__ = ["Resource", "Span", "Spans", "first_int"]

_LATEST_NS: Final = 2**62
_RANK_KEYS: Final = ("nv.dl.rank", "dl.rank", "megatron.rank", "rank")
_WORLD_KEYS: Final = ("nv.dl.world_size", "dl.world_size", "megatron.world_size", "world_size")
_AXES: Final = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert"}

Attributes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """The process that made spans.

    Attributes
    ----------
    source : str
        File that the spans came from.
    host : str
        ``host.name``, or empty.
    pid : int
        ``process.pid``; -1 if missing.
    rank, world_size : int, optional
        Global rank and number of ranks, where told.
    sizes : tuple of (str, int)
        Sizes of the parallel axes, where told.
    """

    source: str
    host: str
    pid: int
    rank: int | None
    world_size: int | None
    sizes: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Span:
    """One span; times in ns of the host's wall clock, ``end_ns`` -1 if it has not ended."""

    name: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    failed: bool
    resource: Resource


@dataclass(slots=True)
class Spans:
    """Everything read so far.

    Attributes
    ----------
    spans : dict
        Spans by (trace, span id): each once.
    num_read : int
        Spans read.
    repairs, skipped : Counter
        What was mended and left out, by kind.
    """

    spans: dict[tuple[str, str], Span] = field(default_factory=dict)
    num_read: int = 0
    repairs: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, value: Any, source: str) -> None:
        """Take the spans of one JSON value."""
        for one in value if isinstance(value, list) else (value,):
            if not isinstance(one, dict):
                self.skipped["values that hold no spans"] += 1
            elif (groups := _any(one, "resourceSpans", "resource_spans")) is not None:
                for group in _dicts(groups):
                    self._group(group, source)
            elif isinstance(one.get("context"), dict) and "start_time" in one:
                self._printed(one, source)
            elif _any(one, "resourceMetrics", "resource_metrics", "resourceLogs", "resource_logs") is not None:
                self.skipped["exports of metrics or logs"] += 1
            else:
                self.skipped["values that hold no spans"] += 1

    def _group(self, group: dict[str, Any], source: str) -> None:
        resource = _resource(_listed(_dict(group.get("resource")).get("attributes")), source)
        scopes = _any(group, "scopeSpans", "scope_spans", "instrumentationLibrarySpans")
        for scope in _dicts(scopes):
            for raw in _dicts(scope.get("spans")):
                status = _dict(raw.get("status")).get("code")
                self._keep(
                    raw,
                    resource,
                    trace=as_text(_any(raw, "traceId", "trace_id")),
                    span_id=as_text(_any(raw, "spanId", "span_id")),
                    parent_id=as_text(_any(raw, "parentSpanId", "parent_span_id")),
                    start_ns=as_int(_any(raw, "startTimeUnixNano", "start_time_unix_nano"), low=1, high=_LATEST_NS),
                    end_ns=as_int(_any(raw, "endTimeUnixNano", "end_time_unix_nano"), low=1, high=_LATEST_NS),
                    attributes=_listed(raw.get("attributes")),
                    failed=status in (2, "2", "STATUS_CODE_ERROR"),
                )

    def _printed(self, raw: dict[str, Any], source: str) -> None:
        """Take a span as the SDK's ``ReadableSpan.to_json`` prints it: ISO times, attributes as a plain object."""
        context = raw["context"]
        self._keep(
            raw,
            _resource(_dict(_dict(raw.get("resource")).get("attributes")), source),
            trace=as_text(context.get("trace_id")).removeprefix("0x"),
            span_id=as_text(context.get("span_id")).removeprefix("0x"),
            parent_id=as_text(raw.get("parent_id")).removeprefix("0x"),
            start_ns=_iso_ns(raw.get("start_time")),
            end_ns=_iso_ns(raw.get("end_time")),
            attributes=_dict(raw.get("attributes")),
            failed=_dict(raw.get("status")).get("status_code") == "ERROR",
        )

    def _keep(
        self,
        raw: dict[str, Any],
        resource: Resource,
        *,
        trace: str,
        span_id: str,
        parent_id: str,
        start_ns: int | None,
        end_ns: int | None,
        attributes: Attributes,
        failed: bool,
    ) -> None:
        self.num_read += 1
        name = as_text(raw.get("name"))
        if not name or start_ns is None:
            self.skipped["spans without a name or a start"] += 1
            return
        if end_ns is not None and end_ns < start_ns:
            self.repairs["end_before_start"] += 1
            end_ns = start_ns
        end = -1 if end_ns is None else end_ns
        span = Span(name, span_id, parent_id, start_ns, end, attributes, failed, resource)
        key = (trace, span_id) if span_id else ("", f"unnamed {self.num_read}")
        if self.spans.setdefault(key, span) is not span:
            self.skipped["spans that are there already"] += 1


def first_int(attributes: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of ``keys`` that is a whole number of at least 0, be it a number or a text; None if none is."""
    return next((n for k in keys if (n := as_int(attributes.get(k), low=0, high=2**31 - 1)) is not None), None)


def _resource(attributes: Attributes, source: str) -> Resource:
    rank = first_int(attributes, *_RANK_KEYS)
    world = first_int(attributes, *_WORLD_KEYS)
    sizes = {a: first_int(attributes, f"dl.{word}_parallel.size") for a, word in _AXES.items()}
    pid = first_int(attributes, "process.pid")
    return Resource(
        source=source,
        host=as_text(attributes.get("host.name")),
        pid=-1 if pid is None else pid,
        rank=rank if rank is not None and rank < 2**20 else None,
        world_size=world if world is not None and world <= 2**20 else None,
        sizes=tuple((a, n) for a, n in sizes.items() if n),
    )


def _listed(value: Any) -> Attributes:
    """Return OTLP's list of {key, value: {intValue: "1"}} as a mapping; nested values are left out."""
    out: Attributes = {}
    for item in _dicts(value):
        for kind, held in _dict(item.get("value")).items():
            if kind in ("stringValue", "string_value", "boolValue", "bool_value", "doubleValue", "double_value"):
                out[as_text(item.get("key"))] = held
            elif kind in ("intValue", "int_value"):
                out[as_text(item.get("key"))] = as_int(held)
    return out


def _iso_ns(value: Any) -> int | None:
    """Return ns since 1970 of ``2026-03-01T12:00:00.123456Z``, exactly; None if it is no such time."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|\+00:00)?", as_text(value))
    if found is None:
        return None
    try:
        whole = calendar.timegm(datetime.fromisoformat(found[1]).timetuple())
    except ValueError:
        return None
    number = whole * 10**9 + int((found[2] or "0").ljust(9, "0"))
    return number if 0 < number < _LATEST_NS else None


def _any(value: dict[str, Any], *keys: str) -> Any:
    return next((value[k] for k in keys if k in value), None)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    return (v for v in value if isinstance(v, dict)) if isinstance(value, list) else iter(())
