"""Pages for the tests of the timeline's browser half: the bundle, data made in Python, and a scripted stand-in for the kernel."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

import mappnb
from mappnb.layout import Layout
from mappnb.palette import CATEGORY_COLOURS, PHASE_COLOURS
from mappnb.testing.runs import make_run
from mappnb.widgets._timeline_options import PARTS
from mappnb.widgets.view import static_text

DTYPES = {"f4": "f32", "f8": "f64", "u1": "u8", "u2": "u16", "u4": "u32"}
NO_LABEL = 2**32 - 1
CATEGORIES = [
    {"name": n, "light": c[0], "dark": c[1], "hatch": n == "wait"}
    for n, c in {**PHASE_COLOURS, **CATEGORY_COLOURS}.items()
]
CAT = {c["name"]: i for i, c in enumerate(CATEGORIES)}
FLAG_MATCH, FLAG_SELECTED, FLAG_OPEN, FLAG_FAILED = 1, 2, 4, 8

# Counts what listens: nothing may be left when a view has gone.
COUNTER = """
const listening = new Map();
const keyOf = (t, n, f, o) => JSON.stringify([n, !!(o && (o === true || o.capture))]);
for (const name of ['addEventListener', 'removeEventListener']) {
  const original = EventTarget.prototype[name];
  EventTarget.prototype[name] = function (type, fn, options) {
    const target = this === undefined ? window : this;
    if (!listening.has(target)) listening.set(target, new Map());
    const all = listening.get(target), key = keyOf(target, type, fn, options);
    if (!all.has(key)) all.set(key, new Set());
    if (name === 'addEventListener') all.get(key).add(fn); else all.get(key).delete(fn);
    return original.call(target, type, fn, options);
  };
}
const openObservers = new Set();
for (const name of ['ResizeObserver', 'MutationObserver']) {
  const Original = window[name];
  window[name] = class extends Original {
    observe(...args) { this.where = new Error().stack; openObservers.add(this); return super.observe(...args); }
    disconnect() { openObservers.delete(this); return super.disconnect(); }
  };
}
const openTimers = new Set(), openFrames = new Set();
const setT = window.setTimeout, clearT = window.clearTimeout;
window.setTimeout = (fn, ms, ...a) => { const id = setT(() => { openTimers.delete(id); fn(...a); }, ms); openTimers.add(id); return id; };
window.clearTimeout = (id) => { openTimers.delete(id); clearT(id); };
window.mappnbLeft = () => {
  let count = 0;
  // What listens on the window in the capturing phase, or to an event of its own, is Playwright's.
  for (const all of listening.values()) for (const [key, set] of all) if (!/,true\\]$|__playwright/.test(key)) count += set.size;
  const own = [...openObservers].filter((o) => !o.where.includes("InjectedScript"));
  return { listeners: count, observers: own.length, timers: openTimers.size };
};
"""

# A kernel whose answers the test gives: sent messages are kept, answers go out when told.
SCRIPTED = """
class ScriptedModel {
  constructor(values) { this.values = values; this.sent = []; this.listeners = new Set(); this.auto = {}; }
  get(name) { return this.values[name]; }
  on(type, fn) { this.listeners.add(fn); }
  off(type, fn) { this.listeners.delete(fn); }
  send(content) {
    this.sent.push(JSON.parse(JSON.stringify(content)));
    const reply = this.auto[content.kind];
    if (reply) setTimeout(() => this.emit({ seq: content.seq, ...reply.content }, reply.buffers || []), 0);
  }
  emit(content, buffers = []) { for (const fn of [...this.listeners]) fn(content, buffers); }
  of(kind) { return this.sent.filter((m) => m.kind === kind); }
}
"""


def bundle() -> str:
    """The parts of the widget and the stand-in for its kernel."""
    return "\n".join(static_text(part) for part in (*PARTS, "static_kernel.js"))


def packed(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Arrays as a message carries them in base64."""
    specs = [{"name": n, "dtype": DTYPES[a.dtype.str[1:]], "shape": list(a.shape)} for n, a in arrays.items()]
    return {"arrays": specs, "base64": [base64.b64encode(a.tobytes()).decode() for a in arrays.values()]}


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page_html(
    data: dict[str, Any] | None = None,
    *,
    values: dict[str, Any] | None = None,
    body: str = "",
    attributes: str = "",
    head: str = "",
) -> str:
    """One page with one timeline; without data its kernel is the scripted one. ``window.model``, ``view``, ``undo`` are for the test."""
    css = static_text("timeline.css")
    model = f"new StaticModel({script_json(data)}, values)" if data is not None else "new ScriptedModel(values)"
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>timeline</title>
<meta name="viewport" content="width=device-width"><style>
:root{{color-scheme:light dark}}body{{margin:12px;background:#fff}}@media(prefers-color-scheme:dark){{body{{background:#15181c}}}}
body[data-jp-theme-light=true]{{background:#fff}}body[data-jp-theme-light=false]{{background:#111}}
{css}</style>{head}<script>{COUNTER}</script></head><body {attributes}><main>{body}<div id="at"></div></main>
<script type="module">
{bundle()}
{SCRIPTED}
const values = {script_json(values or {})};
window.parts = {{ Connection, SpanWindow, decodeArrays, timeTicks, formatDuration, formatInstant, renderTimeline, StaticModel }};
window.model = {model};
window.undo = renderTimeline({{ model: window.model, el: document.getElementById('at') }});
window.view = document.querySelector('.mappnb-timeline').mappnbView;
</script></body></html>"""


def meta_of(num_rows: int, extent: tuple[float, float], **changes: Any) -> dict[str, Any]:
    """Meta with one row a rank."""
    meta = {
        "extent": list(extent), "view": None, "num_events": 0,
        "rows": [{"label": "", "depth": 0} for _ in range(num_rows)],
        "blocks": [{"label": f"rank {r}", "title": "", "row0": r, "rows": 1, "group": 0} for r in range(num_rows)],
        "groups": [{"label": "", "row0": 0, "rows": num_rows}], "categories": CATEGORIES,
        "steps": {"number": [], "start": [], "end": []}, "group_by": "rank", "group_options": ["rank"], "hidden": [],
        "origin_s": 0.0, "note": "", "empty": "",
    }  # fmt: skip
    return {**meta, **changes}


def spans_data(
    rows: Any, start: Any, width: Any, cats: Any, names: Any, meta: dict[str, Any], **more: np.ndarray
) -> dict[str, Any]:
    """Data of a static page from plain columns."""
    labels = sorted(set(names))
    where = {n: i for i, n in enumerate(labels)}
    arrays = {
        "row": np.asarray(rows, np.uint16), "x": np.asarray(start, np.float64), "w": np.asarray(width, np.float64),
        "cat": np.asarray(cats, np.uint8), "label": np.array([where[n] for n in names], np.uint32), **more,
    }  # fmt: skip
    return {"meta": {**meta, "num_events": len(arrays["row"])}, "labels": labels, **packed(arrays)}


def run_data(folder: Path, *, group_by: str = "pp", num_steps: int = 6) -> dict[str, Any]:
    """A realistic page: 8 ranks (pp 4 × dp 2), 1F1B, one slow rank, waits and flows."""
    layout = Layout(pp=4, dp=2)
    events = mappnb.attach(
        make_run(folder, layout=layout, num_microbatches=8, num_steps=num_steps, num_layers=4, slow={5: 1.25})
    ).events
    order = sorted(range(layout.world_size), key=lambda r: (layout.coords(r)[group_by], r))
    place = {r: i for i, r in enumerate(order)}
    origin = int(events.start_ns.min())
    columns = {
        n: events[n].values
        for n in ("rank", "start_ns", "duration_ns", "category", "op", "phase", "depth", "layer", "microbatch", "seq")
    }
    peer, group = events["peer"].values, events["group"].values
    rng = np.random.default_rng(3)
    rows, start, width, cats, names = [], [], [], [], []
    ends: dict[tuple[Any, ...], list[int]] = {}
    for i in range(events.sizes["event"]):
        rank, op, category = int(columns["rank"][i]), str(columns["op"][i]), str(columns["category"][i])
        phase = str(columns["phase"][i])
        cat = CAT[phase] if phase in CAT else CAT[category]
        if op == "recv" and columns["duration_ns"][i] > 1_500_000:
            cat = CAT["wait"]
        name = {
            "layer": f"layer {columns['layer'][i]}",
            "forward_step": f"F{columns['microbatch'][i]}",
            "backward_step": f"B{columns['microbatch'][i]}",
        }
        begin, length = int(columns["start_ns"][i]) - origin, int(columns["duration_ns"][i])
        if op == "send":
            length = 400_000
        if category != "mark":
            begin += int(rng.integers(0, 60_000))
            length = max(1000, int(length * (1 - rng.random() * 0.02)))
        rows.append(place[rank] * 3 + int(columns["depth"][i]))
        start.append(begin), width.append(length), cats.append(cat)
        names.append(
            name.get(op, op.replace("_", " ") if op != "iteration" else f"step {int(events['step'].values[i])}")
        )
        if op in ("send", "recv"):
            pair = (
                min(rank, int(peer[i])),
                max(rank, int(peer[i])),
                int(group[i]),
                rank if op == "send" else int(peer[i]),
                int(columns["seq"][i]),
            )
            ends.setdefault(("p2p", *pair), [-1, -1])[op == "recv"] = len(rows) - 1
        elif category == "collective":
            ends.setdefault(("all", int(group[i]), int(columns["seq"][i]), op), []).append(len(rows) - 1)
    meta = _run_meta(events, layout, order, group_by, origin, max(s + w for s, w in zip(start, width, strict=True)))
    pairs = [(*v, 1) for k, v in ends.items() if k[0] == "p2p" and -1 not in v]
    pairs += [(v[0], other, 0) for k, v in ends.items() if k[0] == "all" for other in v[1:]]
    flows = np.array(pairs, np.uint32).reshape(-1, 3)
    more = {"flow_from": flows[:, 0].copy(), "flow_to": flows[:, 1].copy(), "flow_kind": flows[:, 2].astype(np.uint8)}
    return {
        **spans_data(rows, start, width, cats, names, meta, **more),
        "code": "run.timeline(time=slice({start_s}, {end_s}))",
    }


def _run_meta(events: Any, layout: Layout, order: list[int], group_by: str, origin: int, last: int) -> dict[str, Any]:
    meta = meta_of(1, (0.0, float(last)))
    coords = [layout.coords(r) for r in order]
    meta["rows"] = [{"label": ("step", "action", "layer")[d], "depth": d} for _ in order for d in range(3)]
    meta["blocks"] = [
        {"label": f"rank {r}", "title": f"pp{c['pp']} dp{c['dp']}", "row0": 3 * i, "rows": 3, "group": c[group_by]}
        for i, (r, c) in enumerate(zip(order, coords, strict=True))
    ]
    sizes = [sum(c[group_by] == g for c in coords) for g in range(getattr(layout, group_by))]
    firsts = np.cumsum([0, *sizes[:-1]])
    meta["groups"] = [
        {"label": f"pipeline stage {g}", "row0": int(3 * f), "rows": 3 * n}
        for g, (f, n) in enumerate(zip(firsts, sizes, strict=True))
    ]
    step, start, end = (
        events["step"].values,
        events["start_ns"].values - origin,
        events["start_ns"].values + events["duration_ns"].values - origin,
    )
    numbers = np.unique(step)
    meta["steps"] = {
        "number": numbers.tolist(),
        "start": [int(start[step == n].min()) for n in numbers],
        "end": [int(end[step == n].max()) for n in numbers],
    }
    return {
        **meta,
        "group_by": group_by,
        "group_options": [group_by],
        "origin_s": 12.25,
        "note": "one host, clocks aligned to 0.4 µs",
    }


def many_spans(num: int = 20_000, num_rows: int = 64, *, seed: int = 1) -> dict[str, np.ndarray]:
    """Spans of varied length side by side on rows: row, x, w (ns), cat."""
    rng = np.random.default_rng(seed)
    per_row = num // num_rows
    width = rng.gamma(2.0, 40_000.0, (num_rows, per_row)) + 2_000
    gap = rng.exponential(8_000.0, (num_rows, per_row)) * (rng.random((num_rows, per_row)) < 0.4)
    start = np.cumsum(width + gap, axis=1) - width
    scale = 1e8 / (start[:, -1] + width[:, -1])[:, None]
    rows = np.repeat(np.arange(num_rows), per_row)
    cats = rng.integers(0, 7, num_rows * per_row)
    return {"row": rows, "x": (start * scale).ravel(), "w": (width * scale).ravel(), "cat": cats}


def write_page(folder: Path, html: str, name: str = "timeline.html") -> str:
    """Write a page; returns its file:// address."""
    path = folder / name
    path.write_text(html, encoding="utf-8")
    return path.as_uri()
