"""Queries, keys and values of one sample, read from recorded activations: which stream has them, which of them are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.activations import stream_with
from mappnb.capture.activations.attention_rules import AttentionRules, attention_rules, model_facts_of
from mappnb.errors import InterpError, SchemaError
from mappnb.interp._attention_math import Bools, Floats, Ints
from mappnb.interp._choices import labels_asked, place_of_sample

__all__ = ["LayerArrays", "Source"]


@dataclass(frozen=True, slots=True)
class LayerArrays:
    """What one layer of one sample has, in memory.

    Attributes
    ----------
    points : dict of str to array, dims (token, head or kv_head, head_dim)
        ``q_rot`` and whatever else was asked for.
    present : dict of str to bool array, dims (token, head or kv_head)
        Whether a rank's shard with it was there.
    """

    points: dict[str, Floats]
    present: dict[str, Bools]


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset that holds the points, and the facts of the model."""

    data: xr.Dataset
    facts: dict[str, Any]
    points: tuple[str, ...]
    sinks: xr.DataArray | None = None

    @classmethod
    def open(cls, activations: xr.Dataset | xr.DataTree, *points: str) -> Source:
        """Find the stream that holds ``points``.

        Raises
        ------
        SchemaError
            If there is none, or it has no facts of the model.
        """
        data, attrs = _stream(activations, points), dict(activations.attrs)
        for point in points:
            lacking = {"layer", "token", "head_dim"} - set(data[point].dims)
            if lacking:
                raise SchemaError(
                    f"activations: {point} has dims {data[point].dims}, without {', '.join(sorted(lacking))}; "
                    "expected (sample, layer, token, head or kv_head, head_dim), as run.activations has them"
                )
        weights = activations.children.get("weights") if isinstance(activations, xr.DataTree) else None
        sinks = None if weights is None or "sinks" not in weights.data_vars else weights.dataset["sinks"]
        return cls(data, model_facts_of({**attrs, **data.attrs}), points, sinks)

    @property
    def layers(self) -> list[int]:
        """Global numbers of the layers that are there."""
        return _labels(self.data, "layer")

    @property
    def heads(self) -> list[int]:
        """Numbers of the query heads that are there."""
        return _labels(self.data, "head")

    @property
    def num_samples(self) -> int:
        """Number of samples; 1 where the dataset is of one sample."""
        return int(self.data.sizes.get("sample", 1))

    @property
    def slots(self) -> Ints:
        """Global places of the tokens in the sequence, dims (token,)."""
        if "token" not in self.data.coords:
            return np.arange(self.data.sizes["token"], dtype=np.int64)
        slots = np.asarray(self.data["token"].values)
        if slots.dtype.kind not in "iu" or (np.diff(slots) <= 0).any():
            raise SchemaError(
                f"activations: coordinate token is {slots[:4]}...; expected places in the sequence, ascending"
            )
        return slots.astype(np.int64)

    def kv_head(self, head: int) -> int:
        """Return the number of the key head of ``head``: query heads of one group share it (Ainslie et al., arXiv:2305.13245)."""
        heads = int(self.facts.get("num_heads") or self.data.sizes["head"])
        groups = int(self.facts.get("num_kv_heads") or self.data.sizes.get("kv_head", heads))
        if heads % groups:
            raise SchemaError(f"model facts: {heads} heads do not divide into {groups} key heads")
        return head // (heads // groups)

    def rules(self, layer: int, sample: int = 0) -> AttentionRules:
        """Return the rules of ``layer``; learned sinks are those stored at the sample's step, or last before it."""
        known = {"num_heads": self.data.sizes["head"], "head_dim": self.data.sizes["head_dim"], **self.facts}
        if self.sinks is not None and layer in self.sinks["layer"].values:
            known["sinks"] = {layer: self._sinks_of(layer, sample).tolist()}
        return attention_rules(known, layer)

    def _sinks_of(self, layer: int, sample: int) -> Floats:
        assert self.sinks is not None
        step = self.of_sample("step", sample)
        steps = self.sinks["step"].values
        row = 0 if step is None else max(0, int(np.searchsorted(steps, int(step), side="right")) - 1)
        return np.asarray(self.sinks.isel(step=row).sel(layer=layer).values, np.float64)

    def check_layers(self, layer: int | Iterable[int] | None) -> list[int]:
        """Return the layers asked for, each of which is there."""
        return labels_asked("layer", layer, self.layers)

    def check_heads(self, head: int | Iterable[int] | None) -> list[int]:
        """Return the heads asked for, each of which is there."""
        return labels_asked("head", head, self.heads)

    def check_sample(self, sample: int) -> int:
        """Return the position of a sample, counted from 0."""
        return place_of_sample(sample, self.num_samples)

    def of_sample(self, name: str, sample: int) -> np.ndarray[Any, Any] | None:
        """Return a coordinate (sample, token) of one sample, or None where it is not there."""
        if name not in self.data.variables:
            return None
        values = self.data[name]
        return np.asarray((values.isel(sample=sample) if "sample" in values.dims else values).values)

    def mask(self, sample: int) -> Bools:
        """Return True for real tokens, dims (token,)."""
        mask = self.of_sample("mask", sample)
        return np.ones(self.data.sizes["token"], bool) if mask is None else mask.astype(bool)

    def told(self, sample: int) -> Bools:
        """Return whether anything is known of a token, dims (token,): a lost rank leaves -1 as id, and False as mask."""
        ids = self.of_sample("token_id", sample)
        return (
            np.ones(self.data.sizes["token"], bool)
            if ids is None or ids.dtype.kind not in "iu"
            else np.asarray(ids >= 0)
        )

    def read(self, layer: int, heads: Sequence[int], sample: int) -> LayerArrays:
        """Read one layer of one sample: the heads, and the key heads that they use."""
        kv_heads = self._kv_heads_of(heads)
        points: dict[str, Floats] = {}
        present: dict[str, Bools] = {}
        for point in self.points:
            part = self.data[point].isel(layer=self.layers.index(layer))
            part = part.isel(sample=sample) if "sample" in part.dims else part
            name = "kv_head" if "kv_head" in part.dims else "head"
            wanted = kv_heads if name == "kv_head" else heads
            known = _labels(self.data, name)
            part = part.isel({name: [known.index(number) for number in wanted]}).transpose("token", name, "head_dim")
            points[point] = np.asarray(part.values)
            present[point] = _present(self.data, point, part, name)
        return LayerArrays(points, present)

    def kv_index(self, heads: Sequence[int]) -> list[int]:
        """Return where the key head of each head is in what `read` gives for the same heads."""
        kv_heads = self._kv_heads_of(heads)
        return [kv_heads.index(self.kv_head(head)) for head in heads]

    def _kv_heads_of(self, heads: Sequence[int]) -> list[int]:
        kv_heads = sorted({self.kv_head(head) for head in heads})
        known = _labels(self.data, "kv_head") if "kv_head" in self.data.dims else _labels(self.data, "head")
        if lacking := sorted(set(kv_heads) - set(known)):
            raise InterpError(
                f"activations: no key head {lacking[0]}, which heads {list(heads)} use; found {known}. Record k_rot of it too"
            )
        return kv_heads


def _labels(data: xr.Dataset, dim: str) -> list[int]:
    if dim not in data.dims:
        raise SchemaError(f"activations: no dimension {dim!r}; found {', '.join(map(str, data.dims))}")
    return [int(label) for label in data[dim].values] if dim in data.coords else list(range(data.sizes[dim]))


def _present(data: xr.Dataset, point: str, part: xr.DataArray, heads: str) -> Bools:
    """Whether a shard was there, dims (token, head)."""
    shape = part.sizes["token"], part.sizes[heads]
    name = f"{point}_present"
    if name not in data.variables:
        return np.ones(shape, bool)
    there = part.coords[name] if name in part.coords else data[name]
    lost = [str(dim) for dim in there.dims if dim not in ("token", heads)]
    if lost:
        raise SchemaError(f"activations: {name} has dims {there.dims}; expected dims of {point}, without head_dim")
    whole = there.broadcast_like(part.isel(head_dim=0, drop=True)).transpose("token", heads)
    return np.asarray(whole.values, bool)


def _stream(activations: xr.Dataset | xr.DataTree, points: Sequence[str]) -> xr.Dataset:
    """Return the dataset, or the stream of the tree, that has all points."""
    if not isinstance(activations, xr.Dataset | xr.DataTree):
        kind = type(activations).__name__
        raise SchemaError(f"activations is {kind}; expected run.activations, or a Dataset with {' and '.join(points)}")
    return stream_with(activations, *points)
