"""Many edited forwards of one prompt, as rows of a few batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mappnb.errors import InterpError
from mappnb.interp.edits import Edit
from mappnb.interp.model import Forward, Model

__all__ = ["chosen", "measured", "run_cells"]


def run_cells(
    model: Model,
    tokens: np.ndarray,
    cells: Sequence[Sequence[Edit]],
    measure: Callable[[Any], Any],
    *,
    every: Sequence[Edit] = (),
    copies: int = 1,
    rows: int = 64,
) -> np.ndarray:
    """Return what is measured of one prompt under each cell's edits.

    Parameters
    ----------
    model : Model
    tokens : ndarray of int, dims (token,)
        The prompt.
    cells : sequence of sequence of Edit
        Edits of each cell; their ``samples`` are set here.
    measure : callable
        Logits at the last token, Tensor with dims (sample, vocab) -> Tensor with dims (sample,).
    every : sequence of Edit
        Made in all cells, before the cell's own: a value that has ``copies`` samples gives one to each copy.
    copies : int
        Runs of each cell.
    rows : int
        Rows in a batch, about.

    Returns
    -------
    ndarray, dims (cell, copy)
    """
    found = []
    for part in _parts(cells, max(1, rows // copies)):
        count = len(part) * copies
        samples = np.arange(count).reshape(-1, copies)
        edits = [
            replace(edit, samples=samples[:, copy].tolist(), value=_of_copy(edit, copy, copies), seed=edit.seed + copy)
            for edit in every
            for copy in range(copies)
        ]
        edits += [replace(edit, samples=samples[i].tolist()) for i, cell in enumerate(part) for edit in cell]
        run = model.forward(np.repeat(tokens[None], count, 0), edits=edits, logits="last")
        found.append(measured(run, measure).reshape(-1, copies))
    return np.concatenate(found) if found else np.zeros((0, copies))


def measured(run: Forward, measure: Callable[[Any], Any]) -> np.ndarray:
    """Return what is measured of the logits at the last token, dims (sample,).

    Parameters
    ----------
    run : Forward
        With logits of the last token.
    measure : callable
        As for `run_cells`.
    """
    import torch

    with torch.no_grad():
        return np.asarray(measure(torch.as_tensor(run.logits.values)).numpy())


def _of_copy(edit: Edit, copy: int, copies: int) -> Any:
    """Return the value for one copy: its own where there is one for each."""
    value = edit.value
    own = isinstance(value, np.ndarray) and value.ndim > 2 and len(value) == copies
    return value[copy][None] if own else value


def _parts(cells: Sequence[Sequence[Edit]], size: int) -> Iterator[Sequence[Sequence[Edit]]]:
    for first in range(0, len(cells), size):
        yield cells[first : first + size]


def chosen(given: Any, size: int, what: str) -> list[int]:
    """Return indices from None (all), a number, a slice or a list; negative ones count from the end.

    Raises
    ------
    InterpError
        For an index outside, or none at all.
    """
    if given is None or isinstance(given, slice):
        found = list(range(size))[given if given is not None else slice(None)]
    else:
        found = [int(i) for i in np.atleast_1d(np.asarray(given, np.int64))]
    if not found or min(found) < -size or max(found) >= size:
        raise InterpError(f"{what}: {given!r}; expected some of 0 to {size - 1}")
    return [i % size for i in found]
