"""Layers, heads and samples that are asked for: each must be there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mappnb.errors import InterpError

__all__ = ["labels_asked", "place_of_sample", "places_of_samples"]


def labels_asked(what: str, wanted: int | Iterable[int] | None, known: list[int]) -> list[int]:
    """Return the layers, heads or tokens asked for, by their numbers; None stands for all.

    Raises
    ------
    InterpError
        For one that is not there.
    """
    if wanted is None:
        return known
    numbers = [int(wanted)] if isinstance(wanted, int | np.integer) else [int(number) for number in wanted]
    for number in numbers:
        if number not in known:
            raise InterpError(
                f"activations: no {what} {number}; found {what}s {_short(known)}. Numbers are global and count from 0"
            )
    return numbers


def place_of_sample(sample: int, size: int) -> int:
    """Return the position of a sample, counted from 0; negative ones count from the end.

    Raises
    ------
    InterpError
        If it is not there.
    """
    if not -size <= sample < size:
        raise InterpError(f"activations: no sample {sample}; expected 0 to {size - 1} (of stream or selection)")
    return sample % size


def places_of_samples(wanted: int | Iterable[int] | None, size: int) -> list[int]:
    """Return the positions of the samples asked for; None stands for all.

    Raises
    ------
    InterpError
        For one that is not there.
    """
    if wanted is None:
        return list(range(size))
    some = [wanted] if isinstance(wanted, int | np.integer) else wanted
    return [place_of_sample(int(one), size) for one in some]


def _short(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
