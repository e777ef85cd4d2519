"""One forward (or forward and backward) of a live model: megatron-core's schedule for any layout, or a plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from mappnb.capture._megatron_facts import unwrapped
from mappnb.capture.marks import current
from mappnb.errors import InterpError
from mappnb.interp._model_batch import Batch
from mappnb.interp._model_gather import gather_logits
from mappnb.interp._model_taps import Handler

__all__ = ["Loss", "is_megatron", "layout_of", "max_tokens", "run_model"]

Loss = Callable[[Any], Any]
"""Logits at the last real token, dims (row, vocab) -> a number to go backward from."""

_CALLBACKS = ("finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "param_sync_func")


def is_megatron(module: Any) -> bool:
    """Return whether a module is a model chunk of megatron-core."""
    inner = unwrapped(module)
    return hasattr(inner, "decoder") and hasattr(inner, "set_input_tensor") and hasattr(inner, "config")


def layout_of(chunks: Sequence[Any]) -> dict[str, int]:
    """Return the sizes of the parallel groups, and ``sequence_parallel`` as 0 or 1."""
    if not is_megatron(chunks[0]):
        return {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "num_chunks": 1, "sequence_parallel": 0}
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        raise InterpError(
            "megatron-core's process groups do not exist: call parallel_state.initialize_model_parallel() first"
        )
    return {
        "tp": state.get_tensor_model_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
        "num_chunks": len(chunks),
        "sequence_parallel": int(unwrapped(chunks[0]).config.sequence_parallel),
    }


def max_tokens(chunk: Any) -> int | None:
    """Return how many tokens a model has learned positions for, None where positions have no end."""
    inner = unwrapped(chunk)
    if is_megatron(chunk):
        learned = getattr(inner, "position_embedding_type", "") == "learned_absolute"
        return int(inner.max_sequence_length) if learned else None
    limit = getattr(getattr(inner, "config", None), "n_positions", None)
    return None if limit is None else int(limit)


def run_model(
    chunks: Sequence[Any], batch: Batch, handler: Handler, *, which: str, vocab_size: int, loss: Loss | None = None
) -> Any:
    """Run one batch through the model, with the handler at its taps.

    Parameters
    ----------
    chunks : sequence of Module
        This rank's model chunks.
    batch : Batch
        From `pack`.
    handler : Handler
        Told the rows of each microbatch before it runs.
    which : str
        ``"all"`` or ``"last"`` (the last real token) logits.
    vocab_size : int
        Logits of one token, padding of the vocabulary included.
    loss : callable, optional
        Go backward from it too; weights are frozen meanwhile.

    Returns
    -------
    Tensor, dims (row, slot, vocab) or (row, vocab)
        float32 (float64 for a float64 model), the same on every rank.
    """
    import torch

    with ExitStack() as stack:
        stack.enter_context(_gathered(chunks))
        stack.enter_context(_evaluating(chunks))
        stack.enter_context(torch.set_grad_enabled(loss is not None))
        if loss is not None:
            stack.enter_context(_frozen(chunks))
            stack.enter_context(_unrecorded())
        job = _Job(chunks, batch, handler, which, loss)
        if not is_megatron(chunks[0]):
            return job.plain()
        local = job.scheduled()
        rows = len(batch.packed)
        shape = (rows, batch.packed.shape[1], vocab_size) if which == "all" else (rows, vocab_size)
        return gather_logits(local, shape, dtype=job.dtype, device=job.device, shares=job.shares)


class _Job:
    """One call of `run`."""

    def __init__(self, chunks: Sequence[Any], batch: Batch, handler: Handler, which: str, loss: Loss | None) -> None:
        import torch

        weight = next(chunks[0].parameters())
        self.device, self.dtype = weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.chunks, self.batch, self.handler, self.which, self.loss = list(chunks), batch, handler, which, loss
        self.tokens = torch.as_tensor(batch.packed, device=self.device)
        self.last = torch.as_tensor(batch.last, device=self.device)
        self.logits: dict[int, Any] = {}  # microbatch -> this rank's columns
        self.shares = _shares(batch.packed.shape[1]) if is_megatron(chunks[0]) else None

    def plain(self) -> Any:
        """Call a torch module once."""
        self.handler.rows = self.batch.rows[0]
        config = getattr(self.chunks[0], "config", None)
        options = {"use_cache": False} if hasattr(config, "use_cache") else {}
        output = self.chunks[0](self.tokens, **options)
        logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
        self._pick(0, logits)
        if self.loss is not None:
            self.loss(self._last(logits, 0)).backward()
        return self.logits[0]

    def scheduled(self) -> Any:
        """Run through megatron-core's schedule; return the logits on the last stage, None elsewhere."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._mask = torch.ones(1, 1, *2 * self.tokens.shape[1:], dtype=torch.bool, device=self.device).triu(1)
        self._positions = torch.arange(self.tokens.shape[1], device=self.device)
        if self.shares is not None:
            from megatron.core import parallel_state

            self.handler.share = self.shares[parallel_state.get_context_parallel_rank()]
            self._positions = torch.as_tensor(self.handler.share, device=self.device)
        count = self.batch.num_microbatches
        iterators = [iter(range(count)) for _ in self.chunks]
        with _quiet_config(self.chunks, backward=self.loss is not None):
            get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
                model=self.chunks,
                num_microbatches=count,
                seq_length=self.tokens.shape[1],
                micro_batch_size=len(self.tokens) // count,
                forward_only=self.loss is None,
                collect_non_loss_data=self.loss is None,
            )
        return torch.cat([self.logits[i] for i in range(count)]) if self.logits else None

    def _forward_step(self, iterator: Iterator[int], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        import torch

        index = next(iterator)
        self.handler.rows = rows = self.batch.rows[index]
        tokens = self.tokens[torch.as_tensor(rows, device=self.device)][:, self._positions]
        return chunk(tokens, self._positions.expand_as(tokens), self._mask), partial(self._finish, index=index)

    def _finish(self, logits: Any, *, index: int, non_loss_data: bool = False) -> Any:
        self._pick(index, logits)
        if self.loss is None:
            return index
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        whole, size = gather_from_tensor_model_parallel_region(self._last(logits, index)), 1
        if self.shares is not None:  # the gradient goes to the rank that has the token
            size = len(self.shares)
            whole = _summed(whole.detach()) + (whole - whole.detach())
        # the schedule multiplies by the context-parallel size and divides by the number of microbatches, in place
        return self.loss(whole) * (self.batch.num_microbatches / size), {}

    def _last(self, logits: Any, index: int) -> Any:
        import torch

        last = self.last[torch.as_tensor(self.batch.rows[index], device=self.device)]
        rows = torch.arange(len(last), device=self.device)
        if self.handler.share is None:
            return logits[rows, last]
        found = self._positions == last[:, None]  # (row, local slot)
        return logits[rows, found.int().argmax(1)] * found.any(1)[:, None]

    def _pick(self, index: int, logits: Any) -> None:
        picked = logits if self.which == "all" else self._last(logits, index)
        self.logits[index] = picked.detach().to(self.dtype)


def _shares(num_slots: int) -> list[np.ndarray] | None:
    """Slots of each context-parallel rank, None without: of twice as many pieces as ranks, rank r has r and the r-th from the end."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    pieces = np.arange(num_slots).reshape(2 * size, -1) if size > 1 else None
    return None if pieces is None else [np.concatenate([pieces[r], pieces[-1 - r]]) for r in range(size)]


def _summed(tensor: Any) -> Any:
    """Sum over the context-parallel ranks; all but one have 0."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    tensor = tensor.clone()
    dist.all_reduce(tensor, group=parallel_state.get_context_parallel_group())
    return tensor


@contextmanager
def _evaluating(chunks: Sequence[Any]) -> Iterator[None]:
    """Switch dropout off; afterwards every module is as it was."""
    training = [module for chunk in chunks for module in chunk.modules() if module.training]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _gathered(chunks: Sequence[Any]) -> Iterator[None]:
    """Have all parameters of a distributed optimizer that gathers them during the forward pass; as Megatron-LM before evaluation."""
    waiting = [chunk for chunk in chunks if getattr(chunk, "remove_forward_pre_hook_handles", None)]
    for chunk in waiting:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in waiting:
            chunk.enable_forward_pre_hook()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Keep a backward pass that is no training step out of this process's recording."""
    session = current()
    if session is None or not session.recorder.enabled:
        yield
        return
    session.recorder.enabled = False
    try:
        yield
    finally:
        session.recorder.enabled = not session.degraded


@contextmanager
def _frozen(chunks: Sequence[Any]) -> Iterator[None]:
    """Let no gradient reach a weight: what training has accumulated stays as it is."""
    free = [weight for chunk in chunks for weight in chunk.parameters() if weight.requires_grad]
    for weight in free:
        weight.requires_grad = False
    try:
        yield
    finally:
        for weight in free:
            weight.requires_grad = True


@contextmanager
def _quiet_config(chunks: Sequence[Any], *, backward: bool) -> Iterator[None]:
    """Take training's callbacks out of the configuration that the schedule reads."""
    config = unwrapped(chunks[0]).config
    changes: dict[str, Any] = dict.fromkeys(_CALLBACKS) if backward else {}
    changes |= {"deallocate_pipeline_outputs": False} if hasattr(config, "deallocate_pipeline_outputs") else {}
    old = {name: getattr(config, name) for name in changes}
    for name, value in changes.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(config, name, value)
