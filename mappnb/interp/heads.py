"""What each attention head looks at: entropy, first token, token before, repeats and what followed them; and which heads do it most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.capture.activations.head_stats import DIAGONALS, STATISTICS
from mappnb.errors import InterpError, SchemaError, did_you_mean
from mappnb.interp._attention_math import Bools, Floats, Ints, softmax_rows
from mappnb.interp._attention_source import Source
from mappnb.interp._choices import places_of_samples
from mappnb.interp.attention import Part, Work

__all__ = ["find_heads", "head_statistics"]


def head_statistics(
    activations: xr.Dataset | xr.DataTree,
    *,
    layer: int | Iterable[int] | None = None,
    head: int | Iterable[int] | None = None,
    sample: int | Iterable[int] | None = None,
) -> xr.Dataset:
    """Return what each head does, averaged over the queries of each sample.

    Parameters
    ----------
    activations : Dataset or DataTree
        With ``q_rot`` and ``k_rot``, as for `attention_pattern`; ``token_id`` for ``duplicate_token`` and ``induction``, which are NaN
        without it.
    layer, head : int, several, or None
        Global numbers; None = all.
    sample : int, several, or None
        Positions; None = all.

    Returns
    -------
    Dataset, dims (sample, layer, head)
        Each an average over those queries that have such a key; NaN where a sample has none. Padding and rows that are not complete are
        left out.

        =================  ===========================================================  ==============================
        variable           meaning                                                      queries
        =================  ===========================================================  ==============================
        entropy            ``-sum(p ln p)``, nats; the share of a sink is one more key  all
        bos_mass           mass on the first token that is not padding                  all after the first
        previous_token     mass on the token before                                     all after the first
        duplicate_token    mass on earlier tokens equal to the query's                  with such a token
        induction          mass on tokens that follow an earlier equal token            with such a token before them
        diagonal_0 to _4   mass on the key that many tokens before the query            with such a key
        =================  ===========================================================  ==============================

        ``queries`` (statistic, sample, layer, head) counts them.

    Raises
    ------
    SchemaError
        If no stream holds both points, or facts of the model are missing.
    InterpError
        For a layer, head or sample that is not there.

    Notes
    -----
    The three circuits are those of TransformerLens' ``head_detector.py`` (previous-token, duplicate-token and induction heads; Elhage et
    al. 2021; Olsson et al., arXiv:2209.11895), which divides by *all* queries: a perfect induction head then scores one half on a text
    that comes twice. Here a query without a target does not count, so that 1 means: always. Targets are where the tokens say, whether or
    not a window lets the head see them. Patterns are computed tile by tile and not kept. `mappnb.capture.activations.head_stats` is the
    twin inside the job (mode ``"heads"``).
    """
    source = Source.open(activations, "q_rot", "k_rot")
    samples = places_of_samples(sample, source.num_samples)
    layers, heads = source.check_layers(layer), source.check_heads(head)
    shape = len(samples), len(layers), len(heads)
    sums: dict[str, Floats] = {name: np.zeros(shape) for name in STATISTICS}
    counts = np.zeros((len(STATISTICS), *shape), np.int64)
    for at, number in enumerate(samples):
        work = Work.of(source, layers, heads, number, None, source.points)
        targets = _Targets.of(work)
        for depth, one in enumerate(layers):
            for place, part in enumerate(work.parts(one, source.read(one, heads, number))):
                _add(part, targets, sums, counts, (at, depth, place))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = {name: sums[name] / counts[row] for row, name in enumerate(STATISTICS)}
    return _labelled(source, means, counts, samples, layers, heads)


def find_heads(
    statistics: xr.Dataset, *, kind: str = "induction", top: int | None = 10, limit: float | None = None
) -> pd.DataFrame:
    """Return the heads that do one thing most.

    Parameters
    ----------
    statistics : Dataset, dims (sample, layer, head)
        From `head_statistics`, or a recorded stream of mode ``"heads"``.
    kind : str
        One of its variables; for ``"entropy"`` the least comes first.
    top : int or None
        How many heads; None = all.
    limit : float, optional
        Heads of a lower score are left out (entropy: of a higher one).

    Returns
    -------
    DataFrame
        ``layer``, ``head``, ``score`` (mean over samples), ``least`` and ``most`` (over samples), ``samples`` (that have a score).

    Raises
    ------
    InterpError
        For a kind that is not there.
    """
    known = [
        str(name)
        for name in statistics.data_vars
        if {"layer", "head"} <= set(statistics[name].dims) and str(name) != "queries"
    ]
    if kind not in known:
        raise InterpError(
            f"heads: no statistic {kind!r}; known: {', '.join(known) or 'none'}{did_you_mean(kind, known)}"
        )
    values = statistics[kind]
    if f"{kind}_present" in statistics.coords:  # a stream of the job: what no rank wrote is 0 there
        values = values.where(statistics.coords[f"{kind}_present"])
    values = values if "sample" in values.dims else values.expand_dims("sample")
    table = np.asarray(values.transpose("sample", "layer", "head").values, np.float64)
    counted = np.isfinite(table).sum(axis=0)
    some = np.where(np.isfinite(table), table, 0.0)
    layers, heads = np.meshgrid(_numbers(statistics, "layer"), _numbers(statistics, "head"), indexing="ij")
    frame = pd.DataFrame(
        {
            "layer": layers.ravel(),
            "head": heads.ravel(),
            "score": (some.sum(axis=0) / np.maximum(counted, 1)).ravel(),
            "least": np.where(np.isfinite(table), table, np.inf).min(axis=0).ravel(),
            "most": np.where(np.isfinite(table), table, -np.inf).max(axis=0).ravel(),
            "samples": counted.ravel(),
        }
    )
    frame = frame[frame["samples"] > 0]
    if limit is not None:
        frame = frame[frame["score"] <= limit if kind == "entropy" else frame["score"] >= limit]
    frame = frame.sort_values(["score", "layer", "head"], ascending=[kind == "entropy", True, True], ignore_index=True)
    return frame if top is None else frame.head(top)


class _Targets:
    """Where the tokens of one sample say that a head may look."""

    def __init__(self, slots: Ints, mask: Bools, ids: Ints | None) -> None:
        self.slots, self.mask, self.ids = slots, mask, ids
        self.first = int(np.argmax(mask)) if mask.any() else 0
        self.before = {offset: self._before(offset) for offset in range(DIAGONALS)}

    @classmethod
    def of(cls, work: Work) -> _Targets:
        ids = work.source.of_sample("token_id", work.sample)
        if ids is not None and ids.dtype.kind not in "iu":
            raise SchemaError(f"activations: token_id is {ids.dtype}; expected whole numbers")
        return cls(work.source.slots, work.mask, None if ids is None else ids.astype(np.int64))

    def _before(self, offset: int) -> Ints:
        """Position of the key that is ``offset`` slots before each query; -1 where there is none."""
        places = np.searchsorted(self.slots, self.slots - offset)
        found = (self.slots[places] == self.slots - offset) & self.mask[places]
        return np.where(found, places, -1)

    def repeats(self, rows: slice) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """Find keys equal to the query's token before it, and the keys after these: as pairs of row and key."""
        assert self.ids is not None
        equal = self.ids[rows, None] == self.ids[None, :]
        equal &= (self.mask & (self.ids >= 0))[None, :]
        equal &= self.slots[None, :] < self.slots[rows, None]
        row, key = np.nonzero(equal)
        next_one: Bools = np.append(self.mask[1:] & (np.diff(self.slots) == 1), False)
        follows = next_one[key]
        return (row, key), (row[follows], key[follows] + 1)


def _add(part: Part, targets: _Targets, sums: dict[str, Floats], counts: Ints, at: tuple[int, int, int]) -> None:
    """Add one head of one layer of one sample."""
    names = list(STATISTICS)

    def note(name: str, mass: Floats, queries: Bools) -> None:
        sums[name][at] += mass[queries].sum()
        counts[(names.index(name), *at)] += int(queries.sum())

    for rows, columns, scores in part.tiles():
        near, rest = softmax_rows(scores, part.head.sink)
        pattern = np.zeros((len(near), len(targets.slots)))
        pattern[:, columns] = near
        real = targets.mask[rows] & part.complete[rows]
        note("entropy", -_xlogx(pattern).sum(axis=1) - _xlogx(rest), real)
        note("bos_mass", pattern[:, targets.first], real & (part.queries[rows] > targets.slots[targets.first]))
        for offset, places in targets.before.items():
            mass = np.take_along_axis(pattern, np.maximum(places[rows], 0)[:, None], axis=1)[:, 0]
            there = real & (places[rows] >= 0)
            note(f"diagonal_{offset}", mass, there)
            if offset == 1:
                note("previous_token", mass, there)
        if targets.ids is not None:
            for name, (row, key) in zip(("duplicate_token", "induction"), targets.repeats(rows), strict=True):
                found: Floats = np.bincount(row, weights=pattern[row, key], minlength=len(pattern)).astype(float)
                note(name, found, real & (np.bincount(row, minlength=len(pattern)) > 0))


def _xlogx(p: Floats) -> Floats:
    logs = np.zeros_like(p)
    np.log(p, out=logs, where=p > 0)
    return logs * p


def _numbers(data: xr.Dataset, dim: str) -> Any:
    return data[dim].values if dim in data.coords else np.arange(data.sizes[dim])


def _labelled(
    source: Source, means: dict[str, Floats], counts: Ints, samples: list[int], layers: list[int], heads: list[int]
) -> xr.Dataset:
    dims = ("sample", "layer", "head")
    coords: dict[str, Any] = {"layer": layers, "head": heads}
    for name, values in source.data.coords.items():
        if values.dims == ("sample",):
            coords[str(name)] = ("sample", np.asarray(values.values)[samples])
    data: dict[str, Any] = {
        name: (dims, values, {"long_name": STATISTICS[name], "units": "nats" if name == "entropy" else "1"})
        for name, values in means.items()
    }
    data["queries"] = (("statistic", *dims), counts, {"long_name": "queries that the average is over", "units": "1"})
    return xr.Dataset(data, {**coords, "statistic": np.array(list(means), object)}, {"model": source.facts})
