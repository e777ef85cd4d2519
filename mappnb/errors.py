"""The errors of mappnb: one family, so that ``except MappnbError`` catches all that we raise on purpose.

Every message says where (run, rank, step), what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CaptureError",
    "CostError",
    "DependencyError",
    "FormatVersionError",
    "InterpError",
    "LayoutError",
    "MappnbError",
    "NotARunError",
    "RunExistsError",
    "ScheduleError",
    "SchemaError",
    "did_you_mean",
]


class MappnbError(Exception):
    """Base of every error that mappnb raises on purpose."""


class NotARunError(MappnbError, FileNotFoundError):
    """A folder that is not (or not yet) a run directory, or that holds more than one run."""

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


class RunExistsError(MappnbError, FileExistsError):
    """A run directory that exists already and was not to be continued."""

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


class FormatVersionError(MappnbError, ValueError):
    """A run directory written by a newer mappnb than this one."""


class SchemaError(MappnbError, ValueError):
    """A dataset that lacks a variable, or has it with other dims or dtype."""


class LayoutError(MappnbError, ValueError):
    """Parallel sizes that do not fit together, or a rank or coordinate outside them."""


class CaptureError(MappnbError, RuntimeError):
    """A recording that cannot start: raised before step 0, never later."""


class InterpError(MappnbError, ValueError):
    """A question about a model that it cannot answer: a token, layer, head or edit that does not fit, a layout that is not handled."""


class ScheduleError(MappnbError, ValueError):
    """A schedule that cannot run: an unknown name, an impossible combination, a missing action, or a deadlock."""


class CostError(MappnbError, ValueError):
    """Costs that cannot be: negative, not a number, missing, or for another number of stages."""


class DependencyError(MappnbError, ImportError):
    """An optional package is missing; the message names the ``pip install`` that brings it."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``known``, or an empty string."""
    near = difflib.get_close_matches(str(word), [str(k) for k in known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
