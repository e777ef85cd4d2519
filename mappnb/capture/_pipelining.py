"""``torch.distributed.pipelining``: which stage runs which part of which microbatch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from mappnb.capture._flags import FAILED
from mappnb.capture._patches import Patches
from mappnb.capture._torch_step import TorchSteps
from mappnb.capture.points import SessionLike, state_of
from mappnb.layout import Layout
from mappnb.terms import Category, Op, Phase

__all__ = ["PipeliningHooks"]

Function = Callable[..., Any]


class PipeliningHooks:
    """Wraps the methods of pipeline stages that run one microbatch.

    Parameters
    ----------
    session
        Where to record.
    patches
        Keeps the patches.
    steps
        Counts microbatches.
    watch_parts
        Hooks the parts of a stage's module.
    enter_backward
        Told the phase of a backward pass before it begins.
    leave_backward
        Ends a backward span.
    """

    def __init__(
        self,
        session: SessionLike,
        patches: Patches,
        steps: TorchSteps,
        watch_parts: Callable[[Any], None],
        enter_backward: Callable[[str], None],
        leave_backward: Callable[[int, int], None],
    ) -> None:
        self.session = session
        self.recorder = session.recorder
        self._patches = patches
        self._steps = steps
        self._watch_parts = watch_parts
        self._enter_backward = enter_backward
        self._leave_backward = leave_backward
        self._places: dict[int, tuple[int, int]] = {}
        self._folded = False
        phases = {
            Phase.FORWARD: Op.FORWARD_STEP,
            Phase.BACKWARD: Op.BACKWARD_STEP,
            Phase.BACKWARD_INPUT: Op.BACKWARD_STEP,
            Phase.BACKWARD_WEIGHT: Op.BACKWARD_STEP,
        }
        make = self.recorder.site
        self._sites = {phase: make(category=Category.COMPUTE, op=op, phase=phase) for phase, op in phases.items()}

    def watch(self, module: ModuleType) -> None:
        """Wrap the base class of all stages."""
        owner = getattr(module, "_PipelineStageBase", None)
        wanted: dict[str, Callable[[Any, Any], str]] = {
            "forward_one_chunk": lambda args, kwargs: Phase.FORWARD,
            "backward_one_chunk": _backward_phase,
            "backward_weight_one_chunk": lambda args, kwargs: Phase.BACKWARD_WEIGHT,
        }
        for name, phase_of in wanted.items():
            if owner is None or not self._patches.wrap(owner, name, partial(self._one_chunk, phase_of)):
                self.session.meta.setdefault("missing_points", []).append(f"pipelining.{name}")

    def watch_schedules(self, module: ModuleType) -> None:
        """Wrap ``step`` of the schedules: the program's step begins before its first receive."""
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            owner = getattr(module, name, None)
            if owner is None or not self._patches.wrap(owner, "step", self._schedule_step):
                self.session.meta.setdefault("missing_points", []).append(f"pipelining.{name}.step")
        base = getattr(module, "_PipelineSchedule", None)
        if base is None or not self._patches.wrap(base, "_maybe_compute_loss", self._compute_loss):
            self.session.meta.setdefault("missing_points", []).append(
                "pipelining._PipelineSchedule._maybe_compute_loss"
            )

    def _compute_loss(self, original: Function) -> Function:
        def compute_loss(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            num_losses = len(schedule._internal_losses)
            result = original(schedule, *args, **kwargs)
            if self.recorder.enabled and len(schedule._internal_losses) > num_losses:
                try:
                    self._steps.add_loss(schedule._internal_losses[-1])
                except Exception as err:  # noqa: BLE001
                    self.session.fail("pipelining", err)
            return result

        return compute_loss

    def _schedule_step(self, original: Function) -> Function:
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            if self.recorder.enabled:
                try:
                    state_of(self.session).framework = "pipelining"
                    if getattr(schedule, "_has_backward", True):
                        self.session.begin_step()
                except Exception as err:  # noqa: BLE001
                    self.session.fail("pipelining", err)
            return original(schedule, *args, **kwargs)

        return step

    def _one_chunk(self, phase_of: Callable[[Any, Any], str], original: Function) -> Function:
        recorder = self.recorder

        def one_chunk(stage: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.enabled:
                return original(stage, *args, **kwargs)
            token, phase, flags = 0, Phase.NONE, FAILED
            try:
                phase = Phase(phase_of(args, kwargs))
                self._enter(stage, phase, args, kwargs)
                token = recorder.begin(self._sites[phase])
            except Exception as err:  # noqa: BLE001
                self.session.fail("pipelining", err)
            try:
                result = original(stage, *args, **kwargs)
                flags = 0
                return result
            finally:
                if token and phase == Phase.FORWARD:
                    recorder.end(token, flags=flags)
                    recorder.set_context(None, -1, -1, -1)
                elif token:
                    self._leave_backward(token, flags)

        return one_chunk

    def _enter(self, stage: Any, phase: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        microbatch = int(args[0] if args else kwargs.get("fwd_chunk_id", kwargs.get("bwd_chunk_id", -1)))
        place = self._places.get(id(stage))
        if place is None:
            place = self._places[id(stage)] = self._meet(stage)
        if getattr(stage, "has_backward", True) or phase != Phase.FORWARD:
            self.session.begin_step()
            if phase == Phase.FORWARD and place[1] == 0:
                self._steps.count_microbatch()
        if phase != Phase.FORWARD:
            self._enter_backward(phase)
        self.recorder.set_context(None, place[0], place[1], microbatch)

    def _meet(self, stage: Any) -> tuple[int, int]:
        """Meet a stage for the first time: tell the layout, hook its module, return its index and chunk."""
        index, num_stages, size = int(stage.stage_index), int(stage.num_stages), int(stage.group_size)
        self._tell_layout(stage, index, num_stages, size)
        if self.session.plan.modules and getattr(stage, "submod", None) is not None:
            self._watch_parts(stage.submod)
        return index, index // max(1, size)

    def _tell_layout(self, stage: Any, index: int, num_stages: int, size: int) -> None:
        """Tell the layout: stages in order, or folded if a stage is not where the order would have it."""
        import torch.distributed as dist

        world_size, rank = dist.get_world_size(), dist.get_rank()
        group = stage.group if stage.group is not None else dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        self._folded = self._folded or index % size != ranks.index(rank)
        for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
            layout = Layout(
                dp=max(1, world_size // size),
                pp=size,
                num_chunks=max(1, num_stages // size),
                order=order,
                stage_order="v" if self._folded else "interleaved",
            )
            if ranks in layout.groups("pp"):
                self.session.set_layout(layout, layout.coords(rank))
                return


def _backward_phase(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    full = kwargs.get("full_backward", args[2] if len(args) > 2 else True)
    return Phase.BACKWARD if full else Phase.BACKWARD_INPUT
