"""Packs tensors on the device where they are: the torch twin of `mappnb.activation_codecs.encode`, and statistics.

On a CPU the modes that take long (int8, top-k) are left to the writer thread, by numpy; on a GPU everything is done there, so that
less is copied. The GPU's side is untested on GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mappnb.activation_codecs import MODES, NOT_FINITE, sketch_matrix
from mappnb.activation_stats import HIGHEST, LOWEST, NUM_BINS, tensor_stats
from mappnb.errors import CaptureError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_numpy", "device_stats", "dtype_name", "encode", "is_slow", "packing_attrs", "stats_of", "storable"]

_SLOW: Final = ("int8", "topk")
_STORED: Final = ("float32", "bfloat16", "float16", "float64")


def is_slow(mode: str) -> bool:
    """Return whether a mode takes much longer than a copy, so that on a CPU the writer thread packs it."""
    return mode in _SLOW


def dtype_name(tensor: Tensor) -> str:
    """Return ``"float32"``, ``"bfloat16"``, ..."""
    return str(tensor.dtype).removeprefix("torch.")


def storable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be stored as it is; 8-bit floats and other numbers become float32."""
    return tensor if dtype_name(tensor) in _STORED else tensor.float()


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the array of a CPU tensor, without a copy; bfloat16 as its bits, uint16."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
        return np.asarray(tensor.numpy()).view(np.uint16)
    return np.asarray(tensor.numpy())


def packing_attrs(mode: str, options: Mapping[str, Any], *, dtype: str, length: int, start: int = 0) -> dict[str, Any]:
    """Return what `mappnb.activation_codecs.decode` must know of a packed tensor.

    Parameters
    ----------
    mode, options
        Of the rule.
    dtype : str
        Of the tensor.
    length : int
        Of its last dim, here.
    start : int
        Where that begins in the whole dim.
    """
    attrs: dict[str, Any] = {"mode": mode, "dtype": options["dtype"] if mode == "cast" else dtype}
    attrs |= {k: v for k, v in options.items() if k in ("k", "size", "reduce", "seed")}
    if mode in ("topk", "bucket", "sketch"):
        attrs["length"] = length
    if mode == "topk":
        attrs["k"] = min(options["k"], length)
    if mode == "sketch":
        attrs["start"] = start
    return attrs


def encode(mode: str, tensor: Tensor, options: Mapping[str, Any], *, start: int = 0) -> dict[str, Tensor]:
    """Pack a tensor along its last dim, on its device.

    Parameters
    ----------
    mode : str
        One of `mappnb.activation_codecs.MODES`.
    tensor : Tensor, dims (..., feature)
        Detached.
    options : mapping
        Of the rule: see `mappnb.Capture`.
    start : int
        For ``sketch``: where the tensor's features begin in the whole dim.

    Returns
    -------
    dict of Tensor
        By name of part; may share memory with ``tensor`` in mode ``full``. Equal to what numpy packs, but for the order of ties.
    """
    if mode not in _PACK:
        raise CaptureError(
            f"tensors are not packed by mode {mode!r}; known: {', '.join(MODES)}{did_you_mean(mode, MODES)}"
        )
    return _PACK[mode](tensor, options, start)


def _full(tensor: Tensor, options: Mapping[str, Any], start: int) -> dict[str, Tensor]:
    return {"": tensor}


def _cast(tensor: Tensor, options: Mapping[str, Any], start: int) -> dict[str, Tensor]:
    import torch

    return {"": tensor.to(getattr(torch, options["dtype"]))}


def _int8(tensor: Tensor, options: Mapping[str, Any], start: int) -> dict[str, Tensor]:
    import torch

    numbers = tensor.float()
    finite = numbers.isfinite()
    clean = torch.where(finite, numbers, 0.0)
    scale = clean.abs().amax(-1) / 127
    codes = (clean / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)).round().clamp(-127, 127)
    return {"": torch.where(finite, codes, float(NOT_FINITE)).to(torch.int8), "scale": scale}


def _topk(tensor: Tensor, options: Mapping[str, Any], start: int) -> dict[str, Tensor]:
    import torch

    index = tensor.abs().topk(min(options["k"], tensor.shape[-1]), dim=-1, sorted=False).indices.sort(-1).values
    return {"": tensor.gather(-1, index), "index": index.to(torch.int32)}


def _bucket(tensor: Tensor, options: Mapping[str, Any], start: int) -> dict[str, Tensor]:
    import torch

    size, length = int(options["size"]), tensor.shape[-1]
    whole = length - length % size
    groups = tensor[..., :whole].float().unflatten(-1, (whole // size, size)) if whole else None
    parts = [] if groups is None else [groups.amax(-1) if options["reduce"] == "max" else groups.mean(-1)]
    if whole < length:
        tail = tensor[..., whole:].float()
        parts.append(tail.amax(-1, keepdim=True) if options["reduce"] == "max" else tail.mean(-1, keepdim=True))
    return {"": torch.cat(parts, dim=-1)}


def _sketch(tensor: Tensor, options: Mapping[str, Any], start: int) -> dict[str, Tensor]:
    matrix = _matrix(options["size"], options["seed"], start, start + tensor.shape[-1], str(tensor.device))
    return {"": tensor.float() @ matrix}


@lru_cache(maxsize=16)
def _matrix(size: int, seed: int, start: int, stop: int, device: str) -> Tensor:
    import torch

    return torch.from_numpy(sketch_matrix(size, seed, start, stop)).to(device)


_PACK: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "full": _full,
    "cast": _cast,
    "int8": _int8,
    "topk": _topk,
    "bucket": _bucket,
    "sketch": _sketch,
}


def stats_of(tensor: Tensor) -> Any:
    """Return the statistics of a tensor: a row of numbers of `mappnb.activation_stats`, on a GPU still there.

    Returns
    -------
    (fields, histogram) of arrays, or Tensor
        On a GPU one float64 tensor on the device, the fields, then the counts of the bins.
    """
    if tensor.device.type != "cpu":
        return device_stats(tensor)
    return tensor_stats(as_numpy(tensor), bfloat16=dtype_name(tensor) == "bfloat16")


def device_stats(tensor: Tensor) -> Tensor:
    """Return the statistics of a tensor as one float64 tensor on its device, without waiting for it; untested on GPU.

    Notes
    -----
    Distances from the mean are scaled by the largest magnitude before they are raised to powers, and summed in float64: relative
    error about 1e-6 for float32 values.
    """
    import torch

    x = tensor.detach().reshape(-1)
    x = x if x.dtype == torch.float64 else x.float()
    finite = x.isfinite()
    clean = torch.where(finite, x, 0)
    count = finite.sum().double()
    mean = clean.sum(dtype=torch.float64) / count.clamp(min=1)
    low, high = torch.where(finite, x, torch.inf), torch.where(finite, x, -torch.inf)
    ends = [low.amin().double(), high.amax().double()] if x.numel() else [count + torch.inf, count - torch.inf]
    scale = clean.abs().amax().double() if x.numel() else count
    scale = torch.where(scale > 0, scale, 1.0)
    d = torch.where(finite, (clean - mean.to(x.dtype)) / scale.to(x.dtype), 0)
    d2 = d * d
    powers = [(p.sum(dtype=torch.float64) * scale**n) for n, p in ((2, d2), (3, d2 * d), (4, d2 * d2))]
    apart = [clean.eq(0).sum() - (~finite).sum(), x.isnan().sum(), x.eq(torch.inf).sum(), x.eq(-torch.inf).sum()]
    exponents = torch.frexp(clean).exponent.long() - 1
    bins = torch.where(clean != 0, exponents.clamp(LOWEST - 1, HIGHEST + 1) - (LOWEST - 1), NUM_BINS)
    counts = torch.zeros(NUM_BINS + 1, dtype=torch.float64, device=x.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
    return torch.cat([torch.stack([count, mean, *powers, *ends, *(a.double() for a in apart)]), counts[:NUM_BINS]])
