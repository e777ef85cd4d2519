"""One step as a picture: a lane per rank, forwards and backwards with their microbatch, transfers and waits below them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import xarray as xr

from mappnb import svg
from mappnb.terms import Category, Op

__all__ = ["step_timeline", "timeline_columns"]

LANE, GAP, LEFT = 30, 8, 150
_STRIPES = (Category.COLLECTIVE, Category.P2P, Category.WAIT, Category.DATA, Category.OPTIMIZER, Category.CHECKPOINT)
MOST_SHAPES = 20_000


def timeline_columns(events: xr.Dataset) -> dict[str, np.ndarray[Any, Any]]:
    """Return what is drawn of a step's events: actions as blocks, transfers, waits, data and optimizer as stripes.

    Parameters
    ----------
    events : Dataset, dims (event,)
        One step.

    Returns
    -------
    dict of arrays, shape (shape,)
        ``left_ms``, ``width_ms`` from the first start; ``rank``; ``what`` (forward, backward, or a category); ``block`` (True for actions);
        ``microbatch``; ``op``. The longest 20,000, should there be more.
    """
    op, category = events.op.values, events.category.values
    action = (op == Op.FORWARD_STEP) | (op == Op.BACKWARD_STEP)
    if not action.any():
        action = category == Category.COMPUTE
    shown = np.flatnonzero((action | np.isin(category, _STRIPES)) & (events.duration_ns.values > 0))
    if len(shown) > MOST_SHAPES:
        shown = np.sort(shown[np.argsort(-events.duration_ns.values[shown])[:MOST_SHAPES]])
    start = events.start_ns.values
    origin = start.min() if len(start) else 0
    phase = np.where(op == Op.BACKWARD_STEP, "backward", events.phase.values)
    return {
        "left_ms": (start[shown] - origin) / 1e6,
        "width_ms": events.duration_ns.values[shown] / 1e6,
        "rank": events["rank"].values[shown],
        "what": np.where(action, np.where(phase == "backward", "backward", "forward"), category)[shown],
        "block": action[shown],
        "microbatch": events.microbatch.values[shown],
        "chunk": events["chunk"].values[shown],
        "op": op[shown],
    }


def _colour(what: str) -> str:
    return f"var(--c-p-{what})" if what in ("forward", "backward") else f"var(--c-e-{what})"


def step_timeline(
    events: xr.Dataset, *, labels: Mapping[int, str], marked: Collection[int] = (), width: int = 1000
) -> str:
    """Return the timeline of one step as SVG with its legend.

    Parameters
    ----------
    events : Dataset, dims (event,)
        One step.
    labels : mapping of int to str
        Name of each rank's lane.
    marked : collection of int
        Ranks whose lanes are marked.
    """
    columns = timeline_columns(events)
    ranks = sorted({int(r) for r in columns["rank"]})
    lane = {r: i for i, r in enumerate(ranks)}
    height = svg.TOP + len(ranks) * (LANE + GAP) + svg.BOTTOM
    canvas = svg.Canvas(width, height, "timeline of one step")
    end = float((columns["left_ms"] + columns["width_ms"]).max()) if len(columns["rank"]) else 1.0
    scale = (width - LEFT - svg.RIGHT) / end
    for tick in svg.ticks(0.0, end, 10):
        canvas.line(LEFT + tick * scale, svg.TOP, LEFT + tick * scale, height - svg.BOTTOM + 4)
        canvas.text(LEFT + tick * scale, height - svg.BOTTOM + 18, f"{tick:g}", anchor="middle")
    for rank in ranks:
        y = svg.TOP + lane[rank] * (LANE + GAP)
        if rank in marked:
            canvas.rect(0, y - GAP / 2, width, LANE + GAP, fill="var(--c-b-wait_peer)", extra=' opacity=".16"')
        name = labels.get(rank, f"rank {rank}")
        canvas.text(LEFT - 8, y + 18, name, anchor="end", cls="t mark" if rank in marked else "t")
        canvas.line(LEFT, y + LANE + GAP / 2, width - svg.RIGHT, y + LANE + GAP / 2)
    for i in np.argsort(columns["block"], kind="stable").tolist():  # stripes first, blocks above
        _draw(canvas, {k: v[i] for k, v in columns.items()}, lane, scale)
    canvas.text(
        (LEFT + width - svg.RIGHT) / 2, height - 2, "ms from the step's first event", anchor="middle", cls="t axis"
    )
    seen = [w for w in ("forward", "backward", *map(str, _STRIPES)) if w in set(columns["what"].tolist())]
    return svg.legend([(w, _colour(w)) for w in seen]) + canvas.render()


def _draw(canvas: svg.Canvas, shape: Mapping[str, Any], lane: Mapping[int, int], scale: float) -> None:
    y = svg.TOP + lane[int(shape["rank"])] * (LANE + GAP)
    x, w = LEFT + shape["left_ms"] * scale, shape["width_ms"] * scale
    microbatch = int(shape["microbatch"])
    chunk = f", chunk {int(shape['chunk'])}" if shape["chunk"] > 0 else ""
    mark = f", microbatch {microbatch}{chunk}" if microbatch >= 0 else ""
    tip = f"rank {int(shape['rank'])}: {shape['op']}{mark}, {shape['width_ms']:.3f} ms at {shape['left_ms']:.3f} ms"
    if shape["block"]:
        canvas.rect(
            x, y, w, LANE - 10, fill=_colour(str(shape["what"])), tip=tip, extra=' stroke="var(--bg)" stroke-width=".6"'
        )
        if w > 14 and microbatch >= 0:
            canvas.text(x + w / 2, y + (LANE - 10) / 2 + 4, str(microbatch), anchor="middle", cls="t inbar")
    else:
        canvas.rect(x, y + LANE - 8, w, 7, fill=_colour(str(shape["what"])), tip=tip)
