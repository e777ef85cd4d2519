"""``ds.mapp``: the verbs of mappnb.analysis on an events dataset. Only forwards; nothing is computed or kept here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from mappnb import analysis
from mappnb.datasets import layout_of
from mappnb.layout import Layout
from mappnb.run import Run

__all__ = ["MappAccessor"]


@xr.register_dataset_accessor("mapp")  # type: ignore[no-untyped-call]
class MappAccessor:
    """mappnb verbs on an events dataset: ``ds.mapp.breakdown()``."""

    def __init__(self, ds: xr.Dataset) -> None:
        self._ds = ds

    @property
    def layout(self) -> Layout:
        """Parallel layout that the dataset carries."""
        return layout_of(self._ds)

    def actions(self, **options: Any) -> pd.DataFrame:
        """See :func:`mappnb.analysis.actions`."""
        return analysis.actions(self._ds, **options)

    def align(self, **options: Any) -> xr.Dataset:
        """See :func:`mappnb.analysis.align`."""
        return analysis.align(self._ds, **options)

    def attribute(self, **options: Any) -> xr.Dataset:
        """See :func:`mappnb.analysis.attribute`."""
        return analysis.attribute(self._ds, **options)

    def breakdown(self, *, step: int | slice | None = None) -> xr.Dataset:
        """See :func:`mappnb.analysis.breakdown`."""
        return analysis.breakdown(self._ds, step=step)

    def bubble_fraction(self, *, step: int | slice | None = None) -> xr.DataArray:
        """See :func:`mappnb.analysis.bubble_fraction`."""
        return analysis.bubble_fraction(self._ds, step=step)

    def critical_path(self, *, step: int) -> pd.DataFrame:
        """See :func:`mappnb.analysis.critical_path`."""
        return analysis.critical_path(self._ds, step=step)

    def diff(self, after: Run | xr.Dataset, **options: Any) -> pd.DataFrame:
        """See :func:`mappnb.analysis.diff`; this dataset is the one before."""
        return analysis.diff(self._ds, after, **options)

    def event_slack(self, *, step: int) -> xr.Dataset:
        """See :func:`mappnb.analysis.event_slack`."""
        return analysis.event_slack(self._ds, step=step)

    def export(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """See :func:`mappnb.analysis.export`."""
        return analysis.export(self._ds, path, **options)

    def find_stragglers(self, **options: Any) -> pd.DataFrame:
        """See :func:`mappnb.analysis.find_stragglers`."""
        return analysis.find_stragglers(self._ds, **options)

    def hta_breakdown(
        self, *, step: int | slice | None = None, include_last_step: bool = False, whole_us: bool = False
    ) -> xr.Dataset:
        """See :func:`mappnb.analysis.hta_breakdown`."""
        return analysis.hta_breakdown(self._ds, step=step, include_last_step=include_last_step, whole_us=whole_us)

    def idle_blocks(self, **options: Any) -> pd.DataFrame:
        """See :func:`mappnb.analysis.idle_blocks`."""
        return analysis.idle_blocks(self._ds, **options)

    def last_arrivals(self, *, step: int | slice | None = None, **options: Any) -> xr.Dataset:
        """See :func:`mappnb.analysis.last_arrivals`."""
        return analysis.last_arrivals(self._ds, step=step, **options)

    def links(self, **options: Any) -> xr.Dataset:
        """See :func:`mappnb.analysis.links`."""
        return analysis.links(self._ds, **options)

    def match(self, *, step: int | slice | None = None) -> xr.Dataset:
        """See :func:`mappnb.analysis.match`."""
        return analysis.match(self._ds, step=step)

    def op_statistics(self, *, step: int | slice | None = None) -> pd.DataFrame:
        """See :func:`mappnb.analysis.op_statistics`."""
        return analysis.op_statistics(self._ds, step=step)

    def timeline(self, **options: Any) -> Any:
        """See :class:`mappnb.widgets.timeline.Timeline`."""
        from mappnb.widgets.timeline import Timeline

        return Timeline(self._ds, **options)

    def what_if(self, **options: Any) -> xr.Dataset:
        """See :func:`mappnb.analysis.what_if`."""
        return analysis.what_if(self._ds, **options)
