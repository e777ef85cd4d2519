"""Which tokens and heads a rule takes of what a rank holds, worked out once for each point and microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mappnb.capture.activations.copies import Copies
from mappnb.capture.activations.encode import packing_attrs
from mappnb.capture.activations.microbatch import Microbatch
from mappnb.capture.activations.pieces import Pending, TokensOf
from mappnb.capture.activations.plan import CapturePlan

__all__ = ["Streams", "Target"]

_PACKED_DIM = {"topk": "k", "bucket": "bucket", "sketch": "component"}


class Target:
    """Where the tensors of one point go in one stream, and what is taken of them.

    Attributes
    ----------
    stream, name, layer, point, mode, options
        Of the rule and the tap.
    wanted : bool
        False if another rank writes the same, or none of the chosen heads is here.
    """

    def __init__(self, rule: Any, tap: Any, grad: bool, facts: Mapping[str, Any]) -> None:
        self.rule, self.shard = rule, tap.shard
        self.stream, self.mode, self.options = rule.name, rule.mode, rule.options
        self.point, self.layer = tap.point, tap.layer
        self.name = f"{tap.point}_grad" if grad else tap.point
        self.sequence_parallel = tap.shard.token_size > 1
        self.shard_dict = tap.shard.to_dict()
        self._chosen, self._heads = self._choose(facts)
        self.wanted = tap.shard.writes and (self._heads is None or len(self._heads) > 0)
        self.sinks: Any = None
        if self.mode == "heads":
            if facts.get("softmax_type") == "learnable":
                self.sinks = getattr(tap.site.module, "softmax_offset", None)
            self.wanted = tap.point == "k_rot" or self.wanted
        dims = ("token", *tap.shard.features)
        self.packed_dims = (*dims[:-1], _PACKED_DIM.get(self.mode, dims[-1]))
        self.start = self.start_of(dims[-1])
        self.numpy_options = {"k": self.options["k"]} if self.mode == "topk" else {}
        self._attrs: dict[tuple[str, int], dict[str, Any]] = {}
        self._indexes: dict[Any, Any] = {}

    def _choose(self, facts: Mapping[str, Any]) -> tuple[dict[str, list[int]], list[int] | None]:
        """Return the chosen heads by global number, and their places here; (nothing, None): all."""
        dim = next((d for d in self.shard.features if d in ("head", "kv_head")), None)
        if dim is None or self.rule.heads is None:
            return {}, None
        wanted = self.rule.head_numbers(dim, num_heads=facts["num_heads"], num_kv_heads=facts["num_kv_heads"])
        part = self.shard.part(dim)
        here = [h for h in wanted if part.start <= h < part.stop]
        return {dim: here}, [h - part.start for h in here]

    def start_of(self, dim: str) -> int:
        """Return where this rank's part of a feature dim begins."""
        part = self.shard.split.get(dim)
        return 0 if part is None else part.start

    def attrs(self, dtype: str, length: int) -> dict[str, Any]:
        """Return the attributes of the stored array."""
        key = (dtype, length)
        if key not in self._attrs:
            attrs: dict[str, Any] = {"mode": self.mode, "dtype": dtype}
            if self.mode != "heads":
                attrs = packing_attrs(self.mode, self.options, dtype=dtype, length=length, start=self.start)
            if self.mode == "sketch" and self.shard.features[-1] in self.shard.split:
                attrs["combine"] = "sum"
            if self._chosen:
                attrs["chosen"] = self._chosen
            attrs["token_index"] = "token_index_sp" if self.sequence_parallel else "token_index"
            self._attrs[key] = {**attrs, "dims": list(self.shard.dims), "shard": self.shard_dict}
        return self._attrs[key]

    def select(self, tensor: Any, now: Microbatch) -> Any:
        """Return the chosen tokens and heads of a tensor, dims (sample, token, features...): a view where all are."""
        if self.rule.tokens is not None:
            tensor = tensor.index_select(1, self._index(_places(self.rule, now, self._tokens_here(now)), tensor.device))
        return self.select_heads(tensor, 2)

    def select_heads(self, tensor: Any, dim: int = 1) -> Any:
        """Return the chosen heads along a dim."""
        if self._heads is None:
            return tensor
        return tensor.index_select(dim, self._index(np.array(self._heads), tensor.device))

    def _tokens_here(self, now: Microbatch) -> np.ndarray[Any, Any]:
        """Return the slots of the tokens that the point has on this rank."""
        return now.token_index[self.shard.tokens(len(now.token_index))] if self.sequence_parallel else now.token_index

    def slots(self, now: Microbatch) -> np.ndarray[Any, Any]:
        """Return the slots of the tokens that are taken."""
        here = self._tokens_here(now)
        return here if self.rule.tokens is None else here[_places(self.rule, now, here)]

    def _index(self, places: np.ndarray[Any, Any], device: Any) -> Any:
        import torch

        key = (places.tobytes(), str(device))
        if key not in self._indexes:
            if len(self._indexes) > 64:  # a random choice of tokens is another for each microbatch
                self._indexes.clear()
            self._indexes[key] = torch.from_numpy(np.ascontiguousarray(places, np.int64)).to(device)
        return self._indexes[key]


class Streams:
    """The rules of a plan as streams.

    Parameters
    ----------
    plan : CapturePlan
    meta : mapping
        ``model``: the facts of the model.
    """

    def __init__(self, plan: CapturePlan, meta: Mapping[str, Any]) -> None:
        self._plan, self._meta = plan, meta
        self._targets: dict[tuple[int, int, bool], tuple[Any, Target]] = {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts of the model."""
        found: Mapping[str, Any] = self._meta.get("model") or {}
        return found

    def target(self, rule_index: int, tap: Any, grad: bool) -> Target:
        """Return where a tap's tensors go in a stream."""
        key = (rule_index, id(tap), grad)
        found = self._targets.get(key)
        if found is None:  # with the tap, so that no other can get its id
            found = self._targets[key] = (tap, Target(self._plan.rules[rule_index], tap, grad, self.facts))
        return found[1]

    def tokens_of(self, rule_index: int, now: Microbatch, copies: Copies) -> TokensOf:
        """Return the tokens of a microbatch that a stream takes, copied: the program may use its tensors again."""
        rule = self._plan.rules[rule_index]
        places = None if rule.tokens is None else _places(rule, now, now.token_index)
        slots = now.token_index if places is None else now.token_index[places]

        def copied(tensor: Any) -> Pending | None:
            if tensor is None:
                return None
            import torch

            chosen = tensor.detach()
            if places is not None:
                chosen = chosen.index_select(1, torch.from_numpy(places).to(tensor.device))
            return Pending(*copies.copy(chosen), reusable=False)

        return TokensOf(
            (now.step, now.dp_rank, now.microbatch),
            now.batch,
            slots,
            None,
            copied(now.token_ids),
            copied(now.positions),
            copied(now.mask),
            now.prompts,
            now,
        )


def _places(rule: Any, now: Microbatch, here: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the places, among the slots that are here, of those that a rule takes."""
    wanted = rule.slots(now.num_tokens, step=now.step, dp_rank=now.dp_rank, microbatch=now.microbatch)
    return np.flatnonzero(np.isin(here, wanted)).astype(np.int64)
