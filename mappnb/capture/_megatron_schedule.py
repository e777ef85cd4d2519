"""Megatron-core's pipeline schedules: steps, forward and backward of each microbatch, evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Literal

from mappnb.capture._data import timed
from mappnb.capture._flags import FAILED
from mappnb.capture._megatron_facts import current_iteration, layout_of, model_facts
from mappnb.capture._megatron_model import MegatronModels
from mappnb.capture._megatron_step import Outputs, Place, StepSums
from mappnb.capture._patches import Patches, loaded
from mappnb.capture.points import SessionLike, state_of
from mappnb.layout import Layout
from mappnb.terms import Category, Op, Phase

__all__ = ["ScheduleHooks"]

Function = Callable[..., Any]

_SCHEDULES: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class ScheduleHooks:
    """Wraps ``megatron.core.pipeline_parallel.schedules``.

    Parameters
    ----------
    session
        Where to record.

    Notes
    -----
    The schedules look ``forward_step`` and ``backward_step`` up in their module at each call, so these are seen even
    in a schedule function that the program took out of the module before recording began; only the evaluation span
    and the span of ``finalize_model_grads_func`` need the schedule function itself.
    """

    def __init__(self, session: SessionLike) -> None:
        self.session = session
        self.recorder = session.recorder
        self.sums = StepSums(session)
        self.models = MegatronModels(session, self.sums)
        self._outputs = Outputs()
        self._layout: Layout | None = None
        self._pp_rank = 0
        self._chunks: dict[int, int] = {}
        self._stages: dict[int, int] = {}  # by chunk
        self._timed: tuple[Any, Any] = (None, None)  # a data iterator, and what times it
        self._in_training = False  # the forward step under way
        self._mode: Literal["", "train", "evaluate"] = ""
        self._optimizer_seen = self._grad_seen = False
        self._seq_tokens = 0
        make = self.recorder.site
        self._forward = make(category=Category.COMPUTE, op=Op.FORWARD_STEP, phase=Phase.FORWARD)
        self._backward = make(category=Category.COMPUTE, op=Op.BACKWARD_STEP, phase=Phase.BACKWARD)
        self._evaluate = make(category=Category.EVALUATION, op=Op.EVALUATE)
        self._finalize = make(category=Category.HOST, op=Op.FINALIZE_GRADS)

    def watch(self, patches: Patches, schedules: ModuleType) -> list[str]:
        """Wrap the functions; returns the names of those that this version lacks."""
        wanted: list[tuple[str, Callable[[Function], Function]]] = [(name, self._schedule) for name in _SCHEDULES]
        wanted += [("forward_step", self._forward_step), ("backward_step", self._backward_step)]
        return [f"schedules.{name}" for name, make in wanted if not patches.wrap(schedules, name, make)]

    def stop(self) -> None:
        """Take the hooks off the models."""
        self.models.detach()

    def step_ended(self) -> None:
        """Tell what the step adds up to, and forget its tensors."""
        self._optimizer_seen = True
        self._grad_seen = False
        self.sums.tell()
        self._outputs.clear()
        self._timed = (None, None)
        self.models.step_ended()

    # ------------------------------------------------------------------ schedule
    def _schedule(self, original: Function) -> Function:
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            if not self.recorder.enabled:
                return original(*args, **kwargs)
            token, undo = 0, _nothing
            try:
                token, undo = self._begin_schedule(kwargs)
            except Exception as err:  # noqa: BLE001
                self.session.fail("schedule", err)
            flags = FAILED
            try:
                result = original(*args, **kwargs)
                flags = 0
                return result
            finally:
                self._mode = ""
                undo()
                if token:
                    self.recorder.end(token, flags=flags)

        return forward_backward

    def _begin_schedule(self, kwargs: dict[str, Any]) -> tuple[int, Callable[[], None]]:
        models = kwargs.get("model")
        chunks = list(models) if isinstance(models, (list, tuple)) else [models]
        self._seq_tokens = int(kwargs.get("seq_length") or 0) * int(kwargs.get("micro_batch_size") or 0)
        self._chunks = {id(chunk): index for index, chunk in enumerate(chunks)}
        if self._layout is None:
            self._describe(chunks, int(kwargs.get("seq_length") or 0))
        if kwargs.get("forward_only"):
            self._mode = "evaluate"
            return self.recorder.begin(self._evaluate), _nothing
        self._mode = "train"
        self._begin_step()
        for watcher in state_of(self.session).watchers:
            watcher.begin_schedule(
                chunks,
                sequence_length=int(kwargs.get("seq_length") or 0),
                micro_batch=int(kwargs.get("micro_batch_size") or 0),
                num_microbatches=int(kwargs.get("num_microbatches") or 0),
            )
        return 0, self._wrap_finalize(chunks)

    def _begin_step(self) -> None:
        state = state_of(self.session)
        state.framework = "megatron"
        if self._grad_seen and not self._optimizer_seen:  # no optimizer that we know of ends the steps
            state.end_step(self.session)
            self._optimizer_seen = False
        self.session.begin_step(current_iteration())

    def _describe(self, chunks: list[Any], seq_length: int) -> None:
        """Tell layout and model, once."""
        parallel_state = loaded("megatron.core.parallel_state")
        found = layout_of(parallel_state, len(chunks)) if parallel_state is not None else None
        self._layout, coords = found or (Layout(num_chunks=max(1, len(chunks))), {"pp": 0})
        self._pp_rank = coords["pp"]
        self._stages.clear()
        self.sums.token_shards = self._layout.cp
        if found is not None:
            self.session.set_layout(self._layout, coords)
            import torch.distributed as dist

            self.session.set_rank(dist.get_rank(), dist.get_world_size())
        config = _config_of(chunks[0])
        if config is not None:
            self.session.set_model(**model_facts(chunks, config, seq_length))

    def _wrap_finalize(self, chunks: list[Any]) -> Callable[[], None]:
        """Time ``config.finalize_model_grads_func`` during this call of the schedule; returns what puts it back."""
        config = _config_of(chunks[0])
        original = getattr(config, "finalize_model_grads_func", None)
        if original is None:
            return _nothing

        def finalize(*args: Any, **kwargs: Any) -> Any:
            token, flags = self.recorder.begin(self._finalize), FAILED
            try:
                result = original(*args, **kwargs)
                flags = 0
                return result
            finally:
                self.recorder.end(token, flags=flags)

        def undo() -> None:
            if config.finalize_model_grads_func is finalize:
                config.finalize_model_grads_func = original

        config.finalize_model_grads_func = finalize
        return undo

    # ------------------------------------------------------------------ microbatches
    def _forward_step(self, original: Function) -> Function:
        recorder, times_data = self.recorder, self.session.plan.data

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not recorder.enabled:
                return original(*args, **kwargs)
            place, token, store, num_stored = None, 0, None, 0
            try:
                store = args[5] if len(args) > 5 else kwargs.get("forward_data_store")
                num_stored = len(store) if store is not None else 0
                place = self._enter_forward(args, kwargs)
                if times_data:
                    args, kwargs = self._time_data(args, kwargs)
                token = recorder.begin(self._forward)
            except Exception as err:  # noqa: BLE001
                self.session.fail("forward_step", err)
            flags = FAILED
            try:
                result = original(*args, **kwargs)
                flags = 0
            finally:
                if token:
                    recorder.end(token, flags=flags)
            if place is not None and recorder.enabled:
                try:
                    self._leave_forward(place, result, store, num_stored)
                except Exception as err:  # noqa: BLE001
                    self.session.fail("forward_step", err)
            return result

        return forward_step

    def _enter_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Place:
        model = args[2] if len(args) > 2 else kwargs["model"]
        if self._layout is None:
            self._describe([model], 0)
        chunk = self._chunk(model, kwargs)
        training = self._in_training = self._training()
        if training and not self._mode:  # the program took the schedule function before recording began
            state_of(self.session).framework = "megatron"
            self.session.begin_step(current_iteration())
        stage = self._stages.get(chunk)
        if stage is None:
            stage = self._layout.stage(self._pp_rank, chunk) if self._layout is not None else -1
            self._stages[chunk] = stage
        microbatch = kwargs.get("current_microbatch")
        place = (stage, chunk, -1 if microbatch is None else int(microbatch))
        self.recorder.set_context(None, *place)
        self.models.enter(model, place, training=training)
        return place

    def _time_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > 1:
            return (args[0], self._timer(args[1]), *args[2:]), kwargs
        if "data_iterator" in kwargs:
            return args, {**kwargs, "data_iterator": self._timer(kwargs["data_iterator"])}
        return args, kwargs

    def _timer(self, data: Any) -> Any:
        """Return what times a data iterator, the same for all microbatches of a step."""
        known, timer = self._timed
        if data is known and data is not None:
            return timer
        timer = timed(data, self.session)
        if timer is not data and not isinstance(data, list):  # the items of a list may change
            self._timed = (data, timer)
        return timer

    def _leave_forward(self, place: Place, result: Any, store: Any, num_stored: int) -> None:
        tokens = self.models.leave(default_tokens=self._seq_tokens)
        if self._in_training:
            output = result[0] if isinstance(result, tuple) else result
            self._outputs.put(output[0] if isinstance(output, list) else output, place)
            if place[1] == 0:
                self.sums.microbatches += 1
                self.sums.tokens += tokens
            if store is not None and len(store) > num_stored:
                self.sums.add_loss(store[-1])
        self.recorder.set_context(None, -1, -1, -1)

    def _training(self) -> bool:
        return self._mode == "train" if self._mode else _grad_enabled()

    def _chunk(self, model: Any, kwargs: dict[str, Any]) -> int:
        stage = kwargs.get("vp_stage")
        if stage is None:
            stage = self._chunks.get(id(model))
        if stage is None:
            parallel_state = loaded("megatron.core.parallel_state")
            stage = getattr(parallel_state, "get_virtual_pipeline_model_parallel_rank", _nothing)()
        return int(stage or 0)

    def _backward_step(self, original: Function) -> Function:
        recorder = self.recorder

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            if not recorder.enabled:
                return original(*args, **kwargs)
            token = 0
            try:
                output = args[1] if len(args) > 1 else kwargs.get("output_tensor")
                place = self._outputs.take(output[0] if isinstance(output, list) else output)
                recorder.set_context(None, *place)
                self._grad_seen = True
                token = recorder.begin(self._backward)
            except Exception as err:  # noqa: BLE001
                self.session.fail("backward_step", err)
            flags = FAILED
            try:
                result = original(*args, **kwargs)
                flags = 0
                return result
            finally:
                if token:
                    self._leave_backward(token, flags)

        return backward_step

    def _leave_backward(self, token: int, flags: int) -> None:
        try:
            self.models.leave_backward()
            self.recorder.end(token, flags=flags)
            self.recorder.set_context(None, -1, -1, -1)
        except Exception as err:  # noqa: BLE001
            self.session.fail("backward_step", err)


def _nothing() -> None:
    return None


def _grad_enabled() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


def _config_of(model: Any) -> Any:
    while model is not None:
        config = getattr(model, "config", None)
        if config is not None:
            return config
        model = getattr(model, "module", None)
    return None
