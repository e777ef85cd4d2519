"""Palette PNG files out of index arrays: zlib and struct only."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np

__all__ = ["data_uri", "palette_png"]

Array = np.ndarray[Any, Any]


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def palette_png(pixels: Array, palette: Array) -> bytes:
    """Return a PNG file.

    Parameters
    ----------
    pixels : array of uint8, shape (height, width)
        Index of each pixel's colour; 0 is transparent.
    palette : array of uint8, shape (colours, 3)
        At most 256 colours.

    Notes
    -----
    A line is stored as its difference to the line above (filter 2 of the PNG specification, 9.2): cells are several pixels high, so most
    lines become zeros. Empty lines are stored as they are, since their difference to a line of cells is as long as that line.
    """
    used = np.bincount(pixels.ravel(), minlength=256) > 0
    used[0] = True
    pixels, palette = (
        (np.cumsum(used) - 1).astype(np.uint8)[pixels],
        palette[used[: len(palette)]],
    )  # only the colours that occur
    height, width = pixels.shape
    lines = np.empty((height, width + 1), np.uint8)
    lines[0, 1:] = pixels[0]
    np.subtract(pixels[1:], pixels[:-1], out=lines[1:, 1:])
    empty = ~pixels.any(axis=1)
    lines[:, 0] = np.where(empty, 0, 2)
    lines[empty, 1:] = 0
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"PLTE", palette.astype(np.uint8).tobytes())
        + _chunk(b"tRNS", b"\0")
        + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 6))
        + _chunk(b"IEND", b"")
    )


def data_uri(png: bytes) -> str:
    """Return a PNG file as an address that needs no request."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
