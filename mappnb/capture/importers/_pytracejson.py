"""The plain-Python twin of the native trace reader, for valid JSON: what its columns must equal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np

from mappnb.capture.importers._tracejson import EVENT_FIELDS, MISSING, TEXT_KEY, Batch, TraceText

__all__ = ["read_columns"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,16}")
_DTYPES = {"c": np.uint8, "t": np.int64, "k": np.int64, "i": np.int64, "f": np.float64, "s": np.int32}


class _Raw(str):
    """A number or constant as it is written."""


def read_columns(
    text: bytes, *, fields: Iterable[tuple[str, str, str]] = EVENT_FIELDS, shift: int = 3
) -> tuple[Batch, TraceText]:
    """Return all events of a valid document.

    Parameters
    ----------
    text : bytes
        JSON: an object with ``traceEvents``, or a list of events.
    fields : iterable of (str, str, str)
        As for :func:`mappnb.capture.importers._tracejson.read_batches`.
    shift : int
        Decimal places from the trace's time unit to ns.

    Returns
    -------
    dict of str to array
        Columns, dims (event,).
    TraceText
        Names and metadata; no repairs.
    """
    document = json.loads(text, parse_int=_Raw, parse_float=_Raw, parse_constant=_Raw, strict=False)
    whole = isinstance(document, dict)
    events = document.get("traceEvents", []) if whole else document
    trace = TraceText(state="done", num_bytes=len(text))
    if whole:
        trace.metadata = {k: _written(v) for k, v in document.items() if k != "traceEvents"}
    numbers: dict[str, int] = {}
    wanted = [f for f in fields if f[2] not in "ar"]
    kept = [e for e in events if isinstance(e, dict) and _is_event(e)]
    out: Batch = {}
    for where, name, kind in wanted:
        values = [_value(_of(e, where).get(name), kind, shift, numbers) for e in kept]
        out[name if where == "event" else f"args.{name}"] = np.array(values, _DTYPES[kind])
    trace.names, trace.num_rows = list(numbers), len(kept)
    return out, trace


def _is_event(event: dict[str, Any]) -> bool:
    ph = event.get("ph")
    return isinstance(ph, str) and not isinstance(ph, _Raw) and ph != ""


def _of(event: dict[str, Any], where: str) -> dict[str, Any]:
    if where == "event":
        return event
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _value(value: Any, kind: str, shift: int, numbers: dict[str, int]) -> int | float:
    if kind == "s":
        if value is None:
            return -1
        text = value if isinstance(value, str) else _written(value)
        return numbers.setdefault(_sound(text), len(numbers))
    if kind == "c":
        good = isinstance(value, str) and not isinstance(value, _Raw) and value != ""
        return _sound(value).encode()[0] if good else 0
    if kind == "f":
        return _real(value)
    number = _whole(value, kind, shift)
    if number is None and kind == "k" and isinstance(value, str) and not isinstance(value, _Raw):
        if _HEX.fullmatch(value):
            number = int(value, 16)
            return number - (1 << 64) if number >= 1 << 63 else number
        return TEXT_KEY + numbers.setdefault(_sound(value), len(numbers))
    return MISSING if number is None or number == "far" else int(number)


def _whole(value: Any, kind: str, shift: int) -> int | str | None:
    """Return an integer, "far" beyond 64 bits, None if the value is no number."""
    if isinstance(value, bool):
        return int(value) if kind == "i" else None
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip(" \n\t\r")):
        return None
    with localcontext() as context:
        context.prec = 400
        number = Decimal(value.strip(" \n\t\r"))
        if number and number.adjusted() > 40:
            return "far"
        number = number.scaleb(shift if kind == "t" else 0) if number else number
        found = int(number.to_integral_value(ROUND_HALF_UP if kind == "t" else ROUND_DOWN))
    return found if abs(found) < 1 << 63 else "far"


def _real(value: Any) -> float:
    if isinstance(value, bool):
        return float(value)
    text = value.strip(" \n\t\r") if isinstance(value, str) else ""
    special = {"NaN": "nan", "nan": "nan", "Infinity": "inf", "inf": "inf", "Inf": "inf"}
    if (plain := text.removeprefix("-")) in special:
        return float(special[plain]) * (-1 if text != plain else 1)
    return float(text) if _NUMBER.fullmatch(text) else float("nan")


def _sound(text: str) -> str:
    """Replace halves of surrogate pairs, which no text may hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _written(value: Any) -> str:
    """Return a value as JSON text, as ``json.dumps`` writes it, numbers as they were."""
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)
