"""A column that grows piece by piece, without the holes that many small arrays leave between what is kept."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

__all__ = ["GrowingColumn"]

Array = np.ndarray[Any, Any]
BLOCK_BYTES = 1 << 20


class GrowingColumn:
    """A column in blocks of memory that go back to the operating system one by one when :meth:`whole` has copied them.

    Parameters
    ----------
    dtype : type
        NumPy scalar type.
    """

    def __init__(self, dtype: type) -> None:
        self.dtype = np.dtype(dtype)
        self._blocks: list[Array] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, values: Array) -> None:
        """Add values at the end; numbers outside the dtype wrap around."""
        per_block = BLOCK_BYTES // self.dtype.itemsize
        done = 0
        while done < len(values):
            at = self._size % per_block
            if at == 0:
                self._blocks.append(np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), self.dtype))
            some = values[done : done + per_block - at]
            self._blocks[-1][at : at + len(some)] = some
            done += len(some)
            self._size += len(some)

    def whole(self) -> Array:
        """Return the column as one array; the column is empty afterwards."""
        out = np.empty(self._size, self.dtype)
        self._blocks.reverse()
        at = 0
        while self._blocks:
            block = self._blocks.pop()
            out[at : at + len(block)] = block[: self._size - at]
            at += len(block)
        self._size = 0
        return out
