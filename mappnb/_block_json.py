"""Metadata of a block file as zarr format 3 has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

__all__ = ["CLEVEL", "array_json", "group_json", "root_json"]

CLEVEL: Final = 1
"""Compression level of zstd."""


def group_json(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a group."""
    return {"attributes": dict(attrs), "zarr_format": 3, "node_type": "group"}


def root_json(attrs: Mapping[str, Any], streams: list[str], arrays: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the root's metadata with those of all arrays in it: one read opens a block."""
    return {
        **group_json(attrs),
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": dict(sorted({**{s: group_json({}) for s in streams}, **arrays}.items())),  # as zarr groups them
        },
    }


def array_json(
    dtype: np.dtype[Any], dims: tuple[str, ...], chunks: tuple[int, ...], attrs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata of an array as zarr format 3 has them; the shape is filled in at the end."""
    bytes_codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        bytes_codec["configuration"] = {"endian": "little"}
    packing = {
        "name": "blosc",
        "configuration": {
            "typesize": dtype.itemsize,
            "cname": "zstd",
            "clevel": CLEVEL,
            "shuffle": "shuffle",
            "blocksize": 0,
        },
    }
    return {
        "shape": [],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": {"b": False, "f": 0.0}.get(dtype.kind, 0),
        "codecs": [bytes_codec, packing],
        "attributes": dict(attrs),
        "dimension_names": list(dims),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }
