"""``da.mapp``: the views of mappnb on any labelled array. Only forwards; nothing is computed or kept here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xarray as xr

if TYPE_CHECKING:
    from mappnb.widgets.arrays import ArrayView

__all__ = ["ArrayAccessor"]


@xr.register_dataarray_accessor("mapp")  # type: ignore[no-untyped-call]
class ArrayAccessor:
    """mappnb views of an array: ``da.mapp.show()``."""

    def __init__(self, da: xr.DataArray) -> None:
        self._da = da

    def show(self, **options: Any) -> ArrayView:
        """See :func:`mappnb.widgets.array_view`."""
        from mappnb.widgets.arrays import array_view

        return array_view(self._da, **options)
