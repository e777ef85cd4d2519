"""Attention: every head of a model at a glance, one head token by token, two prompts or steps beside each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError, did_you_mean
from mappnb.run import Run
from mappnb.widgets import _attn_told as told
from mappnb.widgets._attn_answers import Cells, Heads, columns, frames, overview, row
from mappnb.widgets._attn_source import Source, source_of
from mappnb.widgets._attn_tables import head_table, sample_at, selected_table, with_tokens
from mappnb.widgets._attn_where import Where
from mappnb.widgets._messages import Answer, numbers, text, whole
from mappnb.widgets.view import View, bundle, static_text

__all__ = ["ATTENTION_PARTS", "Attention"]

ATTENTION_PARTS = (
    *(
        "runtime.js",
        "runtime_ui.js",
        "timeline_time.js",
        "attention_colours.js",
        "attention_axes.js",
        "attention_grid.js",
    ),
    *("attention_heat.js", "attention_lines.js", "attention_tokens.js", "attention_bar.js", "attention_panels.js"),
    *("attention_draw.js", "attention.js"),
)


class Attention(View):
    """Attention of every head as thumbnails, layer by head, and of one head token by token.

    Parameters
    ----------
    source : Run, DataTree, Dataset or array
        A run that captured ``q_rot`` and ``k_rot``, its ``run.activations``, or one stream of them; or patterns that are there already,
        dims ([sample | step,] layer, head, query, key), as DataArray or numpy array.
    sample : int or str
        Position along ``sample``, or a prompt.
    compare : int, str or None
        Another sample or prompt to put beside it.
    layer, head : int, optional
        Look at one head (global numbers). Without them: all heads.
    step : int, optional
        Of which training step ``sample`` is taken.
    compare_step : int, optional
        Compare with the same place (or prompt) at this step.
    query : int, optional
        Token slot whose attention is shown.
    scale : str
        ``"sqrt"``, ``"linear"`` or ``"log"``: how a weight becomes a colour.
    threshold : float
        Weights below are not drawn.
    order : str
        ``"layer"`` or a head score (``view.scores`` lists them): how the thumbnails are arranged.
    pool, mode, fit, window
        As of :meth:`set`.
    tokens : sequence of str, optional
        Of an array of patterns: a text for each token, or such a list for each sample.

    Attributes
    ----------
    errors : list of str
        What went wrong in answering the browser.

    Raises
    ------
    MappnbError
        If queries and keys were not captured, or a sample, step, layer, head or word does not exist.

    Notes
    -----
    Patterns are those of :func:`mappnb.interp.attention_pattern`, worked out from the stored queries and keys when they are looked at;
    scores are those of :func:`mappnb.interp.head_statistics`. No message holds more than 40 kB of a model of 12 x 12 heads and 128 tokens.
    """

    _esm = bundle(*ATTENTION_PARTS, render="renderAttention")
    _css = static_text("timeline.css") + static_text("attention.css")

    def __init__(
        self,
        source: Run | xr.DataTree | xr.Dataset | xr.DataArray | np.ndarray[Any, Any],
        *,
        sample: int | str = 0,
        compare: int | str | None = None,
        layer: int | None = None,
        head: int | None = None,
        step: int | None = None,
        compare_step: int | None = None,
        query: int | None = None,
        scale: str = "sqrt",
        threshold: float = 0.0,
        order: str = "layer",
        pool: str = "max",
        mode: str = "heat",
        fit: bool = False,
        window: tuple[int, int, int, int] | None = None,
        tokens: Any = None,
    ) -> None:
        self._source: Source = source_of(source, tokens)
        self._caller = "run.attention" if isinstance(source, Run) else "mappnb.widgets.Attention"
        self._run = source if isinstance(source, Run) else None
        self._given = [] if self._run is not None else ["activations"]
        self._last = [] if tokens is None else ["tokens=tokens"]
        at = sample_at(self._source.samples, sample, step)
        other = None if compare is None and compare_step is None else self._other(at, compare, compare_step)
        where = Where(at, other, layer, head, query, scale, pool, mode, order, threshold, fit, window)
        self._where = self._checked(where)
        super().__init__()

    # --------------------------------------------------------------------------------------------------------- API
    @property
    def samples(self) -> pd.DataFrame:
        """The samples: ``step, dp_rank, microbatch, index, prompt``; the row's number is what ``sample=`` takes."""
        return self._source.samples

    @property
    def scores(self) -> pd.DataFrame:
        """The scores of every head in the sample that is looked at (:func:`mappnb.interp.head_statistics`)."""
        return head_table(self._source.layers, self._source.heads, self._source.scores(self._where.sample))

    @property
    def selected(self) -> pd.DataFrame:
        """What is looked at as a table.

        Of a token: a row per key, the largest weight first. Of a head: a row per query and key from the threshold on (at least 0.01).
        Of all heads: their scores. With two samples, ``attention_b`` and ``difference`` too where they have as many tokens.
        """
        where = self._where
        if where.layer is None or where.head is None:
            return self.scores
        patterns = [self.pattern()]
        if where.compare is not None and self._alike:
            patterns.append(self.pattern(sample=where.compare))
        return selected_table(patterns, where)

    def pattern(self, *, layer: int | None = None, head: int | None = None, sample: int | None = None) -> xr.DataArray:
        """Return the attention of a head (default: the one that is looked at), dims (query, key), with token slots and texts."""
        layer, head = self._head_at(layer, head)
        at = self._where.sample if sample is None else sample
        self._checked(Where(sample=at, layer=layer, head=head))
        values = self._source.pattern(at, layer, head)
        return with_tokens(values, self._source.tokens(at), layer=layer, head=head, sample=at)

    def overview(self, *, first: int = 0) -> Heads:
        """Return the thumbnails that are drawn, from the layer at position ``first``."""
        return overview(self._source, self._where.sample, first=first, pool=self._where.pool)

    @property
    def columns(self) -> dict[str, Any]:
        """What is drawn of one head, as arrays: ``codes`` (query cell, key cell), ``queries``, ``keys`` (first token of each cell)."""
        where = self._where
        if where.layer is None or where.head is None:
            return {"codes": self.overview().codes}
        drawn = self._drawn(where.sample, None)
        return {"codes": drawn.codes, "queries": drawn.queries, "keys": drawn.keys}

    def set(self, **values: Any) -> None:
        """Change ``scale=``, ``threshold=``, ``order=``, ``pool=`` ("max", "mean"), ``mode=`` ("heat", "lines"), ``fit=``, ``window=``.

        ``fit``: colours end at the largest weight. ``window``: first query, query behind the last, first key, key behind the last.
        """
        known = ("scale", "threshold", "order", "pool", "mode", "fit", "window")
        for name in values:
            if name not in known:
                raise MappnbError(f"set() has no {name!r}; it knows {', '.join(known)}{did_you_mean(name, known)}")
        if values.get("window") is not None:
            values["window"] = list(values["window"])
        self._go(self._where.moved(values))

    def goto(
        self,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
        sample: int | str | None = None,
    ) -> None:
        """Look at a head, a token (slot) of it, another sample; without layer and head at all heads."""
        at = self._where.sample if sample is None else sample_at(self._source.samples, sample, None)
        self._go(replace(self._where, layer=layer, head=head, query=query, sample=at))

    def compare(self, sample: int | str | None = None, *, step: int | None = None) -> None:
        """Put another sample beside it, or the same one at another step; without arguments none."""
        other = None if sample is None and step is None else self._other(self._where.sample, sample, step)
        self._go(replace(self._where, compare=other))

    def refresh(self) -> None:
        """Look again at a run that is being recorded; place and selection stay."""
        if self._run is not None:
            self._run.refresh()
            self._source.release()
            self._source = source_of(self._run)
            state = told.state_told(self._source, self._where, title=self.describe())
            self.send_answer(Answer({**state, "kind": "state"}))

    @property
    def code(self) -> str:
        """The Python line that makes this view again, as it is now."""
        said = [f"{k}={v!r}" for k, v in self._where.told().items() if v != getattr(Where(), k) and k != "window"]
        said += [f"window={self._where.window!r}"] if self._where.window else []
        return f"{self._caller}({', '.join([*self._given, *said, *self._last])})"

    def describe(self) -> str:
        """Return the view in one stable line."""
        s = self._source
        num = len(s.tokens(self._where.sample))
        return f"Attention({len(s.layers)} layers, {len(s.heads)} heads, {len(s.samples)} samples, {num} tokens)"

    # ------------------------------------------------------------------------------------------------------- state
    def _other(self, at: int, compare: int | str | None, step: int | None) -> int:
        if compare is not None:
            return sample_at(self._source.samples, compare, step)
        steps = {int(self._source.samples["step"][f]): f for f in frames(self._source.samples, at)}
        if step not in steps:
            raise MappnbError(f"sample {at} has no counterpart at step {step}; it has at {', '.join(map(str, steps))}")
        return steps[step]

    @property
    def _alike(self) -> bool:
        where, tokens = self._where, self._source.tokens
        return where.compare is not None and len(tokens(where.sample)) == len(tokens(where.compare))

    def _checked(self, where: Where) -> Where:
        """Return a place that exists in the data, or raise MappnbError."""
        source, where = self._source, where.checked()
        for name in ("sample", "compare"):
            at = getattr(where, name)
            if at is not None and not 0 <= at < len(source.samples):
                raise MappnbError(f"{name} is {at}; there are {len(source.samples)} samples, from 0")
        if where.layer is not None and where.layer not in source.layers:
            raise MappnbError(
                f"no layer {where.layer}; q_rot and k_rot were captured of {told.ranges(source.layers, 'layer')}"
            )
        if where.head is not None and where.head not in source.heads:
            raise MappnbError(f"no head {where.head}; q_rot was captured of {told.ranges(source.heads, 'head')}")
        slots = source.tokens(where.sample).slots
        if where.query is not None and where.query not in slots:
            raise MappnbError(f"no token {where.query}; the sample has slots {slots[0]} to {slots[-1]}")
        if where.window is not None:
            q0, q1, k0, k1 = np.searchsorted(slots, where.window)
            if not (0 <= q0 < q1 and 0 <= k0 < k1):
                raise MappnbError(f"window is {where.window}; the sample has slots {slots[0]} to {slots[-1]}")
        if where.order != "layer":
            known = [s.name for s in source.scores(where.sample)]
            if where.order not in known:
                hint = did_you_mean(where.order, known)
                raise MappnbError(f"order is {where.order!r}; expected layer{''.join(f', {k}' for k in known)}{hint}")
        return where

    def _go(self, where: Where) -> None:
        """Look at another place, told by Python."""
        self._where = self._checked(where)
        self.tell("goto", **told.where_told(self._source, self._where))
        self.changed("selection")

    def _head_at(self, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
        """Return a head, where it is not given the one that is looked at, or raise MappnbError."""
        layer, head = self._where.layer if layer is None else layer, self._where.head if head is None else head
        if layer is None or head is None:
            raise MappnbError("which head? Give layer= and head=, or open one in the view")
        return layer, head

    def _drawn(self, sample: int, compare: int | None) -> Cells:
        w, window = self._where, None
        if w.window is not None:
            q0, q1, k0, k1 = np.searchsorted(self._source.tokens(sample).slots, w.window).tolist()
            window = q0, q1, k0, k1
        return columns(self._source, sample, *self._head_at(), compare=compare, window=window, pool=w.pool)

    def follow_selection(self, other: Any) -> None:
        """Go to the head and token of another attention view."""
        if isinstance(other, Attention):
            theirs = other._where
            self._go(replace(self._where, layer=theirs.layer, head=theirs.head, query=theirs.query))

    # ---------------------------------------------------------------------------------------------------- messages
    def on_ready(self, content: dict[str, Any]) -> None:
        """Answer the browser: the probe, then what there is."""
        super().on_ready(content)
        state = told.state_told(self._source, self._where, title=self.describe())
        self.send_answer(Answer({**state, "kind": "state", "seq": content.get("seq")}))

    def _sample(self, content: dict[str, Any], name: str = "sample") -> int:
        return whole(content, name, 0, len(self._source.samples) - 1)

    def _compare(self, content: dict[str, Any]) -> int | None:
        return None if content.get("compare") is None else self._sample(content, "compare")

    def on_go(self, content: dict[str, Any]) -> None:
        """Take note of where the browser is; positions among the tokens become slots."""
        asked = {k: v for k, v in content.items() if k not in ("kind", "seq")}
        where = self._checked(told.where_asked(self._source, self._where, asked))
        if where != self._where:
            self._where = where
            self.changed("selection")

    def on_tokens(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the tokens of a sample, and its frames."""
        return told.tokens_told(self._source, self._sample(content))

    def on_thumbs(self, content: dict[str, Any]) -> Answer:
        """Answer with thumbnails."""
        first = whole(content, "first", 0, len(self._source.layers) - 1)
        pool = text(content, "pool", most=20)
        found = overview(self._source, self._sample(content), first=first, compare=self._compare(content), pool=pool)
        n, heads, size, _ = found.codes.shape
        told_ = {"first": first, "count": n, "heads": heads, "size": size, "every": found.every}
        return Answer(told_, {"thumbs": found.codes})

    def on_detail(self, content: dict[str, Any]) -> Answer:
        """Answer with one head in cells."""
        window = [int(v) for v in numbers(content, "window", 4)] if content.get("window") is not None else None
        found = columns(
            self._source, self._sample(content), *self._head(content), compare=self._compare(content),
            window=(window[0], window[1], window[2], window[3]) if window else None, pool=text(content, "pool", most=20),
        )  # fmt: skip
        return told.cells_told(found)

    on_other = on_difference = on_detail

    def _head(self, content: dict[str, Any]) -> tuple[int, int]:
        layer, head = whole(content, "layer", 0, 2**31), whole(content, "head", 0, 2**31)
        self._checked(Where(layer=layer, head=head))
        return layer, head

    def on_row(self, content: dict[str, Any]) -> Answer:
        """Answer with the exact weights of one token, in both samples if there are two."""
        at, axis = whole(content, "at", 0, 2**31), text(content, "axis", most=10)
        layer, head = self._head(content)
        found = {"row": row(self._source, self._sample(content), layer, head, at, axis=axis)}
        other = self._compare(content)
        if other is not None and at < len(self._source.tokens(other)):
            found["other"] = row(self._source, other, layer, head, at, axis=axis)
        return Answer({}, found)

    def on_scores(self, content: dict[str, Any]) -> Answer:
        """Answer with the scores of all heads."""
        return told.scores_told(self._source.scores(self._sample(content)))

    # ------------------------------------------------------------------------------------------------------ static
    def twin_html(self) -> str:
        """Return the view as a picture."""
        from mappnb.widgets._attn_static import twin

        return twin(self)

    def snapshot(self) -> Any:
        """Return a picture (SVG) of all heads, or of the one that is looked at, that stays in the notebook."""
        from mappnb.widgets._attn_static import snapshot

        return snapshot(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the view as one self-contained page with every head of its samples, at most 2 MB; write it to ``path`` if given."""
        from mappnb.widgets._attn_page import page

        return self._written(page(self), path)

    def release(self) -> None:
        """Let go of the data."""
        self._source.release()
        self._run = None
