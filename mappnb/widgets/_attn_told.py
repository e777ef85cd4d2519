"""What the attention view tells its browser half: state, tokens, cells, scores; positions among the tokens, not slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mappnb.palette import DIVERGING, RISING
from mappnb.widgets._attn_answers import Cells, frames, sample_label
from mappnb.widgets._attn_codes import POOLS
from mappnb.widgets._attn_source import Score, Source
from mappnb.widgets._attn_tokens import shown_all
from mappnb.widgets._attn_where import MODES, SCALES, Where
from mappnb.widgets._messages import Answer

__all__ = [
    "cells_told",
    "ranges",
    "scores_soon",
    "scores_told",
    "state_told",
    "tokens_told",
    "where_asked",
    "where_told",
]

MOST_SAMPLES = 200
"""Samples that the choices list; of more, their number is typed."""
ASCENDING = ("entropy",)
"""Scores of which the least comes first."""
SCORE_LIMIT = 20_000_000
"""Scores come by themselves where heads x tokens x tokens are fewer: within some 2 s."""


def ranges(numbers: Sequence[int], word: str) -> str:
    """Return numbers in words: ``layers 0 to 11``, ``layers 0, 4, 8``."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and list(numbers) == list(range(first, last + 1)):
        return f"{word}s {first} to {last}"
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def where_told(source: Source, where: Where) -> dict[str, Any]:
    """Return the place with positions among the tokens for slots."""
    slots = source.tokens(where.sample).slots
    out = where.told()
    out["query"] = None if where.query is None else int(np.searchsorted(slots, where.query))
    out["window"] = None if where.window is None else np.searchsorted(slots, where.window).tolist()
    return {"where": out}


def where_asked(source: Source, where: Where, asked: Mapping[str, Any]) -> Where:
    """Return the place that a message names, with slots for positions."""
    moved = where.moved(asked)
    if not 0 <= moved.sample < len(source.samples):
        return moved  # it is refused with the others
    slots = source.tokens(moved.sample).slots
    last = len(slots) - 1
    if "query" in asked and moved.query is not None:
        moved = replace(moved, query=int(slots[min(max(moved.query, 0), last)]))
    if "window" in asked and moved.window is not None:
        q0, q1, k0, k1 = (int(min(max(v, 0), last + 1)) for v in moved.window)
        ends = [int(slots[min(v, last)]) for v in (q0, k0)], [int(slots[max(v - 1, 0)]) + 1 for v in (q1, k1)]
        moved = replace(moved, window=(ends[0][0], ends[1][0], ends[0][1], ends[1][1]))
    return moved


def scores_soon(source: Source, sample: int) -> bool:
    """Return whether the head scores of a sample are worked out quickly."""
    return len(source.layers) * len(source.heads) * len(source.tokens(sample)) ** 2 < SCORE_LIMIT


def tokens_told(source: Source, sample: int) -> dict[str, Any]:
    """Return the tokens of a sample as they are shown, and the samples of other steps that go with it."""
    tokens = source.tokens(sample)
    others = frames(source.samples, sample)
    steps = [int(source.samples["step"][f]) for f in others]
    padding = np.flatnonzero(~tokens.real).tolist()
    return {
        "sample": sample, "slots": tokens.slots.tolist(), "texts": shown_all(tokens.texts), "padding": padding,
        "label": sample_label(source.samples, sample), "frames": [[f, s] for f, s in zip(others, steps, strict=True)],
    }  # fmt: skip


def state_told(source: Source, where: Where, *, title: str) -> dict[str, Any]:
    """Return what there is, for a browser that has drawn the view."""
    num = len(source.samples)
    return {
        **where_told(source, where),
        "title": title,
        "layers": list(source.layers),
        "heads": list(source.heads),
        "num_samples": num,
        "samples": [sample_label(source.samples, i) for i in range(num)] if num <= MOST_SAMPLES else [],
        "causal": source.facts.get("causal") is not False,
        "scores_soon": scores_soon(source, where.sample),
        "options": {
            name: [list(o) for o in known.items()]
            for name, known in (("scale", SCALES), ("pool", POOLS), ("mode", MODES))
        },
        "palette": {"rising": RISING, "diverging": DIVERGING},
    }


def cells_told(cells: Cells) -> Answer:
    """Return one head in cells; the cells share the window as :func:`bins` does."""
    q, k = cells.queries, cells.keys
    content: dict[str, Any] = {
        "window": [int(q[0]), int(q[-1]), int(k[0]), int(k[-1])],
        "cells": [len(q) - 1, len(k) - 1],
        "largest": cells.largest,
        "every": cells.every,
    }
    return Answer(content, {"codes": cells.codes})


def scores_told(scores: Sequence[Score]) -> Answer:
    """Return the scores of all heads."""
    named = [
        {
            "name": s.name,
            "label": s.name.replace("_", " "),
            "unit": s.unit,
            "what": s.what,
            "ascending": s.name in ASCENDING,
        }
        for s in scores
    ]
    return Answer({"scores": named}, {s.name: s.values.astype(np.float32) for s in scores})
