"""How captured tensors are packed and unpacked: full, cast, int8, top-k, bucket, sketch. numpy only.

A packed tensor is a few arrays, its parts: ``""`` is the main one, others carry a name (``scale``, ``index``) and are stored as
``{point}_{part}``. All modes but ``full`` and ``cast`` work along the last dim. bfloat16 has no numpy type: it is stored as uint16,
and ``attrs["dtype"]`` tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np

from mappnb.errors import SchemaError, did_you_mean

__all__ = ["MODES", "PARTS", "bfloat16_bits", "decode", "encode", "from_bits", "part_name", "sketch_matrix"]

_Array = np.ndarray[Any, Any]
_Parts = dict[str, _Array]
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "full": ("",),
    "cast": ("",),
    "int8": ("", "scale"),
    "topk": ("", "index"),
    "bucket": ("",),
    "sketch": ("",),
}
MODES: Final = tuple(PARTS)
NOT_FINITE: Final = -128


def part_name(point: str, part: str) -> str:
    """Return the name under which a part of a point is stored."""
    return f"{point}_{part}" if part else point


def from_bits(values: _Array, dtype: str) -> _Array:
    """Return stored values as numbers numpy knows: bfloat16 bits become float32, all else stays."""
    if dtype == "bfloat16" and values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values


def bfloat16_bits(values: _Array) -> _Array:
    """Return the bits of numbers rounded to bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def encode(mode: str, values: _Array, *, dtype: str = "", **options: Any) -> tuple[_Parts, dict[str, Any]]:
    """Pack an array of numbers.

    Parameters
    ----------
    mode : str
        One of :data:`MODES`.
    values : array, dims (..., feature)
        float32, float64, float16, or bfloat16 bits with ``dtype="bfloat16"``.
    dtype : str
        What the values are; by default what numpy says. For ``cast``: see ``to``.
    **options
        ``cast``: ``to`` (``"bfloat16"``, ``"float16"``); ``topk``: ``k``; ``bucket``: ``size``, ``reduce`` (``"mean"``, ``"max"``);
        ``sketch``: ``size``, ``seed``, ``start`` (where this shard's features begin among all).

    Returns
    -------
    parts : dict of array
        By name of part.
    attrs : dict
        What :func:`decode` needs, and what the packing was.
    """
    packer = _look_up(mode, _PACK)
    dtype = dtype or str(values.dtype)
    parts, attrs = packer(values, dtype, **options)
    return parts, {"mode": mode, "dtype": dtype, **attrs}


def decode(mode: str, parts: Mapping[str, _Array], attrs: Mapping[str, Any]) -> _Array:
    """Unpack what :func:`encode`, or the encoder in the job, packed; any leading dims, also a selection of them.

    Returns
    -------
    array
        ``full``: as captured (bfloat16 as float32); ``cast``: float32 or float16; ``int8``: float32, error at most half of the row's
        scale, values that were not finite are NaN; ``topk``: dense, 0 where nothing was kept; ``bucket``: dims (..., bucket);
        ``sketch``: dims (..., component), of which the shards of a split dim are to be added (``attrs["combine"] == "sum"``).
    """
    unpacker: Callable[[Mapping[str, _Array], Mapping[str, Any]], _Array] = _look_up(mode, _UNPACK)
    missing = [p for p in PARTS[mode] if p not in parts]
    if missing:
        raise SchemaError(f"mode {mode!r} needs the parts {PARTS[mode]}; missing: {missing}")
    return unpacker(parts, attrs)


def sketch_matrix(size: int, seed: int, start: int, stop: int) -> _Array:
    """Return rows ``start`` to ``stop`` of the random matrix of a sketch: ±1/sqrt(size), the same on every rank.

    Notes
    -----
    Achlioptas (2003): inner products are kept in the mean, with relative error about sqrt(2 / size). Row i depends on seed and i
    only, so the sketches of the shards of a split dim add up to the sketch of the whole.
    """
    return _signs(size, seed, stop)[start:stop] * np.float32(size**-0.5)


@lru_cache(maxsize=8)
def _signs(size: int, seed: int, rows: int) -> _Array:
    words = -(-size // 64)
    raw = np.random.Philox(key=seed).random_raw(rows * words).reshape(rows, words)
    bits = np.unpackbits(raw.astype("<u8").view(np.uint8), axis=1, bitorder="little")[:, :size]
    return bits.astype(np.float32) * 2 - 1


def _look_up(mode: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if mode not in table:
        raise SchemaError(
            f"unknown mode {mode!r} of captured tensors; known: {', '.join(MODES)}{did_you_mean(mode, MODES)}"
        )
    return table[mode]


def _pack_full(values: _Array, dtype: str) -> tuple[_Parts, dict[str, Any]]:
    return {"": values}, {}


def _pack_cast(values: _Array, dtype: str, *, to: str = "bfloat16") -> tuple[_Parts, dict[str, Any]]:
    numbers = from_bits(values, dtype)
    if to == "bfloat16":
        return {"": bfloat16_bits(numbers)}, {"dtype": to}
    with np.errstate(over="ignore"):
        return {"": numbers.astype(to)}, {"dtype": to}


def _pack_int8(values: _Array, dtype: str) -> tuple[_Parts, dict[str, Any]]:
    numbers = from_bits(values, dtype).astype(np.float32, copy=False)
    finite = np.isfinite(numbers)
    clean = np.where(finite, numbers, np.float32(0))
    scale = np.max(np.abs(clean), axis=-1, initial=0) / np.float32(127)
    codes = np.rint(clean / np.where(scale > 0, scale, np.float32(1))[..., None])
    codes = np.where(finite, np.clip(codes, -127, 127), np.float32(NOT_FINITE))
    return {"": codes.astype(np.int8), "scale": scale}, {}


def _pack_topk(values: _Array, dtype: str, *, k: int) -> tuple[_Parts, dict[str, Any]]:
    length = values.shape[-1]
    size = np.abs(from_bits(values, dtype))
    k = min(k, length)
    index = np.sort(np.argpartition(size, length - k, axis=-1)[..., length - k :], axis=-1)
    return {"": np.take_along_axis(values, index, -1), "index": _small(index, length)}, {"k": k, "length": length}


def _small(index: _Array, length: int) -> _Array:
    return index.astype(np.uint16 if length <= 1 << 16 else np.uint32)


def _pack_bucket(values: _Array, dtype: str, *, size: int, reduce: str = "mean") -> tuple[_Parts, dict[str, Any]]:
    numbers = from_bits(values, dtype).astype(np.float32, copy=False)
    length = numbers.shape[-1]
    starts = np.arange(0, length, size)
    if reduce == "max":
        out = np.maximum.reduceat(numbers, starts, axis=-1)
    else:
        counts = np.minimum(size, length - starts).astype(np.float32)
        out = np.add.reduceat(numbers, starts, axis=-1) / counts
    return {"": out}, {"size": size, "reduce": reduce, "length": length}


def _pack_sketch(
    values: _Array, dtype: str, *, size: int, seed: int = 0, start: int = 0
) -> tuple[_Parts, dict[str, Any]]:
    numbers = from_bits(values, dtype).astype(np.float32, copy=False)
    length = numbers.shape[-1]
    matrix = sketch_matrix(size, seed, start, start + length)
    return {"": numbers @ matrix}, {"size": size, "seed": seed, "start": start, "length": length}


def _unpack_plain(parts: Mapping[str, _Array], attrs: Mapping[str, Any]) -> _Array:
    return from_bits(parts[""], attrs.get("dtype", ""))


def _unpack_int8(parts: Mapping[str, _Array], attrs: Mapping[str, Any]) -> _Array:
    codes = parts[""]
    return np.where(codes == NOT_FINITE, np.float32(np.nan), codes * parts["scale"].astype(np.float32)[..., None])


def _unpack_topk(parts: Mapping[str, _Array], attrs: Mapping[str, Any]) -> _Array:
    values = from_bits(parts[""], attrs.get("dtype", ""))
    out = np.zeros((*values.shape[:-1], int(attrs["length"])), values.dtype)
    np.put_along_axis(out, parts["index"].astype(np.int64), values, -1)
    return out


def _unpack_as_is(parts: Mapping[str, _Array], attrs: Mapping[str, Any]) -> _Array:
    return parts[""]


_PACK: Final[dict[str, Callable[..., tuple[_Parts, dict[str, Any]]]]] = {
    "full": _pack_full,
    "cast": _pack_cast,
    "int8": _pack_int8,
    "topk": _pack_topk,
    "bucket": _pack_bucket,
    "sketch": _pack_sketch,
}
_UNPACK: Final[dict[str, Callable[[Mapping[str, _Array], Mapping[str, Any]], _Array]]] = {
    "full": _unpack_plain,
    "cast": _unpack_plain,
    "int8": _unpack_int8,
    "topk": _unpack_topk,
    "bucket": _unpack_as_is,
    "sketch": _unpack_as_is,
}
