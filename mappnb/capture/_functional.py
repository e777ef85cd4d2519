"""Functional collectives: their operators go from Python to C++ without passing a ``ProcessGroup`` method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final

from mappnb.capture._collective_calls import first_tensor, num_bytes
from mappnb.capture._flags import ASYNC, FAILED
from mappnb.capture._groups import Group
from mappnb.capture._operations import Operation, Operations
from mappnb.capture._patches import Patches
from mappnb.terms import Op

__all__ = ["watch_functional"]

Function = Callable[..., Any]

_FUNCTIONS: Final[dict[str, tuple[str, bool]]] = {
    "broadcast": (Op.BROADCAST.value, False),
    "all_reduce": (Op.ALL_REDUCE.value, False),
    "all_reduce_coalesced": (Op.ALL_REDUCE.value, False),
    "all_gather_single": (Op.ALL_GATHER.value, True),
    "all_gather_tensor": (Op.ALL_GATHER.value, True),
    "all_gather_tensor_autograd": (Op.ALL_GATHER.value, True),
    "all_gather_single_coalesced": (Op.ALL_GATHER.value, True),
    "all_gather_into_tensor_coalesced": (Op.ALL_GATHER.value, True),
    "reduce_scatter_single": (Op.REDUCE_SCATTER.value, False),
    "reduce_scatter_tensor": (Op.REDUCE_SCATTER.value, False),
    "reduce_scatter_tensor_autograd": (Op.REDUCE_SCATTER.value, False),
    "reduce_scatter_single_coalesced": (Op.REDUCE_SCATTER.value, False),
    "reduce_scatter_tensor_coalesced": (Op.REDUCE_SCATTER.value, False),
    "all_to_all_single": (Op.ALL_TO_ALL.value, False),
    "all_to_all_single_autograd": (Op.ALL_TO_ALL.value, False),
}
"""Operation, and whether the payload is the input times the group's size."""


def watch_functional(operations: Operations, patches: Patches, module: ModuleType) -> None:
    """Wrap the functions of ``torch.distributed._functional_collectives`` that this torch has.

    Those that call one another count once. The operation ends when ``wait_tensor`` is called on its result.
    """
    for name, (op, gathered) in _FUNCTIONS.items():
        patches.wrap(module, name, partial(_functional, operations, module, op, gathered))
    patches.wrap(module, "wait_tensor", partial(_wait_tensor, operations))


def _functional(operations: Operations, module: ModuleType, op: str, gathered: bool, original: Function) -> Function:
    import torch

    compiling = getattr(torch.compiler, "is_compiling", bool)
    signature = inspect.signature(original)
    recorder, busy = operations.recorder, operations.busy

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling() or not recorder.enabled or busy.now:
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs).arguments
            operation = _make(operations, module, op, bound, gathered=gathered)
        except Exception as err:  # noqa: BLE001
            operations.session.fail("functional collectives", err)
            return original(*args, **kwargs)
        if operation is None:
            return original(*args, **kwargs)
        busy.now = True
        try:
            result = original(*args, **kwargs)
        except BaseException:
            operations.complete(operation, recorder.now_ns(), FAILED)
            raise
        finally:
            busy.now = False
        try:
            _issued(operations, operation, result)
        except Exception as err:  # noqa: BLE001
            operations.session.fail("functional collectives", err)
        return result

    return call


def _make(
    operations: Operations, module: ModuleType, op: str, bound: dict[str, Any], *, gathered: bool
) -> Operation | None:
    group = _group(operations, module, bound)
    if group is None:
        return None
    tensors = next(iter(bound.values()))
    size = num_bytes(tensors) * (group.size if gathered else 1)
    peer = group.global_rank(int(bound["src"])) if op == Op.BROADCAST.value else -1
    return operations.make(op, group, size, getattr(first_tensor(tensors), "dtype", None), peer)


def _group(operations: Operations, module: ModuleType, bound: dict[str, Any]) -> Group | None:
    """Return the group that an argument in any of torch's spellings means; None if it cannot be told."""
    group, tag = bound["group"], bound.get("tag", "")
    if isinstance(group, str):
        return operations.groups.named(group)
    if hasattr(group, "group_name"):
        return operations.groups.of(group)
    if isinstance(group, list):
        from torch.distributed import distributed_c10d

        return operations.groups.named(distributed_c10d._resolve_group_name_by_ranks_and_tag(group, tag))
    return operations.groups.named(module._resolve_group_name(group, tag))


def _key(tensor: Any) -> int:
    """Key of the storage of a tensor, apart from the ids of work handles."""
    return -int(tensor.untyped_storage().data_ptr()) - 1


def _issued(operations: Operations, operation: Operation, result: Any) -> None:
    element = getattr(first_tensor(result), "elem", None)
    if element is None:  # waited for already
        operations.issued(operation, None, sync=True)
        return
    operation.issued_ns = operations.recorder.now_ns()
    operation.flags = ASYNC
    operation.context = operations.recorder.context()
    operations.keep(_key(element), element, [operation])


def _wait_tensor(operations: Operations, original: Function) -> Function:
    import torch

    compiling = getattr(torch.compiler, "is_compiling", bool)
    recorder, busy = operations.recorder, operations.busy

    def wait_tensor(tensor: Any) -> Any:
        if compiling() or not recorder.enabled or busy.now or type(tensor) is not torch.Tensor:
            return original(tensor)
        flags = FAILED
        try:
            pending = operations.take(_key(tensor), None)
        except Exception as err:  # noqa: BLE001
            operations.session.fail("functional collectives", err)
            return original(tensor)
        start_ns = recorder.now_ns()
        try:
            result = original(tensor)
            flags = 0
            return result
        finally:
            try:
                if pending is not None:
                    operations.waited(pending, start_ns, None, flags)
            except Exception as err:  # noqa: BLE001
                operations.session.fail("functional collectives", err)

    return wait_tensor
