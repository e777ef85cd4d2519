"""Tables and labelled arrays that the attention view gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError, did_you_mean
from mappnb.widgets._attn_source import Score, Tokens
from mappnb.widgets._attn_tokens import shown_all
from mappnb.widgets._attn_where import Where

__all__ = ["head_table", "sample_at", "selected_table", "with_tokens"]

Array = np.ndarray[Any, Any]

LEAST_LISTED = 0.01
"""Weights of a whole head are listed from here on, or from the threshold."""


def head_table(layers: Sequence[int], heads: Sequence[int], scores: Sequence[Score]) -> pd.DataFrame:
    """Return a row per head: ``layer``, ``head``, and each score."""
    columns: dict[str, Any] = {"layer": np.repeat(layers, len(heads)), "head": np.tile(heads, len(layers))}
    return pd.DataFrame(columns | {s.name: s.values.reshape(-1) for s in scores})


def with_tokens(values: Array, tokens: Tokens, *, layer: int, head: int, sample: int) -> xr.DataArray:
    """Return a pattern with its labels: ``query`` and ``key`` are token slots."""
    texts = np.array(shown_all(tokens.texts) or [""], object)[: len(tokens)]
    slots = tokens.slots
    coords = {"query": slots, "key": slots, "query_token": ("query", texts), "key_token": ("key", texts)}
    facts = {"layer": layer, "head": head, "sample": sample}
    attrs = {"units": "1", "long_name": "attention"}
    return xr.DataArray(values, coords={**coords, **facts}, dims=("query", "key"), name="attention", attrs=attrs)


def selected_table(patterns: Sequence[xr.DataArray], where: Where) -> pd.DataFrame:
    """Return the weights of one query, the largest first; without one those of all, from the threshold on."""
    pattern = patterns[0]
    values = pattern.values
    if where.query is not None:
        at = int(np.flatnonzero(pattern["query"].values == where.query)[0])
        key = np.argsort(-np.nan_to_num(values[at], nan=-1.0), kind="stable")
        query = np.full(len(key), at)
    else:
        query, key = np.nonzero(values >= max(where.threshold, LEAST_LISTED))
    frame = pd.DataFrame(
        {
            "layer": where.layer, "head": where.head,
            "query": pattern["query"].values[query], "query_token": pattern["query_token"].values[query],
            "key": pattern["key"].values[key], "key_token": pattern["key_token"].values[key],
            "attention": values[query, key],
        }
    )  # fmt: skip
    if len(patterns) > 1:
        other = patterns[1].values[query, key]
        frame = frame.assign(attention_b=other, difference=values[query, key] - other)
    return frame


def sample_at(samples: pd.DataFrame, sample: int | str, step: int | None) -> int:
    """Return the position of a sample: by its number (with ``step``, counted within that step), or by its prompt."""
    here = samples if step is None else samples[samples["step"] == step]
    if not len(here):
        known = sorted(set(samples["step"].tolist()))
        raise MappnbError(
            f"no sample of step {step}; there are steps {', '.join(map(str, known[:20]))}{' ...' if len(known) > 20 else ''}"
        )
    if isinstance(sample, str):
        found = here.index[here["prompt"] == sample]
        if not len(found):
            known_ = sorted(set(here["prompt"]) - {""})
            said, hint = "".join(f"; {p!r:.60}" for p in known_[:5]), did_you_mean(sample, known_)
            raise MappnbError(f"no prompt {sample!r}; there are {len(known_)} prompts{said}{hint}")
        return int(found[0])
    if not 0 <= sample < len(here):
        raise MappnbError(
            f"sample is {sample}; there are {len(here)} samples{f' of step {step}' if step is not None else ''}, from 0"
        )
    return int(here.index[sample])
