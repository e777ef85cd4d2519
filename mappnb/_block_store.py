"""A block file as a read-only zarr store, on this machine or inside any fsspec file system."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import ZipStore

__all__ = ["open_group"]


class _RemoteZip(ZipStore):
    """A zip file that is opened through an fsspec file system."""

    def __init__(self, path: str, fs: Any) -> None:
        super().__init__(Path(path), mode="r")
        self._fs, self._name = fs, path

    def _sync_open(self) -> None:
        self._lock = threading.RLock()
        self._zf = zipfile.ZipFile(self._fs.open(self._name, "rb"))
        self._is_open = True


def open_group(path: str, fs: Any = None) -> Any:
    """Return the root group of a block: its metadata are read once, all in one piece."""
    store = ZipStore(path, mode="r") if fs is None else _RemoteZip(path, fs)
    return zarr.open_group(store, mode="r", use_consolidated=True)
