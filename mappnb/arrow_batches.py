"""Record batches of an Arrow stream, laid out by hand: what pyarrow needs most of a millisecond for, once its code is out of the caches.

A rank of a training job writes a few rows a second, with cold caches each time. There the price of a batch is the
amount of code that makes it, not its size; so it is made by one ``struct.pack`` and one ``join``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

__all__ = ["BatchLayout"]

_PADDING: Final = tuple(b"\0" * (-n % 8) for n in range(8))
_KEY_AND_VALUE: Final = struct.Struct("<II4HiIII8sI")
_VERSION_5, _RECORD_BATCH = 4, 3  # enumerations of Arrow's Message.fbs


class BatchLayout:
    """Lays out record batches of one schema: columns of numbers or text, in which nothing is missing.

    Parameters
    ----------
    texts : sequence of bool
        Of each column, whether it is text.
    key : bytes
        Under which a batch has its metadata; 4 to 7 bytes.

    Notes
    -----
    The format is that of "Serialization and Interprocess Communication" in Arrow's columnar format, with the tables of
    Message.fbs as FlatBuffers has them: a table begins with the way back to its vtable, which says where its fields
    are; every reference counts forward from where it stands. Positions in the comments are those in the FlatBuffer.
    """

    def __init__(self, texts: Sequence[bool], key: bytes) -> None:
        self._buffers = [i for text in texts for i in ((-1, 0, 0) if text else (-1, 0))]  # -1: nothing is missing
        self._columns, self._key = len(texts), key
        first_buffer = 96 + 16 * self._columns
        self._end = first_buffer + 16 * len(self._buffers)
        self._head = struct.Struct(
            "<Ii"
            "I7H6x"  # 0: where the message is; 4: its vtable
            "iIqIhBx"  # 24: the message: vtable, header, length of the body, metadata, version, kind of header
            "5H6x"  # 48: the vtable of the record batch
            "iIqI"  # 64: the record batch: vtable, nodes, rows, buffers
            f"I{2 * self._columns}q"  # 84: nodes: rows, missing
            f"4xI{2 * len(self._buffers)}q"  # buffers: position in the body, length
        )

    def message(self, rows: int, buffers: Sequence[bytes], metadata: bytes) -> bytes:
        """Return the message of one batch.

        Parameters
        ----------
        rows : int
            Number of rows.
        buffers : sequence of bytes
            Of each column its values; of text its offsets, then its bytes.
        metadata : bytes
            Of the batch.
        """
        places: list[int] = []
        pieces: list[bytes] = []
        at, left = 0, iter(buffers)
        for kind in self._buffers:
            if kind < 0:
                places += (at, 0)
                continue
            buffer = next(left)
            size = len(buffer)
            places += (at, size)
            pieces += (buffer, _PADDING[size % 8])
            at += size + (-size % 8)
        tail = self._metadata(metadata)
        end, size = self._end, self._end + len(tail)
        head = self._head.pack(
            *(0xFFFFFFFF, size),
            *(24, 14, 24, 20, 22, 4, 8, 16),
            *(20, 64 - 28, at, end - 40, _VERSION_5, _RECORD_BATCH),
            *(10, 20, 8, 4, 16),
            *(16, 84 - 68, rows, 92 + 16 * self._columns - 80),
            *(self._columns, *(rows, 0) * self._columns),
            *(len(self._buffers), *places),
        )
        return b"".join((head, tail, *pieces))

    def _metadata(self, value: bytes) -> bytes:
        """One key and its value; the vtable at 8, the table at 16, the key at 28, the value at 40."""
        head = _KEY_AND_VALUE.pack(1, 12, 8, 12, 4, 8, 8, 8, 16, len(self._key), self._key, len(value))
        return b"".join((head, value, b"\0" * (8 - (len(head) + len(value)) % 8)))
