"""What a watcher sees, in words: blocks and a status line on a terminal, plain lines elsewhere, or one JSON object per line."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections import deque
from statistics import median
from typing import Any, Protocol, TextIO

__all__ = ["Lines", "Show", "Terminal", "sentence", "shown_on"]

Event = dict[str, Any]
EVERY = 20
"""Where nothing can be written over, one line of progress for so many steps."""
USUAL_OF = 200
"""Steps whose median is shown as the usual length."""


class Show(Protocol):
    """Shows events."""

    def events(self, events: list[Event]) -> None:
        """Show some."""


def shown_on(out: TextIO, *, as_json: bool) -> Show:
    """Return what shows events on a stream."""
    return Lines(out) if as_json else Terminal(out)


class Lines:
    """One strict JSON object per line; numbers that are not finite are null."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def events(self, events: list[Event]) -> None:
        """Write some."""
        for event in events:
            self.out.write(json.dumps(_finite(event), allow_nan=False) + "\n")
        self.out.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Terminal:
    """Blocks for verdicts; of steps a status line that is written over on a terminal, and a line now and then elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.live = out.isatty()
        self._lengths: deque[float] = deque(maxlen=USUAL_OF)
        self._step, self._told = -1, -EVERY
        self._standing: dict[tuple[str, str], Event] = {}
        self._since = 0

    def events(self, events: list[Event]) -> None:
        """Show some."""
        for event in events:
            if event["event"] == "step":
                self._step = event["step"]
                self._lengths.append(event["step_s"])
                self._since += 1
                continue
            self._clear()
            self._keep(event)
            self.out.write(sentence(event) + "\n")
        if self._step >= 0 and any(e["event"] == "step" for e in events):
            self._status()
        self.out.flush()

    def _keep(self, event: Event) -> None:
        key = (event.get("subject_kind", ""), event.get("subject", ""))
        if event["event"] in ("raised", "changed"):
            self._standing = (
                {} if event.get("why", "").startswith("was ") and key not in self._standing else self._standing
            )
            self._standing[key] = event
        elif event["event"] == "cleared":
            self._standing.pop(key, None)
            self._since = 0
        elif event["event"] == "restart":
            self._standing = {}

    def _clear(self) -> None:
        if self.live:
            self.out.write("\r\x1b[K")

    def _status(self) -> None:
        text = f"step {self._step}  {_seconds(self._lengths[-1])}, usually {_seconds(median(self._lengths))}  "
        if self._standing:
            text += "slow: " + ", ".join(f"{k} {s} {e['effect_fraction']:+.0%}" for (k, s), e in self._standing.items())
        else:
            text += f"nobody slow in {self._since} step{'s' if self._since != 1 else ''}"
        if self.live:
            width = shutil.get_terminal_size().columns
            self.out.write("\r\x1b[K" + text[: width - 1])
        elif self._step - self._told >= EVERY:
            self.out.write(text + "\n")
            self._told = self._step


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def sentence(event: Event) -> str:
    """Return an event in words, several lines for a verdict."""
    kind = event["event"]
    return _SAY[kind](event) if kind in _SAY else f"{kind}: {event}"


def _start(e: Event) -> str:
    return f"watching {e['path']}: {e['world_size']} ranks" + (f", {e['layout']}" if e["layout"] else "")


def _verdict(e: Event) -> str:
    head = {"raised": "SLOW", "changed": "CHANGED"}[e["event"]]
    since = f"since step {e['first_step']}" + (f", raised at step {e['step']}" if e["event"] == "raised" else "")
    why = f" ({e['why']})" if e.get("why") else ""
    lines = [
        f"{head}  {e['subject_kind']} {e['subject']}: {e['cause'] or 'cause unknown'}{why}",
        f"      {_seconds(e['effect_s'])} a step ({e['effect_fraction']:+.0%}), {since}",
    ]
    lines += textwrap.wrap(e["evidence"], 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _cleared(e: Event) -> str:
    return (
        f"CLEAR {e['subject_kind']} {e['subject']}: {e.get('why', '')}; it was slow in steps {e['first_step']} to {e['last_step']} "
        f"(all clear at step {e['step']})"
    )


def _end(e: Event) -> str:
    stands = ", ".join(
        f"{s['subject_kind']} {s['subject']} ({s['cause']}, {s['effect_fraction']:+.0%})" for s in e.get("standing", ())
    )
    words = {
        "ended": "the job has ended", "stopped": "the job has stopped without an end", "once": "looked once",
        "step": "the step asked for has ended", "timeout": "time is up", "interrupted": "interrupted",
    }  # fmt: skip
    steps = f"{e['num_steps']} steps seen, the last is {e['step']}" if e.get("num_steps") else "no step was seen"
    return f"end: {words.get(e['why'], e['why'])}; {steps}; " + (
        f"still slow: {stands}" if stands else "nobody stands as slow"
    )


_SAY = {
    "start": _start,
    "raised": _verdict,
    "changed": _verdict,
    "cleared": _cleared,
    "restart": lambda e: (
        f"restart: incarnation {e['incarnation']} of {e['world_size']} ranks begins with step {e['step']}"
    ),
    "degraded": lambda e: f"rank {e['rank']}: recording stopped early: {e['why']}",
    "failed": lambda e: f"rank {e['rank']}: ended by {e['why']}",
    "stalled": lambda e: (
        f"STALL no step has ended for {e['silent_s']:.0f} s; usually one takes {_seconds(e['usual_step_s'])}"
    ),
    "resumed": lambda e: f"steps end again, the newest is {e['step']}",
    "end": _end,
}
