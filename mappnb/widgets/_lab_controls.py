"""The controls of the schedule lab: what they are called, what they do, how far they go; and what the browser may set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mappnb.errors import MappnbError
from mappnb.sched.codes import MAX_MICROBATCHES
from mappnb.sched.costs import Costs
from mappnb.widgets._lab_settings import KNOBS, SLOW_KINDS, Settings, Slow, base_of, is_number, transfer_of, varies
from mappnb.widgets._messages import flag, number, text, whole

__all__ = ["Units", "changed", "controls", "values_of"]

_HELP = {
    "forward_s": ("Forward", "Time of one microbatch's forward through a rank's whole share of the model."),
    "backward_input_s": ("Backward, input", "The part of the backward whose result the previous stage waits for (I)."),
    "backward_weight_s": (
        "Backward, weight",
        "The part that gives the weight gradients (W); zero-bubble schedules put it off.",
    ),
    "p2p_s": ("Latency", "Time from the end of a message on the wire until the next stage can begin."),
    "transfer_s": (
        "Transfer",
        "Time of a message on the wire: its bytes over the bandwidth. Messages of one link queue.",
    ),
}
_TIMES: tuple[tuple[str, float], ...] = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_SLOW_HELP = "Makes one rank, one stage, or the messages from one rank to the next slower by the factor."


@dataclass(frozen=True, slots=True)
class Units:
    """Units of the view.

    Attributes
    ----------
    time, memory : str
        What they are called.
    time_scale, memory_scale : float
        How many of them are in a second, and in a unit of the costs' memory.
    """

    time: str
    time_scale: float
    memory: str
    memory_scale: float

    @classmethod
    def of(cls, costs: Costs, longest_s: float) -> Units:
        """Return units in which a step and an activation are handy numbers."""
        time, scale = next(u for u in _TIMES if longest_s * u[1] >= 30 or u is _TIMES[-1])
        most = float(np.max(np.asarray(costs.activation, np.float64)))
        if is_number(costs.activation) and most == 1.0:
            return cls(time, scale, "microbatches", 1.0)
        return cls(time, scale, "GB", 1e-9) if most > 1e5 else cls(time, scale, "units", 1.0)


def controls(base: Costs, settings: Settings, units: Units, *, num_ranks: int) -> list[dict[str, Any]]:
    """Return the controls, by group, for the browser."""
    out = [_knob(base, settings, name, units) for name in KNOBS]
    least = float(np.max(settings.memory_limit)) * units.memory_scale if settings.memory_limit is not None else None
    most = max(64, 4 * settings.num_microbatches)
    out += [
        {
            "name": "num_microbatches", "group": "Step", "label": "Microbatches", "kind": "range", "min": 1, "max": most, "step": 1,
            "unit": "", "help": "Microbatches of a step. Interleaved schedules want a multiple of the number of ranks.",
        },
        {
            "name": "memory_limit", "group": "Step", "label": "Memory limit", "kind": "number", "min": 0, "max": None,
            "step": "any", "unit": units.memory, "value": least,
            "help": f"What a rank may hold, in {units.memory}; empty: no limit. Schedules that need more say so; policies keep to it.",
        },
        {
            "name": "slow_kind", "group": "What if", "label": "Straggler", "kind": "select",
            "options": list(SLOW_KINDS), "help": _SLOW_HELP,
        },
        {
            "name": "slow_which", "group": "What if", "label": "Which", "kind": "number", "min": 0, "max": 4 * num_ranks - 1,
            "step": 1, "unit": "", "help": "Number of the rank or stage; of a link the rank that sends.",
        },
        {
            "name": "slow_factor", "group": "What if", "label": "Slower by", "kind": "range", "min": 1, "max": 4, "step": "any",
            "unit": "×", "help": "What its durations are multiplied by.",
        },
        {
            "name": "draw", "group": "What if", "label": "Draw durations", "kind": "check", "disabled": not varies(base),
            "help": "Draw each duration from its distribution, with a fixed seed; off: means."
            + ("" if varies(base) else " These costs hold no distribution (fit_costs(run, statistic='empirical') gives some)."),
        },
    ]  # fmt: skip
    return out


def _knob(base: Costs, settings: Settings, name: str, units: Units) -> dict[str, Any]:
    label, said = _HELP[name]
    group = "Costs" if name in KNOBS[:3] else "Messages"
    value = transfer_of(base) if name == "transfer_s" else getattr(base, name)
    if not is_number(value):
        return {"name": name, "group": group, "label": label, "kind": "range", "min": 0, "max": 4, "step": "any", "unit": "×",
                "help": f"{said} A factor: the cost differs over the model."}  # fmt: skip
    start = max(float(value), settings.adjust.get(name, 0.0))
    whole_share = float(np.mean([_mean(getattr(base, n)) for n in KNOBS[:3]])) or 1e-3
    most = max(3 * start, whole_share if group == "Messages" else 3e-9) * units.time_scale
    return {"name": name, "group": group, "label": label, "kind": "range", "min": 0, "max": float(f"{most:.2g}"), "step": "any",
            "unit": units.time, "help": said}  # fmt: skip


def _mean(value: Any) -> float:
    if isinstance(value, (list, tuple)):
        return float(np.mean([_mean(v) for v in value]))
    return float(np.mean(value)) if not hasattr(value, "mean") or isinstance(value, np.ndarray) else float(value.mean())


def values_of(base: Costs, settings: Settings, units: Units) -> dict[str, Any]:
    """Return where the controls stand, in the units of the view."""
    out: dict[str, Any] = {}
    for name in KNOBS:
        value = settings.adjust.get(name, base_of(base, name))
        out[name] = float(f"{value * _scale(base, name, units):.12g}")
    limit = settings.memory_limit
    slow = settings.slow
    return out | {
        "num_microbatches": settings.num_microbatches,
        "memory_limit": None if limit is None else float(f"{np.max(limit) * units.memory_scale:.12g}"),
        "slow_kind": slow.kind,
        "slow_which": slow.which,
        "slow_factor": slow.factor,
        "draw": settings.seed is not None,
    }


def _scale(base: Costs, name: str, units: Units) -> float:
    value = transfer_of(base) if name == "transfer_s" else getattr(base, name)
    return units.time_scale if is_number(value) else 1.0


def changed(settings: Settings, values: Mapping[str, Any], base: Costs, units: Units, *, seed: int) -> Settings:
    """Return the settings with what the browser has set; only what is among ``values`` changes.

    Raises
    ------
    MappnbError
        If a value is not what the control gives.
    """
    said = {"kind": "set", **values}
    adjust = dict(settings.adjust)
    for name in KNOBS:
        if name in values:
            value = number(said, name)
            if value < 0:
                raise MappnbError(f"{name} is {value}; expected a number of at least 0")
            adjust[name] = value / _scale(base, name, units)
    new = replace(settings, adjust=adjust)
    if "num_microbatches" in values:
        new = replace(new, num_microbatches=whole(said, "num_microbatches", 1, MAX_MICROBATCHES))
    if "memory_limit" in values:
        limit = None if values["memory_limit"] is None else number(said, "memory_limit") / units.memory_scale
        new = replace(new, memory_limit=limit if limit is None or limit > 0 else None)
    if "draw" in values:
        new = replace(new, seed=seed if flag(said, "draw") else None)
    return replace(new, slow=_slow(new.slow, said))


def _slow(slow: Slow, said: Mapping[str, Any]) -> Slow:
    if "slow_kind" in said:
        kind = text(said, "slow_kind", most=10)
        if kind not in SLOW_KINDS:
            raise MappnbError(f"straggler: {kind!r}; expected one of {', '.join(SLOW_KINDS)}")
        slow = replace(slow, kind=kind)
    if "slow_which" in said:
        slow = replace(slow, which=whole(said, "slow_which", 0, 100_000))
    if "slow_factor" in said:
        slow = replace(slow, factor=max(number(said, "slow_factor"), 1e-3))
    return slow
