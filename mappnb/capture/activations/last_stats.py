"""Statistics of one tensor that passes two points in a row: what a layer gives is what the next one gets."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mappnb.capture.activations.encode import stats_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LastStats"]


class LastStats:
    """Takes the statistics of tensors, and those of a tensor that comes again at once only the first time.

    Notes
    -----
    ``resid_post`` of a layer is ``resid_pre`` of the next, ``embed`` that of the first, in most models the very same tensor. It is one
    if both are the same view of the same object, with the same number of changes in place. torch counts those for an object and its
    views together, so equal memory and equal counts alone would not do. It does not count writes through ``.data``.

    Only a weak reference is kept: no memory of a tensor is held.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Take the statistics of the next tensor, whichever it is."""
        self._owner: Any = None
        self._form: tuple[Any, ...] = ()
        self._row: Any = None

    def of(self, tensor: Tensor) -> Any:
        """Return what `stats_of` returns; ``tensor`` is as it came, since a detached one no longer tells whose view it is."""
        if tensor.is_inference():  # its changes are not counted
            self.forget()
            return stats_of(tensor.detach())
        owner = tensor if tensor._base is None else tensor._base
        form = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        if self._owner is None or self._owner() is not owner or self._form != form:
            self._row = stats_of(tensor.detach())
            self._owner, self._form = weakref.ref(owner), form
        return self._row
