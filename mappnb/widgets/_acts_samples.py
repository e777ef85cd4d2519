"""Samples and tokens of a stream in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

__all__ = ["sample_choices", "sample_label", "token_names"]

MOST_LISTED = 500
"""Samples in a list."""


def sample_label(data: xr.Dataset, at: int) -> str:
    """Return a sample in words: step and prompt, or step and place in the batch."""
    said = [f"step {int(np.atleast_1d(data['step'].values)[at])}"] if "step" in data.coords else []
    prompt = str(np.atleast_1d(data["prompt"].values)[at]) if "prompt" in data.coords else ""
    if prompt:
        said.append(prompt if len(prompt) <= 40 else f"{prompt[:38]}…")
    else:
        said.append(f"sample {at}")
    return " · ".join(said)


def sample_choices(data: xr.Dataset) -> list[tuple[Any, str]]:
    """Return the samples of a stream as choices; of very many the first."""
    return [(at, sample_label(data, at)) for at in range(min(data.sizes.get("sample", 1), MOST_LISTED))]


def token_names(data: xr.Dataset, at: int) -> list[str]:
    """Return the texts of the tokens of a sample, or their slots."""
    if "token_text" in data.variables:
        values = data["token_text"]
        values = values.isel(sample=at) if "sample" in values.dims else values
        return [str(t) for t in values.values]
    slots = data["token"].values if "token" in data.coords else np.arange(data.sizes["token"])
    return [str(int(s)) for s in slots]
