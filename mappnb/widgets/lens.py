"""Lens: what each layer would say next, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.activations import stream_with, streams_of
from mappnb.errors import MappnbError
from mappnb.interp.lens import LENS_POINTS, logit_lens, vocabulary_of
from mappnb.run import Run
from mappnb.widgets._acts_choices import Chooser
from mappnb.widgets._acts_panels import Grid, Lines, Table, number_text
from mappnb.widgets._acts_samples import sample_choices, token_names
from mappnb.widgets._acts_view import ActivationsView, Detail, Pick, Picture, source_of

__all__ = ["Lens"]

Array = np.ndarray[Any, Any]
MEASURES = {
    "probability": "probability of the token shown",
    "target_probability": "probability of the actual next token",
    "rank": "rank of the actual next token, log10(1 + rank)",
    "entropy": "entropy, nat",
    "kl": "divergence from the last layer, nat",
}
WIDE = 24
"""Tokens beside each other."""
TOP = 10
MOST_READ = 200
"""Samples whose tokens tell the vocabulary, if none is given."""
KEPT = 8
"""Windows whose lens is kept."""


class Lens(ActivationsView):
    """Likeliest next token of each layer (rows, the last on top) after each token (columns).

    Parameters
    ----------
    source : Run, DataTree or Dataset
        A run that captured ``resid_post`` (or ``resid_pre``, ``resid_mid``), its ``run.activations``, or one stream of them.
    weights : optional
        As of :func:`mappnb.interp.logit_lens`: default the recorded ones; else arrays by name, a Dataset, or a live model.
    vocabulary : sequence of str, "bytes" or tokenizer, optional
        Texts of token ids.
    point, sample, measure, first : optional
        The point, the position of the sample, what the colours show (``"probability"``, ``"target_probability"``, ``"rank"``,
        ``"entropy"``, ``"kl"``), and the place of the first token shown.

    Raises
    ------
    MappnbError
        If residual stream or weights were not recorded, or a choice does not exist.

    Notes
    -----
    Only the tokens shown are worked out, when they are looked at.
    """

    name = "lens"
    hint = "Choose a cell for the ten likeliest tokens there and the course of one over the layers"

    def __init__(
        self,
        source: Run | xr.DataTree | xr.Dataset,
        weights: Any = None,
        *,
        vocabulary: Any = None,
        point: str | None = None,
        sample: int | None = None,
        measure: str | None = None,
        first: int | None = None,
    ) -> None:
        run, self._activations = source_of(source, what="Lens")
        self._weights, self._vocabulary = weights, vocabulary
        self._seen: Any = None
        self._kept: dict[Any, xr.Dataset] = {}
        given = ([] if run is not None else ["activations"]) + (["weights"] if weights is not None else [])
        given += ["vocabulary=vocabulary"] if vocabulary is not None else []
        caller = "run.lens" if run is not None else "mappnb.widgets.Lens"
        changes = {"point": point, "sample": sample, "measure": measure, "first": first}
        super().__init__(caller, given, run, changes)
        self._picture()

    def reload(self) -> None:
        """Take the run's activations anew."""
        if self._run is not None:
            self._activations = self._run.activations
            self._kept.clear()
            self._seen = None

    # -------------------------------------------------------------------------------------------------------- API
    @property
    def lens(self) -> xr.Dataset:
        """The lens of what is shown (:func:`mappnb.interp.logit_lens`)."""
        return self._lens(self._where)

    def select(self, *, layer: int, token: int, follow: int | None = None) -> pd.DataFrame:
        """Select a layer and a token (slot); ``follow``: id of the token whose course is shown. Returns the likeliest tokens."""
        found = self.lens
        layers, slots = found["layer"].values.tolist(), found["token"].values.tolist()
        for what, value, known in (("layer", layer, layers), ("token", token, slots)):
            if value not in known:
                raise MappnbError(f"no {what} {value} is shown; there are {known[0]} to {known[-1]}")
        pick: Pick = {"panel": "grid", "row": len(layers) - 1 - layers.index(layer), "col": slots.index(token)}
        return self._select(pick if follow is None else {**pick, "token": follow})

    def describe(self) -> str:
        """Return the view in one stable line."""
        data = self._data(self._where["point"])
        s = data.sizes
        return f"Lens({s['layer']} layers, {s['token']} tokens, {s.get('sample', 1)} samples)"

    # ------------------------------------------------------------------------------------------------- the picture
    def choices(self, ask: Chooser) -> None:
        """Sample, point, measure and window."""
        known = {str(v) for ds in streams_of(self._activations).values() for v in ds.data_vars}
        points = [p for p in LENS_POINTS if p in known]
        if not points:
            stream_with(self._activations, "resid_post")  # raises: says what there is
        point = ask("point", "Point", [(p, p) for p in points], "resid_post")
        data = self._data(point)
        ask("sample", "Sample", sample_choices(data))
        ask("measure", "Colour", list(MEASURES.items()), "probability")
        count = data.sizes["token"]
        ask("first", "Tokens", [(at, f"{at} to {min(at + WIDE, count) - 1}") for at in range(0, count, WIDE)])

    def picture(self, where: Mapping[str, Any]) -> Picture:
        """Return the grid of tokens."""
        found = self._lens(where).isel(sample=0)
        measure = where["measure"]
        values = self._measure(found, measure)[::-1]
        low, high = _ends(values, measure)
        layers = found["layer"].values[::-1]
        texts = found["top_text"].isel(rank_k=0).values[::-1]
        grid = Grid(
            key="grid",
            title=MEASURES[measure],
            texts=texts,
            values=values,
            rows=[f"{int(x)}" for x in layers],
            columns=token_names(self._window(where), 0),
            low=low,
            high=high,
            titles=self._titles(found),
            x_label="layer",
        )
        caption = f"Each cell: the likeliest next token by {where['point']} of the layer, through the last norm and the unembedding"
        return Picture([grid], f"{caption}; columns: the token that was read. Hatched: padding, or not recorded.")

    def _titles(self, found: xr.Dataset) -> Array:
        """Return the three likeliest tokens of each cell in words, the last layer on top."""
        texts, shares = found["top_text"].values[::-1], found["probability"].values[::-1]
        rows, cols = texts.shape[:2]
        out = np.empty((rows, cols), object)
        layers = found["layer"].values[::-1]
        for r in range(rows):
            for c in range(cols):
                few = [f"{t!r} {p:.2f}" for t, p in zip(texts[r, c, :3], shares[r, c, :3], strict=True) if t]
                out[r, c] = f"layer {int(layers[r])}: {', '.join(few)}" if few else "nothing there"
        return out

    def detail(self, where: Mapping[str, Any], pick: Pick) -> Detail:
        """Return the likeliest tokens of a cell, and the course of one of them."""
        found = self._lens(where).isel(sample=0)
        rows, cols = found.sizes["layer"], found.sizes["token"]
        row, col = pick.get("row", -1), pick.get("col", -1)
        if pick.get("panel") != "grid" or not (0 <= row < rows and 0 <= col < cols):
            raise MappnbError(f"no cell {pick}; there are {rows} layers and {cols} tokens")
        cell = found.isel(layer=rows - 1 - row, token=col)
        layer, slot = int(cell["layer"]), int(cell["token"])
        ids = [int(i) for i in cell["top_id"].values if i >= 0]
        read = token_names(self._window(where), 0)[col]
        title = f"layer {layer}, after {read} ({slot})"
        if not ids:
            return Detail(title, [("there", "nothing: padding, or not recorded")], [], pd.DataFrame())
        follow = int(pick.get("token", ids[0]))
        course = self._course(where, col, follow)
        return Detail(title, self._cell_fields(cell, course), self._panels(cell, pick, course), self._frame(cell))

    def _cell_fields(self, cell: xr.Dataset, course: xr.Dataset) -> list[tuple[str, str]]:
        fields = [
            ("entropy", f"{float(cell['entropy']):.3f} nat"),
            ("from the last layer", f"{float(cell['kl']):.3f} nat"),
        ]
        if int(cell["target_id"]) >= 0:
            said = f"{cell['target_text'].item()} · {number_text(float(cell['target_probability']))} · rank {int(cell['target_rank'])}"
            fields.append(("next token", said))
        return [*fields, ("followed", str(course["target_text"].values.item()))]

    def _panels(self, cell: xr.Dataset, pick: Pick, course: xr.Dataset) -> list[Any]:
        rows, picks = [], []
        for i, text, share in zip(
            cell["top_id"].values, cell["top_text"].values, cell["probability"].values, strict=True
        ):
            if i >= 0:
                rows.append([str(text), number_text(float(share))])
                picks.append({**pick, "token": int(i)})
        top = Table("top", "Likeliest here: choose one to follow it", ("token", "probability"), rows, picks, "", (1,))
        x = course["layer"].values.astype(np.float64)
        followed = str(course["target_text"].values.item())
        share = Lines(
            "share",
            f"Probability of {_quoted(followed)}",
            x,
            [("p", course["target_probability"].values)],
            "layer",
            "probability",
        )
        rank = Lines(
            "rank", "Its rank, 1: likeliest", x, [("rank", course["target_rank"].values + 1.0)], "layer", "rank", True
        )
        return [top, share, rank, self._by_layer(course)]

    def _by_layer(self, course: xr.Dataset) -> Table:
        rows = []
        for at in range(course.sizes["layer"])[::-1]:
            one = course.isel(layer=at)
            texts = " ".join(str(t).strip() or "·" for t in one["top_text"].values[:4])
            rows.append(
                [
                    str(int(one["layer"])),
                    texts,
                    number_text(float(one["target_probability"])),
                    str(int(one["target_rank"])),
                ]
            )
        return Table("layers", "By layer", ("layer", "likeliest", "followed", "rank"), rows, (), "", (2, 3))

    @staticmethod
    def _frame(cell: xr.Dataset) -> pd.DataFrame:
        names = ("top_id", "top_text", "probability", "log_probability")
        frame = pd.DataFrame({n: cell[n].values for n in names})
        return frame.assign(layer=int(cell["layer"]), token=int(cell["token"]))[frame["top_id"] >= 0]

    def places(self) -> Iterator[tuple[dict[str, Any], list[Pick]]]:
        """Yield what is shown, with a pick of each cell of the last layer, then the other colours and windows."""
        found = self.lens
        rows, cols = found.sizes["layer"], found.sizes["token"]
        last = [{"panel": "grid", "row": 0, "col": c} for c in range(cols)]
        middle = [{"panel": "grid", "row": r, "col": cols - 2} for r in range(1, rows) if cols > 1]
        yield {}, []
        for measure in MEASURES:
            yield {"measure": measure}, []
        yield {}, [*last, *middle]
        for first in self.options.get("first", []):
            yield {"first": first}, []
        for sample in self.options.get("sample", [])[:20]:
            yield {"sample": sample}, []

    # ------------------------------------------------------------------------------------------------------ helpers
    def _data(self, point: str) -> xr.Dataset:
        data = stream_with(self._activations, point)
        return data if "sample" in data.dims else data.expand_dims("sample")

    def _window(self, where: Mapping[str, Any], more: int = 0) -> xr.Dataset:
        """Return the sample and tokens that are shown, and ``more`` tokens."""
        data = self._data(where["point"])
        return data.isel(sample=[where["sample"]], token=slice(where["first"], where["first"] + WIDE + more))

    def _source(self) -> Any:
        """Return where weights come from: given, or the tree that the points are of."""
        if self._weights is not None:
            return self._weights
        return self._activations if isinstance(self._activations, xr.DataTree) else None

    def _words(self) -> Any:
        """Return the vocabulary: given, the live model's, or what all recorded tokens tell."""
        if self._vocabulary is not None or not isinstance(
            self._weights, (type(None), xr.Dataset, xr.DataTree, Mapping)
        ):
            return self._vocabulary
        if self._seen is None:
            data = self._data(self._where["point"])
            self._seen = vocabulary_of(data.isel(sample=slice(0, MOST_READ)))
        return self._seen

    def _lens(self, where: Mapping[str, Any]) -> xr.Dataset:
        key = where["point"], where["sample"], where["first"]
        if key not in self._kept:
            part = self._window(where, more=1)  # the token after the last one shown is its next
            found = logit_lens(part, self._source(), point=where["point"], top=TOP, vocabulary=self._words())
            self._kept[key] = found.isel(token=slice(0, WIDE))
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def _course(self, where: Mapping[str, Any], col: int, token: int) -> xr.Dataset:
        part = self._window(where).isel(token=[col])
        found = logit_lens(part, self._source(), point=where["point"], top=4, target=token, vocabulary=self._words())
        return found.isel(sample=0, token=0)

    @staticmethod
    def _measure(found: xr.Dataset, measure: str) -> Array:
        if measure == "probability":
            return np.asarray(found["probability"].isel(rank_k=0).values)
        if measure == "rank":
            rank = np.asarray(found["target_rank"].values, np.float64)
            return np.where(rank >= 0, np.log10(1 + np.maximum(rank, 0)), np.nan)
        return np.asarray(found[measure].values)


def _ends(values: Array, measure: str) -> tuple[float, float]:
    if "probability" in measure:
        return 0.0, 1.0
    there = values[np.isfinite(values)]
    return 0.0, float(there.max()) if there.size and there.max() > 0 else 1.0


def _quoted(text: str) -> str:
    return f"“{text}”"
