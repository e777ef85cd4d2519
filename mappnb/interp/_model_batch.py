"""Token batches for a live model: padding of any kind is moved to the end of each row, and results are moved back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.errors import InterpError

__all__ = ["Batch", "pack", "rectangle"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch as the caller sees it (user slots) and as the model gets it (packed slots: real tokens first).

    Attributes
    ----------
    tokens : ndarray of int64, dims (sample, token)
        As given.
    mask : ndarray of bool, dims (sample, token)
        True for real tokens.
    packed : ndarray of int64, dims (row, slot)
        What the model gets: row r is sample r, later rows and slots only fill up.
    place : ndarray of int64, dims (sample, token)
        Packed slot of each user slot.
    num_microbatches : int
        Equal parts into which the rows are cut.

    Notes
    -----
    A causal model never looks ahead, so padding at the end needs no mask; positions of real tokens count from 0, and a padded row gives
    what the row alone gives.
    """

    tokens: np.ndarray
    mask: np.ndarray
    packed: np.ndarray
    place: np.ndarray
    num_microbatches: int = 1

    @property
    def length(self) -> np.ndarray:
        """Number of real tokens, dims (sample,)."""
        return np.asarray(self.mask.sum(1))

    @property
    def last(self) -> np.ndarray:
        """Packed slot of the last real token of every row, dims (row,); rows that only fill up repeat the last sample."""
        last = self.length - 1
        return np.concatenate([last, np.repeat(last[-1:], len(self.packed) - len(last))])

    @property
    def rows(self) -> list[np.ndarray]:
        """Rows of each microbatch."""
        return list(np.arange(len(self.packed)).reshape(self.num_microbatches, -1))

    @property
    def position(self) -> np.ndarray:
        """Position of each real token from 0, -1 for padding, dims (sample, token)."""
        return np.where(self.mask, self.place, -1)


def rectangle(rows: Sequence[Sequence[int]], *, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and mask, dims (sample, token), of rows of unequal length, padded at the end."""
    width = max(len(row) for row in rows)
    tokens = np.full((len(rows), width), fill, np.int64)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    return tokens, mask


def pack(
    tokens: Any, mask: Any = None, *, vocab_size: int, slots_multiple: int = 1, num_microbatches: int = 1
) -> Batch:
    """Return the batch that the model gets for ``tokens``.

    Parameters
    ----------
    tokens : array of int, dims (sample, token)
        Token ids; a single row may come without the first dim.
    mask : array of bool, dims (sample, token), optional
        True for real tokens; padding may be on either side.
    vocab_size : int
        Ids lie below it.
    slots_multiple : int
        The number of slots is a multiple of it (sequence parallelism).
    num_microbatches : int
        The number of rows is a multiple of it.

    Raises
    ------
    InterpError
        If ids, shapes or mask cannot be.
    """
    ids = np.atleast_2d(np.asarray(tokens))
    if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise InterpError(f"tokens: shape {ids.shape}, {ids.dtype}; expected whole numbers with dims (sample, token)")
    real = np.ones(ids.shape, bool) if mask is None else np.atleast_2d(np.asarray(mask)).astype(bool)
    if real.shape != ids.shape:
        raise InterpError(f"mask: shape {real.shape}; expected that of the tokens, {ids.shape}; True marks real tokens")
    if not real.any(1).all():
        raise InterpError(f"sample {int(np.argmin(real.any(1)))}: no token is real; a prompt needs at least one token")
    wrong = real & ((ids < 0) | (ids >= vocab_size))
    if wrong.any():
        sample, slot = (int(i[0]) for i in np.nonzero(wrong))
        raise InterpError(
            f"sample {sample}, token {slot}: id {ids[sample, slot]}; the model has ids 0 to {vocab_size - 1}: "
            "is this the model's own tokenizer?"
        )
    order = np.argsort(~real, axis=1, kind="stable")
    packed = np.take_along_axis(np.where(real, ids, 0), order, 1)
    fill = -packed.shape[1] % slots_multiple, -packed.shape[0] % num_microbatches
    packed = np.pad(np.pad(packed, ((0, 0), (0, fill[0]))), ((0, fill[1]), (0, 0)), mode="edge")
    return Batch(ids.astype(np.int64), real, packed.astype(np.int64), np.argsort(order, axis=1), num_microbatches)
