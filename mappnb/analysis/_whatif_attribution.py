"""Who makes the steps longer: groups put back one by one, taken out one by one, or in all orders."""

from __future__ import annotations

from collections.abc import Mapping
from math import factorial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xarray as xr

from mappnb.analysis._whatif_case import Case, groups_by
from mappnb.errors import MappnbError, did_you_mean

__all__ = ["METHODS", "attributed"]

Floats = npt.NDArray[np.float64]
Array = np.ndarray[Any, Any]

METHODS: Final = ("add_one_in", "leave_one_out", "shapley")
MOST_GROUPS: Final = 8
"""Groups of a Shapley value: 2**8 replays."""


def attributed(case: Case, by: str, method: str, hosts: Mapping[int, str]) -> xr.Dataset:
    """Return what each group of a grouping makes the steps longer. See :func:`mappnb.analysis.attribute`.

    Raises
    ------
    MappnbError
        If the method is unknown, or there are too many groups, or none.
    """
    if method not in METHODS:
        raise MappnbError(
            f"attribute: method is {method!r}; expected one of {', '.join(METHODS)}{did_you_mean(str(method), METHODS)}"
        )
    groups, place = groups_by(case.model, by, hosts)
    if not groups:
        raise MappnbError(f"attribute: the run has no {by}; group by one of stage, dp_rank, rank, op")
    matters = (case.model.measured_s != 0) | (case.ideal_op_s != 0)
    if ((place < 0) & matters).any():
        place = np.where(place < 0, len(groups), place)
        groups = [*groups, "other" if isinstance(groups[0], str) else -1]
    place = np.maximum(place, 0)  # what takes no time may be anywhere
    count = len(groups)
    if method == "add_one_in":
        times = np.stack([case.put_back(place == i) - case.ideal_s for i in range(count)], 1)
    elif method == "leave_one_out":
        times = np.stack([case.replay_s - case.without(place == i) for i in range(count)], 1)
    else:
        times = _shapley(case, place, count, by)
    return _dataset(case, by, groups, times)


def _dataset(case: Case, by: str, groups: list[Any], times: Floats) -> xr.Dataset:
    mean = times.mean(axis=0)
    excess = float(case.replay_s.mean() - case.ideal_s.mean())
    share = mean / excess if excess else np.full(len(mean), np.nan)
    sure = np.abs(mean) > case.error * case.model.recorded_s.mean()
    s, one = {"units": "s"}, {"units": "1"}
    return xr.Dataset(
        {
            "attributed_s": (by, mean, s | {"long_name": "what the group makes a step longer, mean"}),
            "attributed_share": (by, share, one | {"long_name": "attributed_s over excess_s"}),
            "attributed_step_s": (("step", by), times, s | {"long_name": "what the group makes each step longer"}),
            "reliable": (by, sure, one | {"long_name": "larger than the replay error"}),
            "excess_s": ((), excess, s | {"long_name": "mean of replay less ideal"}),
            "residual_s": ((), excess - float(mean.sum()), s | {"long_name": "excess less the sum of attributed_s"}),
            "replay_error": ((), case.error, one | {"long_name": "how far the replay is from the recording"}),
        },
        {"step": case.model.steps, by: np.array(groups, object) if isinstance(groups[0], str) else groups},
    )


def _shapley(case: Case, place: Array, count: int, by: str) -> Floats:
    """Return the Shapley value of each group in each step, dims (step, group), s."""
    if count > MOST_GROUPS:
        raise MappnbError(
            f"attribute: {count} groups by {by} need 2**{count} replays; Shapley values are exact for at most {MOST_GROUPS}: "
            "group more coarsely (by='stage', by='op'), or use method='add_one_in' or 'leave_one_out'"
        )
    value = np.empty((2**count, len(case.model.steps)))
    for subset in range(2**count):
        member = np.array([(subset >> i) & 1 for i in range(count)], bool)
        value[subset] = case.put_back(member[place])
    out = np.zeros((value.shape[1], count))
    for subset in range(2**count):
        size = subset.bit_count()
        for i in range(count):
            if not (subset >> i) & 1:
                weight = factorial(size) * factorial(count - size - 1) / factorial(count)
                out[:, i] += weight * (value[subset | (1 << i)] - value[subset])
    return out
