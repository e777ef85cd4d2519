"""How long each operation would take if nothing were wrong: the mean, median or least of its kind, or the median of its peers."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mappnb.analysis._whatif_model import Model
from mappnb.errors import MappnbError, did_you_mean

__all__ = ["IDEALS", "check_ideal", "grouped", "ideal_durations"]

Array = np.ndarray[Any, Any]
Floats = npt.NDArray[np.float64]

IDEALS: Final = ("mean", "median", "min", "peers")


def check_ideal(ideal: str) -> None:
    """Raise MappnbError unless it is one of ``IDEALS``."""
    if ideal not in IDEALS:
        raise MappnbError(
            f"what_if: ideal is {ideal!r}; expected one of {', '.join(IDEALS)}{did_you_mean(str(ideal), IDEALS)}"
        )


def ideal_durations(model: Model, ideal: str, *, over_stages: bool) -> Floats:
    """Return the ideal of each operation.

    Parameters
    ----------
    model : Model
        The operations.
    ideal : str
        ``"mean"``: the mean of work, the median of transfers; ``"median"``; ``"min"``: of all steps, ranks and microbatches;
        ``"peers"``: the median over the ranks of the same stage, of the same operation of the same step.
    over_stages : bool
        Stages, too, should take equally long. ``"peers"`` never compares stages.

    Returns
    -------
    array, dims (op,)
        s. Operations that are pieces of one event share its ideal in the proportion of what they took.
    """
    unit, measured = _units(model)
    first = _first(unit, len(measured))
    key = model.twin[first] if ideal == "peers" else _keys(model, over_stages=over_stages)[first]
    by_mean = model.by_mean[first] if ideal == "mean" else np.zeros(len(first), bool)
    wanted = grouped(measured, key, by_mean=by_mean, least=ideal == "min", single=model.single[first])
    if model.occasional is not None:
        wanted = np.where(model.occasional[first], 0.0, wanted)
    return _dealt(model.measured_s, unit, measured, wanted)


def _keys(model: Model, *, over_stages: bool) -> Array:
    """Return one number for operations that should take equally long."""
    key = model.kind.astype(np.int64)
    if over_stages:
        return key
    for column in (model.stage if model.place is None else model.place, model.layer):
        if column is not None:
            key = np.unique(key * (int(column.max(initial=-1)) + 2) + column + 1, return_inverse=True)[1].ravel()
    return key


def _units(model: Model) -> tuple[Array, Floats]:
    if model.unit is None:
        return np.arange(len(model)), model.measured_s
    return model.unit, np.bincount(model.unit, weights=model.measured_s).astype(np.float64)


def _first(unit: Array, count: int) -> Array:
    out = np.empty(count, np.int64)
    out[unit[::-1]] = np.arange(len(unit))[::-1]
    return out


def _dealt(measured: Floats, unit: Array, total: Floats, wanted: Floats) -> Floats:
    """Return the wanted time of each unit, dealt to its operations as the measured time is; evenly where none was measured."""
    share = np.where(total[unit] > 0, measured / np.where(total > 0, total, 1)[unit], 1 / np.bincount(unit)[unit])
    alone = (np.bincount(unit) == 1)[unit]
    return np.asarray(np.where(alone, 1.0, share) * wanted[unit], np.float64)


def grouped(value: Floats, key: Array, *, by_mean: Array, least: bool, single: Array) -> Floats:
    """Return for each value the mean, the least, or else the median of those with its key, dims as ``value``.

    ``by_mean`` and ``single`` (float32 values, whose middle is rounded) are the same for all values of a key. The least is of what
    is not negative.
    """
    number = np.unique(key, return_inverse=True)[1].ravel()
    order = np.lexsort((value, number))
    count = np.bincount(number)
    begin = np.concatenate([[0], np.cumsum(count)[:-1]])
    ordered = value[order]
    if least:
        return np.asarray(np.minimum.reduceat(np.maximum(ordered, 0), begin)[number], np.float64)
    low, high = ordered[begin + (count - 1) // 2], ordered[begin + count // 2]
    middle = (low + high) / 2
    middle = np.where(single[order[begin]], middle.astype(np.float32), middle)
    mean = np.bincount(number, weights=value) / count
    return np.asarray(np.where(by_mean[order[begin]], mean, middle)[number], np.float64)
