"""Functions of activations that run inside the job, registered by name: never a string that is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from mappnb.capture.activations.microbatch import Microbatch
from mappnb.capture.activations.shard import Shard
from mappnb.errors import CaptureError, did_you_mean

__all__ = ["METRICS", "MetricInfo", "metric", "metric_function"]

Function = TypeVar("Function", bound=Callable[..., Any])

METRICS: Final[dict[str, Callable[..., Any]]] = {}
"""Registered functions by name."""


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """What a metric is told besides the tensor.

    Attributes
    ----------
    point, layer, grad
        Which point; the layer is -1 for points that no layer holds.
    shard : Shard
        Which part of the whole tensor this rank has.
    microbatch : Microbatch
        Step, sample numbers and tokens.
    """

    point: str
    layer: int
    grad: bool
    shard: Shard
    microbatch: Microbatch


def metric(name: str) -> Callable[[Function], Function]:
    """Register a function for ``Capture(points, mode="metric", metric=name)``.

    Parameters
    ----------
    name : str
        Name of the rows in ``run.metrics``.

    Returns
    -------
    callable
        A decorator: ``f(tensor, info)`` gets the local canonical tensor of a point, dims (sample, token, features...), and a
        `MetricInfo`; it returns a number, a tensor of one number, or a 1-d tensor (rows of index 0, 1, ...).

    Raises
    ------
    CaptureError
        If another function has the name.
    """
    if not isinstance(name, str) or not name:
        raise CaptureError(
            f"mappnb.metric: name is {name!r}; expected a str, as in @mappnb.metric('attention_entropy')"
        )

    def register(function: Function) -> Function:
        known = METRICS.get(name)
        if known is not None and _origin(known) != _origin(function):
            raise CaptureError(
                f"mappnb.metric: {name!r} is registered already, by {known.__module__}.{known.__qualname__}"
            )
        METRICS[name] = function
        return function

    return register


def metric_function(name: str) -> Callable[..., Any]:
    """Return the function registered as ``name``.

    Raises
    ------
    CaptureError
        If there is none.
    """
    if name not in METRICS:
        known = ", ".join(METRICS) or "none"
        raise CaptureError(
            f"no metric {name!r} is registered in this process; registered: {known}{did_you_mean(name, METRICS)}; write "
            f"@mappnb.metric({name!r}) above a function, before training begins"
        )
    return METRICS[name]


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    """Where a function is written: a cell that runs again registers the same."""
    return function.__module__, function.__qualname__
