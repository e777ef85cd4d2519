"""xarray engine ``mappnb``: ``xr.open_dataset(run_dir, engine="mappnb")`` and ``open_datatree``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import xarray as xr
from xarray.backends import BackendEntrypoint

from mappnb.errors import MappnbError, did_you_mean
from mappnb.run import attach
from mappnb.store import Store

__all__ = ["MappnbBackend"]

GROUPS = ("events", "steps", "telemetry", "metrics")


class MappnbBackend(BackendEntrypoint):
    """Opens one dataset of a run directory, or all as a tree."""

    description = "Open mappnb run directories: events, steps, telemetry, metrics"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "group")
    supports_groups = True

    def open_dataset(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None, group: str = "events"
    ) -> xr.Dataset:
        """Open one dataset of a run.

        Parameters
        ----------
        filename_or_obj : path or URL
            A run directory.
        drop_variables : str or list of str, optional
            Variables to leave out.
        group : str
            ``"events"`` (lazy), ``"steps"``, ``"telemetry"`` or ``"metrics"``.

        Raises
        ------
        MappnbError
            If there is no such group, or the folder is no run.
        """
        name = group.strip("/")
        if name not in GROUPS:
            raise MappnbError(f"no group {group!r} in a run; known: {', '.join(GROUPS)}{did_you_mean(name, GROUPS)}")
        ds: xr.Dataset = getattr(attach(filename_or_obj), name)
        dropped = [drop_variables] if isinstance(drop_variables, str) else list(drop_variables or [])
        return ds.drop_vars(dropped, errors="ignore")

    def open_datatree(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None, **_: Any
    ) -> xr.DataTree:
        """Open every dataset of a run as a tree with the groups as children."""
        return xr.DataTree.from_dict(self.open_groups_as_dict(filename_or_obj, drop_variables=drop_variables))

    def open_groups_as_dict(
        self, filename_or_obj: Any, *, drop_variables: str | Iterable[str] | None = None, **_: Any
    ) -> dict[str, xr.Dataset]:
        """Open every dataset of a run, by path in the tree."""
        return {f"/{g}": self.open_dataset(filename_or_obj, drop_variables=drop_variables, group=g) for g in GROUPS}

    def guess_can_open(self, filename_or_obj: Any) -> bool:
        """Return True for a run directory."""
        if not isinstance(filename_or_obj, str | os.PathLike):
            return False
        try:
            Store(filename_or_obj)
        except (MappnbError, OSError, ValueError):
            return False
        return True
