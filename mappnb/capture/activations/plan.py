"""What a recording takes from inside the model: rules by point, layer, token, head and step, and what they may cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from mappnb.activation_points import POINTS, PointName
from mappnb.capture.activations.rules import MODES, Capture, check_keys
from mappnb.capture.activations.selection import TokenSample, is_count
from mappnb.errors import CaptureError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

    from mappnb.layout import Layout

__all__ = ["MODES", "NAMED", "POLICIES", "Capture", "CapturePlan", "TokenSample", "parse_activations"]

POLICIES: Final = ("block", "drop", "thin")
"""What to do when the writer cannot keep up: wait for it, leave microbatches out, or leave out more and more of them evenly."""


@dataclass(frozen=True, slots=True, init=False)
class CapturePlan:
    """What ``mappnb.record(..., activations=plan)`` takes from inside the model.

    Parameters
    ----------
    *rules : Capture
        One stream each.
    budget_bytes : int
        Most bytes that a rank may capture in one step, before compression; a plan above it is refused.
    policy : str
        When the writer is behind by ``queue_bytes``: ``"block"`` waits for it, ``"drop"`` leaves captures out and counts them,
        ``"thin"`` captures every second, fourth, ... microbatch.
    queue_bytes : int
        Bytes that may wait to be written.
    vocabulary : sequence of str or "bytes", optional
        Text of each token id; ``"bytes"`` where tokens are bytes.
    names : dict, optional
        For torch models whose modules have other names than Hugging Face's: point -> module path, as in
        `mappnb.capture.activations.taps.find_taps`.

    Raises
    ------
    CaptureError
        For rules or values that cannot work.
    """

    rules: tuple[Capture, ...]
    budget_bytes: int
    policy: str
    queue_bytes: int
    vocabulary: tuple[str, ...] | str | None = field(repr=False)
    names: Mapping[str, str] | None

    def __init__(
        self,
        *rules: Capture,
        budget_bytes: int = 2**28,
        policy: str = "block",
        queue_bytes: int = 2**28,
        vocabulary: Sequence[str] | str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "rules", _with_names(rules))
        set_field(self, "budget_bytes", budget_bytes)
        set_field(self, "policy", policy)
        set_field(self, "queue_bytes", queue_bytes)
        set_field(
            self, "vocabulary", vocabulary if vocabulary is None or isinstance(vocabulary, str) else tuple(vocabulary)
        )
        set_field(self, "names", None if names is None else dict(names))
        for key in ("budget_bytes", "queue_bytes"):
            if not is_count(getattr(self, key)):
                raise CaptureError(
                    f"CapturePlan: {key} is {getattr(self, key)!r}; expected a number of bytes, at least 1"
                )
        if policy not in POLICIES:
            raise CaptureError(
                f"CapturePlan: unknown policy {policy!r}; known: {', '.join(POLICIES)}{did_you_mean(policy, POLICIES)}"
            )
        if isinstance(vocabulary, str) and vocabulary != "bytes":
            raise CaptureError(
                f"CapturePlan: vocabulary is {vocabulary!r}; expected 'bytes', or the text of each token id"
            )

        for point in self.names or ():
            if point not in POINTS:
                raise CaptureError(
                    f"CapturePlan: names: unknown point {point!r}{did_you_mean(point, POINTS)}; known: {', '.join(POINTS)}"
                )

    @classmethod
    def named(cls, name: str) -> CapturePlan:
        """Return one of the plans of ``NAMED``: ``"default"``, ``"residual"``, ``"attention"``.

        Raises
        ------
        CaptureError
            If there is none of that name.
        """
        if name not in NAMED:
            raise CaptureError(
                f"unknown plan of activations {name!r}; known: {', '.join(NAMED)}{did_you_mean(name, NAMED)}"
            )
        return cls(*NAMED[name])

    def wants_step(self, step: int) -> bool:
        """Whether any rule captures in a step."""
        return any(rule.wants_step(step) for rule in self.rules)

    def point_names(self) -> list[PointName]:
        """Return the points of all rules, each once."""
        return list(dict.fromkeys(name for rule in self.rules for name in rule.point_names()))

    def estimate(self, facts: Mapping[str, Any], layout: Layout | None = None, **batch: int) -> pd.DataFrame:
        """Return what a captured step costs the rank that captures most.

        Parameters
        ----------
        facts : mapping
            Of the model, as ``mappnb.capture.activations.facts.model_facts`` gives them: num_layers, hidden, num_heads, num_kv_heads,
            head_dim, ffn, vocab, gated, num_experts, dtype.
        layout : Layout, optional
            Default: one rank.
        **batch : int
            ``sequence_length``, ``micro_batch`` (samples of a microbatch) and ``num_microbatches`` (of a step and rank), where the
            facts do not have them.

        Returns
        -------
        DataFrame
            Columns stream, point, layers (how many), bytes_per_step; largest first; ``attrs["total_bytes"]``, ``attrs["stage"]``.

        Raises
        ------
        CaptureError
            If the total is above ``budget_bytes``, with what to drop; or if the facts or the plan do not fit.
        """
        from mappnb.capture.activations.estimate import estimate

        return estimate(self, facts, layout, **batch)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        return {
            "rules": [rule.to_dict() for rule in self.rules],
            "budget_bytes": self.budget_bytes,
            "policy": self.policy,
            "queue_bytes": self.queue_bytes,
            "vocabulary": list(self.vocabulary) if isinstance(self.vocabulary, tuple) else self.vocabulary,
            "names": self.names,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CapturePlan:
        """Return the plan that :meth:`to_dict` wrote, or one written by hand.

        Raises
        ------
        CaptureError
            For a key that does not exist, or a value that cannot work.
        """
        check_keys(values, {f.name for f in fields(cls)}, "capture plan")
        rules = values.get("rules", [])
        if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, Mapping) for rule in rules):
            raise CaptureError(f"capture plan: rules is {rules!r}; expected a list of objects, one for each rule")
        return cls(*(Capture.from_dict(rule) for rule in rules), **{k: v for k, v in values.items() if k != "rules"})


def parse_activations(value: Any) -> CapturePlan | None:
    """Return the plan that ``mappnb.record(..., activations=value)`` asks for.

    Parameters
    ----------
    value : None, str, CapturePlan, Capture or mapping
        None: nothing is captured. A str is the name of a plan, the path of a ``.json`` file with one, or a plan as JSON.

    Raises
    ------
    CaptureError
        For anything else, and for a plan that cannot work.
    """
    if value is None or isinstance(value, CapturePlan):
        return value
    if isinstance(value, Capture):
        return CapturePlan(value)
    if isinstance(value, str) and value.endswith(".json"):
        value = _text_of(value)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            found = json.loads(value)
        except ValueError as err:
            raise CaptureError(f"activations: a plan as JSON was expected, but it cannot be read: {err}") from None
        return CapturePlan.from_dict(found)
    if isinstance(value, str):
        return CapturePlan.named(value)
    if isinstance(value, Mapping):
        return CapturePlan.from_dict(value)
    raise CaptureError(
        f"activations is {value!r}; expected None, the name of a plan ({', '.join(NAMED)}), a mappnb.CapturePlan or its dict"
    )


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as err:
        raise CaptureError(f"activations: {path} cannot be read ({err}); expected a capture plan as JSON") from None


def _with_names(rules: Iterable[Capture]) -> tuple[Capture, ...]:
    """Give each rule the name of a stream of its own."""
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, Capture):
            raise CaptureError(f"CapturePlan: {rule!r} is no rule; write CapturePlan(Capture('resid_post'), ...)")
    given = [rule.name for rule in rules if rule.name]
    if twice := {name for name in given if given.count(name) > 1}:
        raise CaptureError(f"CapturePlan: two rules have the name {sorted(twice)[0]!r}; the name of a stream is unique")
    used, named = set(given), []
    for rule in rules:
        name, number = rule.name or rule.mode, 1
        while not rule.name and name in used:
            number += 1
            name = f"{rule.mode}_{number}"
        used.add(name)
        named.append(rule if rule.name else Capture.from_dict({**rule.to_dict(), "name": name}))
    return tuple(named)


_STATS: Final = Capture("all", mode="stats", every=10, name="stats")
NAMED: Final[dict[str, tuple[Capture, ...]]] = {
    "default": (_STATS,),
    "residual": (_STATS, Capture("resid_post", layers="every 4", mode="cast", every=10, name="residual")),
    "attention": (_STATS, Capture(("q_rot", "k_rot"), every=10, name="attention")),
}
"""Plans by name: statistics of every point at every 10th step, and that with the residual stream, or with queries and keys."""
