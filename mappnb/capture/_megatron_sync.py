"""Megatron-core's optimizer step, gradient reduction and parameter gathering."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from mappnb.capture._flags import FAILED
from mappnb.capture._patches import Patches
from mappnb.capture.points import SessionLike, state_of
from mappnb.terms import Category, Op

__all__ = ["OPTIMIZER_CLASSES", "SyncHooks"]

Function = Callable[..., Any]

OPTIMIZER_CLASSES: Final[dict[str, tuple[str, ...]]] = {
    "megatron.core.optimizer.optimizer": ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"),
    "megatron.core.optimizer.layer_wise_optimizer": ("LayerWiseDistributedOptimizer",),
}
"""Modules, and their classes that have a ``step`` of their own."""


class SyncHooks:
    """Wraps optimizers and the buckets of Megatron-core's DistributedDataParallel.

    Parameters
    ----------
    session
        Where to record.
    """

    def __init__(self, session: SessionLike) -> None:
        self.session = session
        self.recorder = session.recorder
        self._step = self.recorder.site(category=Category.OPTIMIZER, op=Op.OPTIMIZER_STEP)

    def watch_optimizers(self, patches: Patches, module: ModuleType) -> list[str]:
        """Wrap ``step`` of the module's optimizer classes; returns the names of what it lacks."""
        missing = []
        for name in OPTIMIZER_CLASSES[module.__name__]:
            owner = getattr(module, name, None)
            if owner is None:
                missing.append(f"{module.__name__}.{name}")
            elif "step" in vars(owner):
                patches.wrap(owner, "step", self._optimizer_step)
        return missing

    def watch_buckets(self, patches: Patches, module: ModuleType) -> list[str]:
        """Wrap the bucket groups' methods; returns the names of what the module lacks."""
        owner = getattr(module, "_ParamAndGradBucketGroup", getattr(module, "Bucket", None))
        if owner is None:
            return ["_ParamAndGradBucketGroup"]
        wanted = (
            ("start_grad_sync", Op.GRAD_SYNC, "grad_data", None),
            ("finish_grad_sync", Op.GRAD_SYNC, "grad_data", None),
            ("start_param_sync", Op.PARAM_SYNC, "param_data", None),
            ("finish_param_sync", Op.PARAM_SYNC, "param_data", _gathers),
        )
        missing = []
        for name, op, data, condition in wanted:
            make = self._bucket(op, name.partition("_")[0], data, condition)
            if not patches.wrap(owner, name, make):
                missing.append(f"{owner.__name__}.{name}")
        return missing

    def _optimizer_step(self, original: Function) -> Function:
        recorder, state = self.recorder, state_of(self.session)

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.enabled or state.optimizer_depth:
                return original(optimizer, *args, **kwargs)
            state.optimizer_depth += 1
            token, flags = recorder.begin(self._step), FAILED
            try:
                result = original(optimizer, *args, **kwargs)
                flags = 0
            finally:
                state.optimizer_depth -= 1
                recorder.end(token, flags=flags)
            try:
                self._tell(optimizer, result)
                state.end_step(self.session)
            except Exception as err:  # noqa: BLE001
                self.session.fail("optimizer step", err)
            return result

        return step

    def _tell(self, optimizer: Any, result: Any) -> None:
        values: dict[str, Any] = {}
        groups = getattr(optimizer, "param_groups", None)
        if groups:
            values["lr"] = groups[0].get("lr")
        if isinstance(result, tuple) and len(result) > 1:
            values.update(skipped=0.0 if result[0] else 1.0, grad_norm=result[1])
        values = {key: value for key, value in values.items() if value is not None}
        if values:
            self.session.step_values(**values)

    def _bucket(
        self, op: str, name: str, data: str, condition: Callable[[Any], bool] | None
    ) -> Callable[[Function], Function]:
        recorder = self.recorder
        site = recorder.site(category=Category.HOST, op=op, name=name)

        def make(original: Function) -> Function:
            def sync(group: Any, *args: Any, **kwargs: Any) -> Any:
                if not recorder.enabled or (condition is not None and not condition(group)):
                    return original(group, *args, **kwargs)
                size, flags = _num_bytes(group, data), FAILED
                token = recorder.begin(site)
                try:
                    result = original(group, *args, **kwargs)
                    flags = 0
                    return result
                finally:
                    recorder.end(token, bytes=size, flags=flags)

            return sync

        return make


def _gathers(group: Any) -> bool:
    """Whether ``finish_param_sync`` has something to do: it is called by every module's forward, mostly in vain."""
    return getattr(group, "param_gather_handle", True) is not None or not getattr(
        group, "param_gather_dispatched", True
    )


def _num_bytes(group: Any, data: str) -> int:
    buckets = getattr(group, "buckets", None) or (group,)
    return sum(int(getattr(getattr(bucket, data, None), "nbytes", 0)) for bucket in buckets)
