"""The knobs of the schedule lab: what they stand at, what they change in the costs, and how they are written as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mappnb.errors import CostError, did_you_mean
from mappnb.sched.costs import Costs, Distribution
from mappnb.sched.split import scaled
from mappnb.sched.stragglers import Straggler

__all__ = ["KNOBS", "Settings", "Slow", "adjusted", "costs_code", "is_number", "varies"]

KNOBS = ("forward_s", "backward_input_s", "backward_weight_s", "p2p_s", "transfer_s")
"""Costs with a knob: three passes, latency of a message, and its time on the wire."""

SLOW_KINDS = ("none", "rank", "stage", "link")


@dataclass(frozen=True, slots=True)
class Slow:
    """The straggler that the reader sets: none, or a rank, a stage or the link from a rank to the next, and how much slower."""

    kind: str = "none"
    which: int = 0
    factor: float = 1.5

    def straggler(self, num_ranks: int) -> Straggler | None:
        """Return it as the library has it; None for none."""
        if self.kind == "none":
            return None
        if self.kind == "link":
            return Straggler(link=(self.which, (self.which + 1) % num_ranks), factor=self.factor)
        if self.kind == "stage":
            return Straggler(stage=self.which, factor=self.factor)
        return Straggler(rank=self.which, factor=self.factor)

    @classmethod
    def of(cls, straggler: Straggler, num_ranks: int) -> Slow | None:
        """Return the knob's state for a straggler; None where it is more than the knob can say."""
        given = {f.name: getattr(straggler, f.name) for f in fields(Straggler)}
        plain = all(
            given[f.name] == f.default
            for f in fields(Straggler)
            if f.name in ("extra_s", "kinds", "microbatches", "steps")
        )
        named = [n for n in ("rank", "stage", "link") if given[n] is not None]
        if not plain or len(named) != 1 or not isinstance(straggler.factor, (int, float)):
            return None
        value = given[named[0]]
        if named[0] == "link":
            return cls("link", value[0], straggler.factor) if value[1] == (value[0] + 1) % num_ranks else None
        return cls(named[0], int(value), float(straggler.factor))


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the knobs stand.

    Attributes
    ----------
    adjust : mapping
        Of :data:`KNOBS`: seconds where the cost is a number, a factor where it is an array or a distribution.
    num_microbatches : int
    memory_limit : float, or array, dims (rank,), optional
        In the unit of the costs.
    slow : Slow
    seed : int, optional
        Draw durations with it.
    """

    adjust: Mapping[str, float]
    num_microbatches: int
    memory_limit: Any = None
    slow: Slow = Slow()
    seed: int | None = None


def is_number(value: Any) -> bool:
    """Whether a cost is one number for the whole model."""
    return not isinstance(value, (Distribution, list, tuple)) and np.ndim(value) == 0


def varies(costs: Costs) -> bool:
    """Whether there is a distribution among the durations."""
    values = (costs.forward_s, costs.backward_input_s, costs.backward_weight_s)
    return any(
        isinstance(v, Distribution) or (isinstance(v, (list, tuple)) and any(isinstance(x, Distribution) for x in v))
        for v in values
    )


def transfer_of(costs: Costs) -> Any:
    """Return the time of a message on the wire, s; of an array of bandwidths an array."""
    if not is_number(costs.bandwidth):
        return np.asarray(costs.message_bytes / np.asarray(costs.bandwidth, np.float64))
    return float(costs.message_bytes / float(costs.bandwidth))


def base_of(costs: Costs, knob: str) -> float:
    """Return where a knob stands at the given costs: seconds, or the factor 1."""
    value = transfer_of(costs) if knob == "transfer_s" else getattr(costs, knob)
    return float(value) if is_number(value) else 1.0


def checked(adjust: Mapping[str, float] | None) -> dict[str, float]:
    """Return the mapping, or raise CostError for a name or value that cannot be."""
    for name, value in (adjust or {}).items():
        if name not in KNOBS:
            raise CostError(f"adjust: unknown cost {name!r}; known: {', '.join(KNOBS)}{did_you_mean(str(name), KNOBS)}")
        if not is_number(value) or not np.isfinite(value) or value < 0:
            raise CostError(f"adjust: {name} is {value!r}; expected a number of at least 0")
    return {k: float(v) for k, v in (adjust or {}).items()}


def adjusted(costs: Costs, adjust: Mapping[str, float]) -> Costs:
    """Return the costs with the knobs where ``adjust`` says."""
    changed: dict[str, Any] = {}
    for name in KNOBS[:4]:
        if name in adjust and adjust[name] != base_of(costs, name):
            value = getattr(costs, name)
            changed[name] = adjust[name] if is_number(value) else _times(value, adjust[name])
    if "transfer_s" in adjust and adjust["transfer_s"] != base_of(costs, "transfer_s"):
        changed |= _transfer(costs, adjust["transfer_s"])
    return replace(costs, **changed) if changed else costs


def _times(value: Any, factor: float) -> Any:
    only = Costs(forward_s=value, backward_input_s=0.0, backward_weight_s=0.0)
    return scaled(only, work=factor, memory=1.0).forward_s


def _transfer(costs: Costs, value: float) -> dict[str, Any]:
    size = costs.message_bytes or 1.0
    if not is_number(costs.bandwidth):
        return {"bandwidth": np.asarray(costs.bandwidth, np.float64) / max(value, 1e-12)}
    return {"message_bytes": size, "bandwidth": size / value if value > 0 else np.inf}


def costs_code(costs: Costs) -> str | None:
    """Return the costs as a line of Python; None where they are not made of numbers alone."""
    if type(costs) is not Costs:
        return None
    said = []
    for f in fields(Costs):
        value = getattr(costs, f.name)
        if value is None or isinstance(value, str):
            if value != f.default:
                said.append(f"{f.name}={value!r}")
        elif not is_number(value):
            return None
        elif f.name.startswith(("forward", "backward")) or value != f.default:
            said.append(f"{f.name}={_number(value)}")
    return f"mappnb.Costs({', '.join(said)})"


def _number(value: Any) -> str:
    number = value.item() if hasattr(value, "item") else value
    if np.isinf(number):
        return 'float("inf")'
    return f"{float(f'{number:.12g}')!r}" if isinstance(number, float) else repr(number)


def straggler_code(straggler: Straggler) -> str:
    """Return a straggler as Python."""
    said = [
        f"{f.name}={getattr(straggler, f.name)!r}" for f in fields(Straggler) if getattr(straggler, f.name) != f.default
    ]
    return f"mappnb.sched.Straggler({', '.join(said)})"


def stragglers_code(stragglers: Sequence[Straggler]) -> str:
    """Return stragglers as a Python list."""
    return f"[{', '.join(map(straggler_code, stragglers))}]"
