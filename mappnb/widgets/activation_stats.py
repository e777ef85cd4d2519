"""Activation statistics over training: layer by step, what stands out, where NaN came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.activation_stats import STATS
from mappnb.errors import MappnbError
from mappnb.interp.drifting import drift, find_nan, outliers, statistics_of
from mappnb.run import Run
from mappnb.widgets._acts_choices import Chooser
from mappnb.widgets._acts_panels import Bars, Heat, Lines, Table, number_text
from mappnb.widgets._acts_view import ActivationsView, Detail, Pick, Picture, source_of
from mappnb.widgets.linking import Link, link
from mappnb.widgets.timeline import Timeline

__all__ = ["ActivationStats"]

Array = np.ndarray[Any, Any]
WORDS = {
    "absmax": "largest size", "std": "standard deviation", "mean": "mean", "var": "variance", "min": "least", "max": "greatest",
    "kurtosis": "kurtosis (normal: 3)", "skewness": "skewness", "sparsity": "fraction of zeros", "num_nan": "NaN values",
    "num_inf": "infinite values", "count": "finite values", "mean_shift": "shift of the mean since the first step, deviations",
    "log_variance_ratio": "ln of variance over that of the first step", "js": "change of distribution since the first step, bit",
}  # fmt: skip
SIGNED = ("mean", "skewness", "mean_shift", "log_variance_ratio", "min", "max")
MOST_OUTLIERS = 200
"""Rows of the list in the browser; the rest is in ``view.outliers``."""


class ActivationStats(ActivationsView):
    """Statistics of one point over all layers and steps, with what stands out anywhere.

    Parameters
    ----------
    source : Run, DataTree or Dataset
        A run that captured statistics, ``run.activations``, or its stream of statistics, dims (step, point, layer).
    point : str, optional
        Such as ``"resid_post"``.
    statistic : str, optional
        ``"absmax"``, ``"std"``, ``"kurtosis"``, ..., or a change since the first step: ``"mean_shift"``,
        ``"log_variance_ratio"``, ``"js"``.
    scale : str, optional
        ``"auto"``, ``"linear"`` or ``"log"``: how a value becomes a colour.

    Raises
    ------
    MappnbError
        If there are no statistics, or a choice does not exist.

    Notes
    -----
    What stands out is what :func:`mappnb.interp.outliers` tells; changes are those of :func:`mappnb.interp.drift`.
    """

    name = "stats"
    hint = "Choose a cell for its histogram and its course over the steps, or a row of the list to go to its cell"

    def __init__(
        self,
        source: Run | xr.DataTree | xr.Dataset,
        *,
        point: str | None = None,
        statistic: str | None = None,
        scale: str | None = None,
    ) -> None:
        run, found = source_of(source, what="ActivationStats")
        self._links: list[Link] = []
        self._take(found)
        caller = "run.activation_stats" if run is not None else "mappnb.widgets.ActivationStats"
        given = [] if run is not None else ["activations"]
        super().__init__(caller, given, run, {"point": point, "statistic": statistic, "scale": scale})

    def _take(self, found: xr.DataTree | xr.Dataset) -> None:
        self._stats = statistics_of(found).transpose("step", "point", "layer", ...).load()
        self._drift = drift(self._stats)
        self._outliers = outliers(self._stats)
        self._nan = find_nan(self._stats)

    def reload(self) -> None:
        """Take the run's statistics anew."""
        if self._run is not None:
            self._take(self._run.activations)

    # -------------------------------------------------------------------------------------------------------- API
    @property
    def outliers(self) -> pd.DataFrame:
        """What stands out (:func:`mappnb.interp.outliers`): NaN first, then the largest."""
        return self._outliers

    @property
    def nan(self) -> pd.DataFrame:
        """Where NaN and infinities are, in order (:func:`mappnb.interp.find_nan`): the first row is where they came from."""
        return self._nan

    def select(self, *, step: int, layer: int = -1, point: str | None = None) -> pd.DataFrame:
        """Select a cell; returns its statistics as a row."""
        if point is not None and point != self._where["point"]:
            self.set(point=point)
        steps, layers = self._stats["step"].values.tolist(), self._layers(self._where["point"])
        for name, value, known in (("step", step, steps), ("layer", layer, layers)):
            if value not in known:
                raise MappnbError(f"no {name} {value}; there are {known[0]} to {known[-1]}")
        return self._select({"panel": "heat", "row": self._row(layers, layer), "col": steps.index(step)})

    @property
    def window(self) -> slice:
        """Time of the selected step, else of all, in s on the run clock; of no length without a run."""
        if self._run is None:
            return slice(0.0, 0.0)
        table = self._run.steps
        step = self._picked_step()
        if step is not None:
            table = table.isel(step=np.flatnonzero(table["step"].values == step))
        start, end = (np.asarray(table[n].values) for n in ("start_ns", "end_ns"))
        there = (start >= 0) & (end >= 0)  # below 0: the rank has no such step, or not its end
        if not there.any():
            return slice(0.0, 0.0)
        return slice(float(start[there].min()) / 1e9, float(end[there].max()) / 1e9)

    def timeline(self, **options: Any) -> Timeline:
        """Return a timeline at the selected step, linked with this view; ``options`` as of :class:`Timeline`."""
        if self._run is None:
            raise MappnbError("a timeline needs the run: run.activation_stats()")
        made = Timeline(self._run, **{**self._timeline_options(), **options})
        self._links.append(link(self, made, share=("time",)))
        return made

    def _timeline_options(self) -> dict[str, Any]:
        span = self.window
        return {"time": slice(round(span.start, 6), round(span.stop, 6))} if span.stop > span.start else {}

    def follow_window(self, other: Any) -> None:
        """Move the selection to the first recorded step that ``other`` shows."""
        if self._run is None or self._pick is None:
            return
        table = self._run.steps
        begun = table["start_ns"].where(table["start_ns"] >= 0)
        start = np.asarray(begun.min("rank").values, np.float64) / 1e9
        inside = table["step"].values[(start >= other.window.start - 1e-9) & (start < other.window.stop)]
        steps = self._stats["step"].values
        there = np.flatnonzero(np.isin(steps, inside))
        if len(there) and self._picked_step() not in inside:
            pick = {**self._pick, "col": int(there[0])}
            self._pick, self._shown = pick, None
            self.tell("picked", pick=pick)

    def describe(self) -> str:
        """Return the view in one stable line."""
        s = self._stats.sizes
        layers = int((self._stats["layer"].values >= 0).sum())
        return f"ActivationStats({s['step']} steps, {s['point']} points, {layers} layers)"

    # ------------------------------------------------------------------------------------------------- the picture
    def choices(self, ask: Chooser) -> None:
        """Point, statistic and scale."""
        points = [str(p) for p in self._stats["point"].values]
        there = [(p, p) for p in points if self._layers(p)]
        ask("point", "Point", there, "resid_post")
        known = [n for n in WORDS if n in self._drift or (n in self._stats and n in STATS)]
        ask("statistic", "Show", [(n, WORDS[n]) for n in known], "absmax")
        ask("scale", "Scale", [("auto", "automatic"), ("linear", "linear"), ("log", "logarithmic")], "auto")

    def picture(self, where: Mapping[str, Any]) -> Picture:
        """Return the heatmap and the list of what stands out."""
        point, statistic = where["point"], where["statistic"]
        layers = self._layers(point)
        steps = [str(s) for s in self._stats["step"].values]
        values = self._values(point, statistic)
        rows = [str(x) if x >= 0 else point for x in layers[::-1]]
        heat = Heat(
            key="heat",
            title=f"{point}: {WORDS[statistic]}",
            values=values,
            rows=rows,
            columns=steps,
            x_label="step",
            y_label="layer" if layers != [-1] else "",
            row_titles=[f"layer {x}" if x >= 0 else point for x in layers[::-1]],
            column_titles=[f"step {s}" for s in steps],
            diverging=statistic in SIGNED and bool(np.nanmin(values, initial=0) < 0),
            log=self._log(values, where["scale"], statistic),
            bad=[(int(r), int(c)) for r, c in zip(*np.nonzero(self._bad(point)), strict=True)],
        )
        said = "Crosses: NaN or infinite values are in the cell; hatched: nothing recorded." if heat.bad else ""
        first = f"NaN came up first at {_place(self._nan.iloc[0])}. " if len(self._nan) else ""
        return Picture([heat], f"{first}{said}".strip(), [self._list()])

    def _list(self) -> Table:
        frame = self._outliers
        steps = self._stats["step"].values.tolist()
        picks: list[dict[str, Any]] = []
        rows: list[list[str]] = []
        groups = _grouped(frame)
        for row, count in groups[:MOST_OUTLIERS]:
            statistic = row["statistic"]
            layers = self._layers(row["point"])
            place = {"row": self._row(layers, row["layer"]), "col": steps.index(row["step"])}
            picks.append({"changes": {"point": row["point"], "statistic": statistic}, "panel": "heat", **place})
            score = "" if not np.isfinite(row["score"]) else f"{row['score']:.1f}"
            layer = str(row["layer"]) if row["layer"] >= 0 else "–"
            what = str(row["text"]).split(": ", 1)[1] + (f" (and {count - 1} other steps)" if count > 1 else "")
            rows.append([f"step {row['step']}", layer, row["point"], what, str(row["reason"]).replace("_", " "), score])
        more = len(groups) - len(rows)
        title = f"What stands out: {len(groups)}, at {len(frame)} cells" if len(frame) else "Nothing stands out"
        note = f"{more} more are in view.outliers." if more else ""
        return Table(
            "outliers", title, ("step", "layer", "point", "what", "reason", "score"), rows, picks, note, (1, 5)
        )

    def detail(self, where: Mapping[str, Any], pick: Pick) -> Detail:
        """Return the statistics of a cell, its histogram and its course."""
        point, layers = where["point"], self._layers(where["point"])
        row, col = pick.get("row", -1), pick.get("col", -1)
        if pick.get("panel") != "heat" or not (0 <= row < len(layers) and 0 <= col < self._stats.sizes["step"]):
            raise MappnbError(f"no cell {pick}; there are {len(layers)} rows and {self._stats.sizes['step']} columns")
        layer = layers[::-1][row]
        part = self._stats.sel(point=point, layer=layer)
        cell = part.isel(step=col)
        numbers: dict[str, Any] = {n: float(cell[n]) for n in STATS if n in cell}
        change = self._drift.sel(point=point, layer=layer).isel(step=col)
        numbers |= {str(n): float(change[n]) for n in change.data_vars}
        step = int(cell["step"])
        where_said = f"layer {layer} " if layer >= 0 else ""
        fields = [(WORDS.get(n, n), number_text(v, 4)) for n, v in numbers.items() if n not in ("min", "max", "var")]
        frame = pd.DataFrame([{"step": step, "layer": layer, "point": point, **numbers}])
        panels: list[Any] = [self._course(where, layer)]
        if "histogram" in cell and float(cell["count"]) > 0:
            panels.insert(0, self._histogram(part, col))
        return Detail(f"step {step}, {where_said}{point}", fields, panels, frame, self._run is not None)

    def _histogram(self, part: xr.Dataset, col: int) -> Bars:
        counts = np.asarray(part["histogram"].values, np.float64)
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        there = np.flatnonzero(np.asarray(part["count"].values) > 0)
        first = int(there[0])
        used = np.flatnonzero((share[col] > 0) | (share[first] > 0))
        keep = slice(int(used.min()), int(used.max()) + 1) if len(used) else slice(0, 1)
        steps = part["step"].values
        other = share[first, keep] if first != col else None
        legend = (f"step {steps[col]}", f"step {steps[first]}")
        x = np.asarray(part["bin"].values, np.float64)[keep]
        return Bars("histogram", "Sizes of the values", x, share[col, keep], "log2 |x|", "share", other, legend)

    def _course(self, where: Mapping[str, Any], layer: int) -> Lines:
        statistic = where["statistic"]
        source = self._drift if statistic in self._drift else self._stats
        values = np.asarray(source[statistic].sel(point=where["point"], layer=layer).values, np.float64)
        log = self._log(values, where["scale"], statistic)
        x = np.asarray(self._stats["step"].values, np.float64)
        return Lines("course", f"{WORDS[statistic]} over the steps", x, [(statistic, values)], "step", statistic, log)

    def places(self) -> Iterator[tuple[dict[str, Any], list[Pick]]]:
        """Yield what is looked at with its outliers, then other points and statistics."""
        table = self._list()
        here = self._where
        mine = [p for p in table.picks if p["changes"] == {k: here[k] for k in ("point", "statistic")}]
        plain = [{k: v for k, v in p.items() if k != "changes"} for p in mine[:8]]
        rows, cols = len(self._layers(here["point"])), self._stats.sizes["step"]
        some = [{"panel": "heat", "row": r, "col": cols - 1} for r in range(min(rows, 8))]
        yield {}, [*plain, *(p for p in some if p not in plain)]
        for pick in table.picks[:12]:
            yield pick["changes"], [{k: v for k, v in pick.items() if k != "changes"}]
        for point in self.options.get("point", []):
            for statistic in dict.fromkeys((here["statistic"], "absmax", "std", "kurtosis", "sparsity", "js")):
                yield {"point": point, "statistic": statistic}, []

    # ------------------------------------------------------------------------------------------------------ helpers
    def _layers(self, point: str) -> list[int]:
        count = self._stats["count"].sel(point=point).values
        bad = self._stats["num_nan"].sel(point=point).values + self._stats["num_inf"].sel(point=point).values
        there = ((count > 0) | (bad > 0)).any(0)
        return [int(x) for x in self._stats["layer"].values[there]]

    @staticmethod
    def _row(layers: list[int], layer: int) -> int:
        return len(layers) - 1 - layers.index(layer)  # the last layer is on top

    def _values(self, point: str, statistic: str) -> Array:
        source = self._drift if statistic in self._drift else self._stats
        part = source[statistic].sel(point=point, layer=self._layers(point)).transpose("layer", "step")
        there = self._stats["count"].sel(point=point, layer=self._layers(point)).transpose("layer", "step").values > 0
        values = np.asarray(part.values, np.float64)
        return np.where(there | (statistic in ("num_nan", "num_inf")), values, np.nan)[::-1]

    def _bad(self, point: str) -> Array:
        part = self._stats.sel(point=point, layer=self._layers(point)).transpose("layer", "step", ...)
        return np.asarray(part["num_nan"].values + part["num_inf"].values > 0)[::-1]

    @staticmethod
    def _log(values: Array, scale: str, statistic: str) -> bool:
        there = values[np.isfinite(values)]
        if not there.size or (there <= 0).any() or scale == "linear" or statistic in SIGNED:
            return False
        return scale == "log" or float(there.max()) > 30 * float(there.min())

    def _picked_step(self) -> int | None:
        return None if self._pick is None else int(self._stats["step"].values[self._pick["col"]])

    def on_timeline(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the Python line that opens a timeline at the step; timelines that are linked go there at once."""
        linked = [v for made in self._links for v in made.views if v is not self and not v.closed]
        if linked:
            self.changed("window")
        said = ", ".join(f"{k}={v!r}" for k, v in self._timeline_options().items())
        return {"text": f"run.timeline({said})", "linked": len(linked)}

    def release(self) -> None:
        """Let go of the data and the links."""
        for made in self._links:
            made.unlink()
        self._links.clear()
        super().release()


def _grouped(frame: pd.DataFrame) -> list[tuple[dict[str, Any], int]]:
    """Return the first of the rows that differ only by step, and how many there are."""
    found: dict[Any, list[Any]] = {}
    for row in frame.to_dict("records"):
        key = row["layer"], row["point"], row["reason"], row["statistic"]
        found.setdefault(key, [row, 0])[1] += 1
    return [(row, count) for row, count in found.values()]


def _place(row: Any) -> str:
    layer = f"layer {int(row['layer'])} " if int(row["layer"]) >= 0 else ""
    return f"step {int(row['step'])}, {layer}{row['point']}"
