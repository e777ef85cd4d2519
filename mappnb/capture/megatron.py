"""Megatron-core: what a training job is hooked at, with no source touched and no change to its script."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from mappnb.capture._megatron_schedule import ScheduleHooks
from mappnb.capture._megatron_sync import OPTIMIZER_CLASSES, SyncHooks
from mappnb.capture._patches import ImportWatch, Patches
from mappnb.capture.points import SessionLike, state_of

__all__ = ["MegatronProbe"]


class MegatronProbe:
    """Records Megatron-core's steps, schedules, models, optimizers and gradient reduction.

    Notes
    -----
    Nothing is imported: each module is patched when the program imports it. What a version of Megatron-core lacks is
    listed in ``session.meta["missing_points"]`` and the rest is recorded. The combined schedule of
    ``overlap_moe_expert_parallel_comm`` does not pass through ``forward_step`` and is recorded as a step without
    microbatches.
    """

    name = "megatron"

    def __init__(self) -> None:
        self._patches = Patches()
        self._session: SessionLike | None = None
        self._watch: ImportWatch | None = None
        self._schedule: ScheduleHooks | None = None

    def install(self, session: SessionLike) -> None:
        """Patch Megatron-core, now or when the program imports it."""
        self._session = session
        self._watch = ImportWatch(session.fail)
        self._schedule = ScheduleHooks(session)
        sync = SyncHooks(session)
        schedule, patches = self._schedule, self._patches
        state_of(session).at_step_end.append(schedule.step_ended)
        self._when("megatron.core.pipeline_parallel.schedules", lambda m: schedule.watch(patches, m))
        self._when("megatron.core.distributed.param_and_grad_buffer", lambda m: sync.watch_buckets(patches, m))
        for name in OPTIMIZER_CLASSES:
            self._when(name, lambda m: sync.watch_optimizers(patches, m))
        if session.plan.modules:
            self._when(
                "megatron.core.models.common.language_module.language_module",
                lambda m: _missing("LanguageModule", schedule.models.watch_loss(patches, m)),
            )
        if session.plan.metrics:
            self._when(
                "megatron.core.transformer.moe.router",
                lambda m: _missing("TopKRouter.routing", schedule.models.watch_router(patches, m)),
            )

    def uninstall(self) -> None:
        """Put everything back."""
        if self._session is None or self._watch is None or self._schedule is None:
            return
        self._watch.stop()
        self._patches.undo()
        self._schedule.stop()
        hooks = state_of(self._session).at_step_end
        if self._schedule.step_ended in hooks:
            hooks.remove(self._schedule.step_ended)
        self._session = self._watch = self._schedule = None

    def _when(self, name: str, patch: Callable[[ModuleType], list[str]]) -> None:
        """Call ``patch`` when the module is there; what it returns is missing."""
        session = self._session
        if session is None or self._watch is None:
            return

        def loaded(module: ModuleType) -> None:
            missing = patch(module)
            if missing:
                session.meta.setdefault("missing_points", []).extend(missing)

        self._watch.when(name, loaded)


def _missing(name: str, found: bool) -> list[str]:
    return [] if found else [name]
