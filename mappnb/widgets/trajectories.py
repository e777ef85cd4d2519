"""Trajectories: activation vectors in the plane of their principal components, joined over layers, tokens, samples or steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.activation_points import POINTS, WEIGHTS
from mappnb.activations import streams_of
from mappnb.errors import MappnbError, SchemaError
from mappnb.interp.trajectory import CENTERS, OVER, lines_of, trajectories
from mappnb.run import Run
from mappnb.widgets._acts_choices import Chooser
from mappnb.widgets._acts_panels import Lines, Scatter, Table, number_text
from mappnb.widgets._acts_samples import sample_choices, sample_label
from mappnb.widgets._acts_view import ActivationsView, Detail, Pick, Picture, source_of

__all__ = ["Trajectories"]

Array = np.ndarray[Any, Any]
COMPONENTS = 6
MOST_VECTORS = 20_000
"""Of which all samples are joined by themselves; of more, the first sample."""
MOST_POINTS = 4_000
"""Drawn: of more, whole lines are left out evenly."""
NEAREST = 8
_CENTER_WORDS = {"all": "the mean of all", "layer": "the mean of each layer", "none": "nothing"}


class Trajectories(ActivationsView):
    """Vectors of a point as points in a plane, joined to lines.

    Parameters
    ----------
    source : Run, DataTree or Dataset
        A run that captured vectors, its ``run.activations``, or one stream of them.
    point : str, optional
        Such as ``"resid_post"``, ``"z"``, or a sketch.
    over : str, optional
        ``"layer"``, ``"token"``, ``"sample"`` or ``"step"``: what a line runs along.
    sample : int or str, optional
        Position of one sample, or ``"all"``.
    layer : int or str, optional
        One layer, or ``"all"``.
    head : int, optional
        Of points of heads.
    x, y : int, optional
        Components, from 1.
    colour : str, optional
        ``"layer"``, ``"token"``, ``"sample"`` or ``"step"``.
    center : str, optional
        ``"all"``, ``"layer"`` or ``"none"``: whose mean is taken off.
    standardize : str, optional
        ``"no"`` or ``"yes"``: entries divided by their standard deviation.

    Raises
    ------
    MappnbError
        If there are no vectors, or a choice does not exist.

    Notes
    -----
    :func:`mappnb.interp.trajectories`, worked out once for each set of vectors.
    """

    name = "trajectories"
    hint = "Choose a point for its token, its coordinates and its neighbours"

    def __init__(self, source: Run | xr.DataTree | xr.Dataset, **choices: Any) -> None:
        run, self._activations = source_of(source, what="Trajectories")
        self._kept: dict[Any, xr.Dataset] = {}
        self._flat: dict[str, Any] = {}
        caller = "run.trajectories" if run is not None else "mappnb.widgets.Trajectories"
        super().__init__(caller, [] if run is not None else ["activations"], run, choices)

    def reload(self) -> None:
        """Take the run's activations anew."""
        if self._run is not None:
            self._activations = self._run.activations
            self._kept.clear()

    # -------------------------------------------------------------------------------------------------------- API
    @property
    def found(self) -> xr.Dataset:
        """What is drawn (:func:`mappnb.interp.trajectories`): projection, basis, explained ratio."""
        return self._found(self._where)

    @property
    def table(self) -> pd.DataFrame:
        """A row per point drawn: its place, token, components, line and order."""
        flat = self._points(self._where)
        frame = pd.DataFrame(
            {n: flat[n] for n in ("sample", "layer", "slot", "step", "text", "line", "order") if n in flat}
        )
        return frame.assign(**{f"pc{i + 1}": flat["projection"][:, i] for i in range(flat["projection"].shape[1])})

    def describe(self) -> str:
        """Return the view in one stable line."""
        return f"Trajectories({self._where['point']} over {self._where['over']}, {len(streams_of(self._activations))} streams)"

    # ------------------------------------------------------------------------------------------------- the picture
    def choices(self, ask: Chooser) -> None:
        """Point, what is joined, which vectors, components and colours."""
        known = self._known()
        if not known:
            raise SchemaError(
                "activations: no vectors were captured; record e.g. mappnb.Capture(['resid_post'], layers='every 4')"
            )
        point = ask("point", "Point", [(p, p) for p in known], "resid_post")
        data = known[point]
        dims = data[point].dims
        here = [o for o in OVER if o in dims or (o == "step" and "step" in data.coords)]
        over = ask("over", "Lines over", [(o, f"{o}s") for o in here], "layer")
        size = int(np.prod([data.sizes[d] for d in dims[:-1]]))
        samples = [("all", "all"), *sample_choices(data)] if data.sizes.get("sample", 1) > 1 else [("all", "all")]
        joined = size <= MOST_VECTORS or over in ("sample", "step")
        ask("sample", "Sample", samples, "all" if joined else 0)
        layers = [int(x) for x in data["layer"].values] if "layer" in dims else []
        ask("layer", "Layer", [("all", "all"), *((x, str(x)) for x in layers if len(layers) > 1)])
        heads = [d for d in ("head", "kv_head") if d in dims]
        ask("head", "Head", [(h, str(h)) for h in range(data.sizes[heads[0]])] if heads else [(-1, "–")])
        numbers = [(i + 1, str(i + 1)) for i in range(min(COMPONENTS, data[point].shape[-1]))]
        ask("x", "Across", numbers, 1)
        ask("y", "Up", numbers, 2)
        ask("colour", "Colour", [(o, o) for o in here], "layer" if "layer" in here and over != "sample" else here[-1])
        ask("center", "Take off", [(c, _CENTER_WORDS[c]) for c in CENTERS if c != "layer" or len(layers) > 1], "all")
        ask("standardize", "Standardise", [("no", "no"), ("yes", "yes")])

    def picture(self, where: Mapping[str, Any]) -> Picture:
        """Return the points."""
        flat = self._points(where)
        ratio = self._found(where)["explained_ratio"].values
        x, y = (min(where[a], len(ratio)) - 1 for a in ("x", "y"))
        name = {"token": "slot"}.get(where["colour"], where["colour"])
        scatter = Scatter(
            key="points",
            title=f"{where['point']}: components {x + 1} and {y + 1} explain {ratio[x] + (ratio[y] if y != x else 0):.0%}",
            x=flat["projection"][:, x],
            y=flat["projection"][:, y],
            line=flat["line"],
            order=flat["order"],
            colour=np.asarray(flat[name], np.float64),
            titles=flat["title"],
            x_label=f"component {x + 1} ({ratio[x]:.1%})",
            y_label=f"component {y + 1} ({ratio[y]:.1%})",
            colour_label=where["colour"],
        )
        said = f"{flat['count']:,} vectors in one basis; lines join one vector to the next over {where['over']}s."
        if flat["left"]:
            said += f" {flat['left']:,} points of whole lines are not drawn."
        spent = Lines(
            "explained",
            "Variance explained, by component",
            np.arange(1, len(ratio) + 1.0),
            [("share", ratio)],
            "component",
            "share",
        )
        return Picture([scatter, spent], said)

    def detail(self, where: Mapping[str, Any], pick: Pick) -> Detail:
        """Return what a point is, and its nearest neighbours."""
        flat = self._points(where)
        at = pick.get("index", -1)
        if pick.get("panel") != "points" or not 0 <= at < len(flat["x"]):
            raise MappnbError(f"no point {pick}; there are {len(flat['x'])}")
        projection = flat["projection"]
        away = np.linalg.norm(projection - projection[at], axis=1)
        near = [i for i in np.argsort(away, kind="stable")[: NEAREST + 1].tolist() if i != at][:NEAREST]
        rows = [[flat["title"][i], number_text(float(away[i]))] for i in near]
        picks = [{"panel": "points", "index": i} for i in near]
        title = f"Nearest, by {projection.shape[1]} components"
        table = Table("near", title, ("point", "distance"), rows, picks, "", (1,))
        fields = [("component " + str(i + 1), number_text(float(v), 4)) for i, v in enumerate(projection[at])]
        line = np.flatnonzero(flat["line"] == flat["line"][at])
        line = line[np.argsort(flat["order"][line], kind="stable")]
        frame = self.table.iloc[[at]] if where == self._where else pd.DataFrame()
        if "prompt" in flat:
            fields.insert(0, ("sample", flat["prompt"][at]))
        panels: list[Any] = [table]
        if len(line) > 1:
            pair = [
                (f"component {i}", projection[line, i - 1])
                for i in sorted({where["x"], where["y"]})
                if i <= projection.shape[1]
            ]
            course = Lines(
                "course", "Along its line", flat["order"][line].astype(float), pair, where["over"], "component"
            )
            panels.insert(0, course)
        return Detail(str(flat["title"][at]), fields, panels, frame)

    def places(self) -> Iterator[tuple[dict[str, Any], list[Pick]]]:
        """Yield what is drawn with some picks, then other components and lines."""
        count = len(self._points(self._where)["x"])
        yield {}, []
        for x, y in ((1, 2), (1, 3), (2, 3)):
            yield {"x": x, "y": y}, []
        for colour in self.options.get("colour", []):
            yield {"colour": colour}, []
        for over in self.options.get("over", []):
            yield {"over": over}, []
        yield {}, [{"panel": "points", "index": i} for i in range(0, count, max(1, count // 40))]

    # ------------------------------------------------------------------------------------------------------ helpers
    def _known(self) -> dict[str, xr.Dataset]:
        """Return the points that hold vectors, with their streams: whole ones before sketches."""
        out: dict[str, xr.Dataset] = {}
        for data in streams_of(self._activations).values():
            for name in map(str, data.data_vars):
                array = data[name]
                if name.removesuffix("_grad") not in POINTS or name in WEIGHTS or not {"token"} <= set(array.dims):
                    continue
                point = POINTS[name.removesuffix("_grad")]
                if name not in out or (array.dims[-1] == point.dims[-1] and out[name][name].dims[-1] != point.dims[-1]):
                    out[name] = data
        order = list(POINTS)
        return dict(sorted(out.items(), key=lambda kv: order.index(kv[0].removesuffix("_grad"))))

    def _found(self, where: Mapping[str, Any]) -> xr.Dataset:
        key = tuple(where[k] for k in ("point", "sample", "layer", "head", "center", "standardize"))
        if key not in self._kept:
            data = self._known()[where["point"]]
            heads = [d for d in ("head", "kv_head") if d in data[where["point"]].dims]
            if heads:
                data = data.isel({heads[0]: where["head"]})
            chosen: dict[str, Any] = {"sample": None if where["sample"] == "all" else where["sample"]}
            chosen["layers"] = None if where["layer"] == "all" else where["layer"]
            self._kept[key] = trajectories(
                data, point=where["point"], over=where["over"], components=COMPONENTS, center=where["center"],
                standardize=where["standardize"] == "yes", **chosen,
            )  # fmt: skip
            while len(self._kept) > 6:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def _points(self, where: Mapping[str, Any]) -> dict[str, Any]:
        """Return the points that are drawn as columns."""
        key = {k: v for k, v in where.items() if k not in ("x", "y", "colour")}
        if self._flat.get("key") != key:
            self._flat = {"key": key, **_columns(self._found(where), where["over"])}
        return self._flat


def _columns(found: xr.Dataset, over: str) -> dict[str, Any]:
    """Return the vectors that are there as columns; lines are whole."""
    values = found["projection"]
    dims = [str(d) for d in values.dims if d != "component"]
    line, order = lines_of(found, over)
    there = ~np.isnan(values.values).any(-1)
    lines = np.unique(line[there])
    every = max(1, -(-int(there.sum()) // MOST_POINTS))
    kept = there & np.isin(line, lines[::every] if every < len(lines) else lines[:1])
    at = np.nonzero(kept)
    place = dict(zip(dims, at, strict=True))
    out: dict[str, Any] = {
        "projection": values.values[kept], "x": values.values[kept][:, 0], "line": line[kept], "order": order[kept],
        "count": int(there.sum()), "left": int(there.sum() - kept.sum()),
    }  # fmt: skip
    zeros = np.zeros(len(out["line"]), np.int64)
    out["sample"] = place.get("sample", zeros)
    out["layer"] = found["layer"].values[place["layer"]] if "layer" in place else zeros
    out["slot"] = found["token"].values[place["token"]] if "token" in found.coords else place.get("token", zeros)
    out["step"] = found["step"].values[place["sample"]] if "step" in found.coords and "sample" in place else zeros
    if "token_text" in found.variables:
        out["text"] = found["token_text"].values[place["sample"], place["token"]]
    if "sample" in place:
        names = [sample_label(found, i) for i in range(found.sizes["sample"])]
        out["prompt"] = [names[i] for i in place["sample"].tolist()]
    out["title"] = [_title(out, i, found.sizes.get("sample", 1) > 1) for i in range(len(zeros))]
    return out


def _title(out: Mapping[str, Any], i: int, several: bool) -> str:
    text = f"“{out['text'][i]}” " if "text" in out else ""
    sample = f", {out['prompt'][i]}" if several and "prompt" in out else ""
    return f"{text}({int(out['slot'][i])}), layer {int(out['layer'][i])}{sample}"
