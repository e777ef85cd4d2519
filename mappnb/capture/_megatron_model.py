"""Megatron-core models: found at their first forward step, hooked without a change to the training script."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from mappnb.capture._megatron_facts import unwrapped
from mappnb.capture._megatron_step import Place, StepSums
from mappnb.capture._module_spans import ModuleSpans
from mappnb.capture._patches import Patches
from mappnb.capture.points import SessionLike, state_of
from mappnb.capture.steps import Deferred
from mappnb.terms import Op

__all__ = ["MegatronModels"]

Function = Callable[..., Any]


class MegatronModels:
    """The model chunks of this rank, and what their microbatches hold.

    Parameters
    ----------
    session
        Where to record.
    sums
        Of the current step.
    """

    def __init__(self, session: SessionLike, sums: StepSums) -> None:
        self._session = session
        self._sums = sums
        self._watchers = state_of(session).watchers
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: Callable[[], Any] = _nothing  # weak reference to the model seen last
        self._spans: ModuleSpans | None = None
        self._place: Place = (-1, -1, -1)
        self._tokens = -1
        self._training = False

    def enter(self, model: Any, place: Place, *, training: bool) -> None:
        """Begin a forward step of ``model``; hook it the first time."""
        self._place, self._tokens, self._training = place, -1, training
        if self._last() is not model:
            self._last = weakref.ref(model)
            if model not in self._seen:
                self._seen.add(model)
                if self._session.plan.modules or self._session.plan.metrics:
                    self._attach(model)
        if self._spans is not None:
            self._spans.forget()
        for watcher in self._watchers:
            watcher.enter(model, place[1], place[2], training=training)

    def leave(self, *, default_tokens: int) -> int:
        """End the forward step; return its tokens: as seen by the model, or ``default_tokens``."""
        for watcher in self._watchers:
            watcher.leave()
        tokens = self._tokens if self._tokens >= 0 else default_tokens
        self._tokens = -1
        _, chunk, microbatch = self._place
        if self._session.plan.metrics and self._training and chunk == 0 and tokens > 0:
            self._session.metric("tokens", tokens, microbatch=microbatch, chunk=chunk)
        return tokens

    def leave_backward(self) -> None:
        """End a backward step."""
        if self._spans is not None:
            self._spans.end_tails()
            self._spans.forget()

    def step_ended(self) -> None:
        """Forget what exceptions left open."""
        if self._spans is not None:
            self._spans.drop_open()

    def detach(self) -> None:
        """Take all hooks off."""
        if self._spans is not None:
            self._spans.detach()
        self._seen.clear()
        self._last = _nothing

    def watch_loss(self, patches: Patches, module: ModuleType) -> bool:
        """Wrap ``LanguageModule.compute_language_model_loss(labels, logits)``."""
        owner = getattr(module, "LanguageModule", None)
        if owner is None:
            return False

        def make(original: Function) -> Function:
            return self._get_spans().wrap(original, op=Op.LOSS, position=2, keyword="logits")

        return patches.wrap(owner, "compute_language_model_loss", make)

    def watch_router(self, patches: Patches, module: ModuleType) -> bool:
        """Wrap ``TopKRouter.routing``, which says to which experts each token goes."""
        owner = getattr(module, "TopKRouter", None)
        return owner is not None and patches.wrap(owner, "routing", self._routing)

    def _get_spans(self) -> ModuleSpans:
        if self._spans is None:
            self._spans = ModuleSpans(self._session)
        return self._spans

    def _attach(self, model: Any) -> None:
        core, spans = unwrapped(model), self._get_spans()
        plan = self._session.plan
        if plan.modules or plan.metrics:
            before = self._see_batch if plan.metrics else None
            spans.attach(core, op=Op.MODEL, backward=False, before=before)
        if not plan.modules:
            return
        if getattr(core, "pre_process", True) and getattr(core, "embedding", None) is not None:
            spans.attach(core.embedding, op=Op.EMBEDDING)
        if getattr(core, "post_process", True) and getattr(core, "output_layer", None) is not None:
            spans.attach(core.output_layer, op=Op.OUTPUT_LAYER)
        for name, module in core.named_modules():
            number = getattr(module, "layer_number", None)
            if isinstance(number, int) and _is_layer(name, module):
                self._attach_layer(spans, module, number - 1, "mtp" if ".mtp." in f".{name}" else "")

    def _attach_layer(self, spans: ModuleSpans, layer: Any, number: int, name: str) -> None:
        spans.attach(layer, op=Op.LAYER, layer=number, name=name)
        for attribute, op in (("self_attention", Op.ATTENTION), ("mlp", Op.MLP), ("mixer", Op.MODULE)):
            part = getattr(layer, attribute, None)
            if part is not None and not type(part).__name__.startswith("Identity"):
                spans.attach(part, op=op, layer=number, name=name or ("mixer" if op == Op.MODULE else ""))

    def _see_batch(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what the model is called with: how many tokens, in documents of which lengths."""
        if not self._training or self._place[1] > 0:
            return
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is not None:
            self._tokens = int(ids.numel()) * self._sums.token_shards
        packed = kwargs.get("packed_seq_params", args[6] if len(args) > 6 else None)
        lengths = None
        if packed is not None and getattr(packed, "cu_seqlens_q", None) is not None:
            lengths = packed.cu_seqlens_q.detach().diff()
        elif self._sums.token_shards == 1:
            lengths = _document_lengths(args[1] if len(args) > 1 else kwargs.get("position_ids"))
        if lengths is not None:
            self._session.metric("document_tokens", lengths, microbatch=self._place[2], chunk=self._place[1])

    def _routing(self, original: Function) -> Function:
        import torch

        recorder, session = self._session.recorder, self._session
        graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)

        def routing(router: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(router, *args, **kwargs)
            if recorder.enabled and session.plan.metrics and self._training and graph_task() == -1:
                try:
                    self._count_experts(router, result)
                except Exception as err:  # noqa: BLE001
                    session.fail("router", err)
            return result

        return routing

    def _count_experts(self, router: Any, result: Any) -> None:
        chosen = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        num_experts = getattr(router.config, "num_moe_experts", None)
        if chosen is None or chosen.dim() != 2 or chosen.shape[1] != num_experts:
            return
        layer = int(getattr(router, "layer_number", None) or 0) - 1
        _, chunk, microbatch = self._place
        counts = chosen.detach().sum(dim=0)
        self._session.metric("expert_tokens", counts, microbatch=microbatch, chunk=chunk, layer=layer)


def _nothing() -> None:
    return None


def _is_layer(name: str, module: Any) -> bool:
    """Whether a module with a layer number is a layer, not one of its parts."""
    return hasattr(module, "mlp") or hasattr(module, "mixer") or name.rpartition(".")[0].endswith("layers")


def _document_lengths(position_ids: Any) -> Any:
    """Lengths of the documents in a batch whose positions begin at 0 in each, worked out later; None on a GPU, where it would wait."""
    if position_ids is None or not position_ids.is_cpu or position_ids.dim() != 2:
        return None
    return Deferred(lengths_of, position_ids.detach().numpy().copy())


def lengths_of(positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the lengths of the documents of a batch, shape (document,), from positions, shape (sample, token)."""
    starts = positions == 0
    starts[:, 0] = True
    at = starts.ravel().nonzero()[0]
    lengths: np.ndarray[Any, Any] = np.empty_like(at)  # np.diff takes three times as long
    np.subtract(at[1:], at[:-1], out=lengths[:-1])
    lengths[-1:] = starts.size - at[-1:]
    return lengths
