"""The attention view as one page that needs no kernel: every head of its samples in bytes, deflated."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.widgets import _attn_told as told
from mappnb.widgets._attn_answers import columns, frames, sample_label, thumb_size
from mappnb.widgets._messages import with_arrays
from mappnb.widgets._static_view import page_html

if TYPE_CHECKING:
    from mappnb.widgets.attention import Attention

__all__ = ["MOST_BYTES", "page"]

MOST_BYTES = 2_000_000
"""Of a page."""
MOST_CELLS = 1024
"""Of a head, along an axis."""
MOST_SAMPLES = 64
"""Of a page: each costs up to a tenth of a second."""
FEW = 4
"""Heads on which it is tried how many cells there is room for."""
_PARTS = ("static_answers.js", "attention_static.js")


def page(view: Attention) -> str:
    """Return one self-contained HTML page of at most :data:`MOST_BYTES`.

    The sample and the one it is compared with are there in any case, in fewer cells if they are long; then others, first those of other
    steps that go with it, :data:`MOST_SAMPLES` at most, while there is room.
    """
    room = MOST_BYTES - len(_html(view, {"samples": []})) - 20_000
    where = view._where
    first = [where.sample] + ([where.compare] if where.compare not in (None, where.sample) else [])
    held: dict[int, dict[str, Any]] = {}
    for i, sample in enumerate(first):
        held[sample] = _fitted(view, sample, room // (len(first) - i))
        room -= held[sample]["bytes"]
    for sample in [*frames(view._source.samples, where.sample), *range(len(view._source.samples))]:
        if len(held) >= MOST_SAMPLES:
            break
        if sample not in held and room > 0:
            made = _sample(view, sample, len(view._source.tokens(sample)), most_bytes=room)
            if made is None:
                break
            held[sample] = made
            room -= made["bytes"]
    whole = _html(view, _data(view, held))
    while len(whole.encode()) > MOST_BYTES and len(held) > len(
        first
    ):  # many short samples: their texts weigh more than was thought
        for sample in list(held)[max(len(first), len(held) - 1 - len(held) // 16) :]:
            del held[sample]
        whole = _html(view, _data(view, held))
    return whole


def _html(view: Attention, data: dict[str, Any]) -> str:
    from mappnb.widgets.attention import Attention

    return page_html(view.describe(), Attention, data, parts=_PARTS, model="StaticAttention", render="renderAttention")


def _fitted(view: Attention, sample: int, most_bytes: int) -> dict[str, Any]:
    """Return a sample in as many cells as there is room for; how well they pack is tried on a few heads."""
    num = len(view._source.tokens(sample))
    heads = _heads(view)
    few = heads[:: max(1, len(heads) // FEW)][:FEW]
    cells = min(num, MOST_CELLS)
    while cells > 4 and len(_packed(view, sample, cells, few)[0]) * len(heads) / len(few) > most_bytes:
        cells = max(4, int(cells * 0.8))
    while True:
        made = _sample(view, sample, cells, most_bytes=most_bytes if cells > 4 else None)
        if made is not None:
            return made
        cells = max(4, int(cells * 0.95))


def _heads(view: Attention) -> list[tuple[int, int]]:
    return [(layer, head) for layer in view._source.layers for head in view._source.heads]


def _packed(view: Attention, sample: int, cells: int, heads: list[tuple[int, int]]) -> tuple[str, int, bool]:
    """Return heads in cells as base64 of deflated bytes, the cells along an axis, and whether only the lower triangle is kept."""
    drawn = []
    for layer, head in heads:
        if len(heads) > FEW:
            view._source.prepare(sample, layer)
        drawn.append(columns(view._source, sample, layer, head, pool=view._where.pool, most=cells).codes)
    codes = np.stack(drawn)
    lower = bool((np.triu(codes, 1) == 0).all())
    kept = codes[:, *np.tril_indices(codes.shape[1])] if lower else codes
    return base64.b64encode(zlib.compress(kept.tobytes(), 9)).decode("ascii"), int(codes.shape[1]), lower


def _sample(view: Attention, sample: int, cells: int, *, most_bytes: int | None) -> dict[str, Any] | None:
    """Return every head of a sample in cells, or None if that is more than ``most_bytes``."""
    source = view._source
    num, heads = len(source.tokens(sample)), _heads(view)
    if most_bytes is not None and len(heads) * cells * cells > 40 * most_bytes:
        return None  # it would not fit, however well it packs
    packed, side, lower = _packed(view, sample, cells, heads)
    scores = told.scores_told(source.scores(sample) if told.scores_soon(source, sample) else [])
    scored, _ = with_arrays(scores.content, scores.arrays, binary=False)
    size = len(packed) + 14 * num + 6 * len(heads) * len(scores.arrays) + 500
    if most_bytes is not None and size > most_bytes:
        return None
    return {
        "codes": packed, "cells": side, "num": num, "lower": lower, "bytes": size, "scores": scored,
        "thumb": thumb_size(num, len(source.layers), len(source.heads)),
    }  # fmt: skip


def _data(view: Attention, held: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the page's data: samples are numbered anew."""
    source, where = view._source, view._where
    at = {sample: i for i, sample in enumerate(held)}
    samples = []
    for sample, made in held.items():
        tokens = told.tokens_told(source, sample)
        tokens |= {"sample": at[sample], "frames": [[at[f], s] for f, s in tokens["frames"] if f in at]}
        samples.append({**made, "tokens": tokens})
    state = told.state_told(source, where, title=view.describe())
    moved = replace(where, sample=at[where.sample], compare=None if where.compare is None else at[where.compare])
    state["where"] |= {"sample": moved.sample, "compare": moved.compare}
    state |= {
        "kind": "state",
        "num_samples": len(held),
        "samples": [sample_label(source.samples, s) for s in held],
        "scores_soon": True,
    }
    return {"state": state, "samples": samples, "code": view.code}
