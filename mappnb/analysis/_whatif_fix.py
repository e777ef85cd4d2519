"""Which operations a ``fix`` means: ranks, stages, links, operations, steps, and their crossings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mappnb.analysis._whatif_model import Model
from mappnb.errors import MappnbError, did_you_mean

__all__ = ["Fix", "chosen", "compares_stages", "read_fix"]

Mask = npt.NDArray[np.bool_]
Fix = str | int | tuple[int, int] | Mapping[str, Any]
KEYS: Final = ("rank", "stage", "dp_rank", "host", "link", "op", "step")


@dataclass(frozen=True, slots=True)
class _Question:
    """A model, and the host of each rank."""

    model: Model
    hosts: Mapping[int, str]


def read_fix(fix: Fix | Sequence[Fix]) -> list[dict[str, list[Any]]]:
    """Return a fix as a list of crossings: each maps what it is about to the values that it may have.

    Raises
    ------
    MappnbError
        If it cannot be read; the message says how a fix is written.
    """
    if isinstance(fix, (list, set, frozenset)):
        return [one for part in fix for one in read_fix(part)]
    if isinstance(fix, tuple):
        fix = {"link": fix}
    if isinstance(fix, str):
        fix = _from_text(fix)
    if not isinstance(fix, Mapping) or not fix:
        raise MappnbError(f"what_if: cannot read fix={fix!r}; {_HOW}")
    if unknown := [k for k in fix if k not in KEYS]:
        raise MappnbError(
            f"what_if: fix has {unknown[0]!r}; known are {', '.join(KEYS)}{did_you_mean(str(unknown[0]), KEYS)}"
        )
    return [{key: _values(key, value) for key, value in fix.items()}]


_HOW: Final = (
    "write fix={'rank': 5}, {'stage': 1}, {'dp_rank': 0}, {'host': 'node3'}, {'link': (3, 7)}, {'op': 'backward'} or {'step': 4}; several "
    "keys cross ({'rank': [5, 6], 'op': 'forward'}), a list of such is all of them; short: '3->7', 'rank 5', 'backward'"
)


def _from_text(text: str) -> dict[str, Any]:
    if m := re.fullmatch(r"\s*(?:link\s+)?(\d+)\s*->\s*(\d+)\s*", text):
        return {"link": (int(m[1]), int(m[2]))}
    if m := re.fullmatch(rf"\s*({'|'.join(KEYS)})\s+(\S.*?)\s*", text):
        return {m[1]: int(m[2]) if m[2].isdigit() and m[1] not in ("host", "op") else m[2]}
    return {"op": text}


def _values(key: str, value: Any) -> list[Any]:
    if key == "link":
        return [_link(v) for v in (value if isinstance(value, (list, set, frozenset)) else [value])]
    values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if key in ("op", "host"):
        return [str(v) for v in values]
    if not all(isinstance(v, (int, np.integer)) and not isinstance(v, bool) for v in values):
        raise MappnbError(f"what_if: fix has {key} {value!r}; expected a whole number or a list of them; {_HOW}")
    return [int(v) for v in values]


def _link(value: Any) -> tuple[int, int]:
    if isinstance(value, str) and (m := re.fullmatch(r"\s*(\d+)\s*->\s*(\d+)\s*", value)):
        return int(m[1]), int(m[2])
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, (int, np.integer)) for v in value):
        return int(value[0]), int(value[1])
    raise MappnbError(
        f"what_if: fix has link {value!r}; expected (sender, receiver) or 'sender->receiver', as (3, 7) or '3->7'"
    )


def chosen(crossings: list[dict[str, list[Any]]], model: Model, hosts: Mapping[int, str]) -> Mask:
    """Return which operations are meant, dims (op,).

    Raises
    ------
    MappnbError
        If a value is not in the run, or nothing is meant.
    """
    out = np.zeros(len(model), bool)
    question = _Question(model, hosts)
    for crossing in crossings:
        mine = np.ones(len(model), bool)
        for key, values in crossing.items():
            mine &= _FIND[key](question, values)
        if not mine.any():
            raise MappnbError(f"what_if: no operation is at {crossing!r} at once; leave one of them out")
        out |= mine
    return out


def compares_stages(crossings: list[dict[str, list[Any]]], mask: Mask, model: Model) -> bool:
    """Return whether a fix names a stage, or takes in half of a stage's ranks: what is left of it is no measure then."""
    if any("stage" in c for c in crossings):
        return True
    if not any(key in c for c in crossings for key in ("rank", "dp_rank", "host")):
        return False
    for stage in np.unique(model.stage[mask & (model.stage >= 0)]).tolist():
        there = model.stage == stage
        if 2 * len(np.unique(model.rank[there & mask])) >= len(np.unique(model.rank[there & (model.rank >= 0)])):
            return True
    return False


def _numbers(name: str) -> Callable[[_Question, list[int]], Mask]:
    def find(q: _Question, values: list[int]) -> Mask:
        column = getattr(q.model, name)
        known = np.unique(column[column >= 0])
        _known(name, values, known.tolist())
        return np.isin(column, values)

    return find


def _steps(q: _Question, values: list[int]) -> Mask:
    _known("step", values, q.model.steps.tolist())
    return np.isin(q.model.step, np.flatnonzero(np.isin(q.model.steps, values)))


def _hosts(q: _Question, values: list[str]) -> Mask:
    _known("host", values, sorted(set(q.hosts.values())))
    return np.isin(q.model.rank, [r for r, h in q.hosts.items() if h in values])


def _links(q: _Question, values: list[tuple[int, int]]) -> Mask:
    m = q.model
    pairs = sorted({(int(a), int(b)) for a, b in np.unique(np.stack([m.sender, m.receiver], 1), axis=0) if a >= 0})
    _known("link", [f"{a}->{b}" for a, b in values], [f"{a}->{b}" for a, b in pairs])
    out = np.zeros(len(m), bool)
    for a, b in values:
        out |= (m.sender == a) & (m.receiver == b)
    return out


def _ops(q: _Question, values: list[str]) -> Mask:
    names = q.model.words.names
    _known("op", values, sorted(frozenset().union(*(names[i] for i in np.unique(q.model.words.name).tolist()))))
    wanted = [i for i, words in enumerate(names) if words & set(values)]
    return np.isin(q.model.words.name, wanted)


def _known(key: str, values: list[Any], known: list[Any]) -> None:
    if wrong := [v for v in values if v not in known]:
        some = ", ".join(map(str, known[:20])) + (", ..." if len(known) > 20 else "")
        raise MappnbError(
            f"what_if: the run has no {key.replace('_', ' ')} {wrong[0]}; it has {some or 'none'}{did_you_mean(str(wrong[0]), known)}"
        )


_FIND: Final[Mapping[str, Callable[[_Question, list[Any]], Mask]]] = {
    "rank": _numbers("rank"),
    "stage": _numbers("stage"),
    "dp_rank": _numbers("dp_rank"),
    "host": _hosts,
    "link": _links,
    "op": _ops,
    "step": _steps,
}
