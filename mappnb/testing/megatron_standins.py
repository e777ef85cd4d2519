"""CPU stand-ins for what megatron-core asks of ``torch.cuda``: the pieces that `megatron_on_cpu` puts in place.

Nothing here changes any state when imported; `mappnb.testing.megatron_cpu` decides what goes where and undoes it.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

__all__ = [
    "EagerFuser",
    "cuda_namespace",
    "eager_original",
    "functions_of",
    "move_splits_to_numpy",
    "rng_replacements",
    "rng_tracker_methods",
    "torch_proxy",
    "with_cpu_type_names",
]

CPU = torch.device("cpu")
FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
CPU_TYPE_NAMES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class Namespace(types.ModuleType):
    """A module whose missing attributes come from the real module it stands in for."""

    def __init__(self, name: str, real: types.ModuleType, **attributes: object) -> None:
        super().__init__(name)
        self.__dict__.update(attributes)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        """Look ``name`` up in the real module."""
        return getattr(self.__dict__["_real"], name)


class CpuStream:
    """A stream that does nothing: on the CPU work is done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> CpuStream:
        """Enter, without effect."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave, without effect."""

    def wait_stream(self, *_: object) -> None:
        """Return at once."""

    def wait_event(self, *_: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one."""
        event = event or CpuEvent()
        event.record()
        return event


class CpuEvent:
    """An event that remembers the host time of `record`."""

    def __init__(self, *_: object, **__: object) -> None:
        self.time_s = 0.0

    def record(self, *_: object) -> None:
        """Remember the host time."""
        self.time_s = time.perf_counter()

    def wait(self, *_: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Say that the event has happened."""
        return True

    def elapsed_time(self, later: CpuEvent) -> float:
        """Return the milliseconds to ``later``, as ``torch.cuda.Event`` does."""
        return (later.time_s - self.time_s) * 1e3


def _nothing(*_: object, **__: object) -> None:
    """Accept anything, do nothing."""


def _zero(*_: object, **__: object) -> int:
    return 0


def _no_context(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def cuda_namespace() -> types.ModuleType:
    """Build the stand-in for ``torch.cuda``: one device, which is the CPU."""
    stream = CpuStream()
    nvtx = Namespace(
        "torch.cuda.nvtx", torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing, mark=_nothing, range=_no_context
    )
    calls: dict[str, object] = {
        **dict.fromkeys(
            ("synchronize", "set_device", "empty_cache", "ipc_collect", "reset_peak_memory_stats"), _nothing
        ),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), _zero),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_, **__: stream),
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "is_available": lambda: False,
        "memory_stats": lambda *_, **__: defaultdict(int),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "stream": _no_context,
        "Stream": CpuStream,
        "Event": CpuEvent,
        "nvtx": nvtx,
    }
    return Namespace("torch.cuda", torch.cuda, **calls)


def _on_cpu(device: Any) -> Any:
    """Map any way to name a CUDA device to the CPU; leave other devices alone."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return CPU
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    return device


def _cpu_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory so that ``device="cuda"`` means the CPU."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


class _DeviceType(type):
    """Makes ``isinstance(x, device)`` true for real ``torch.device`` values."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class CpuDevice(metaclass=_DeviceType):
    """Stands in for ``torch.device``; calling it gives a real device that is never CUDA."""

    def __new__(cls, device: Any = "cpu", index: int | None = None) -> torch.device:
        """Return ``torch.device(device, index)``, or the CPU where that would be CUDA."""
        real = torch.device(device) if index is None else torch.device(device, index)
        return CPU if real.type == "cuda" else real


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return torch.autocast(_on_cpu(device_type), *args, **kwargs)


def torch_proxy(patches: Collection[str]) -> types.ModuleType:
    """Build the namespace that megatron-core modules see as ``torch`` while the patches are on.

    Parameters
    ----------
    patches : collection of str
        ``"torch_proxy"`` puts `cuda_namespace` in it, ``"factories"`` the device-mapping factories.

    Returns
    -------
    ModuleType
        A copy of torch's namespace (as fast to read as torch itself); what torch creates later is looked up there.
    """
    proxy = Namespace("torch", torch)
    proxy.__dict__.update(torch.__dict__)
    proxy.__dict__["_real"] = torch
    proxy.__dict__.pop("__getattr__", None)
    if "torch_proxy" in patches:
        proxy.__dict__["cuda"] = cuda_namespace()
    if "factories" in patches:
        proxy.__dict__.update({name: _cpu_factory(getattr(torch, name)) for name in FACTORIES})
        proxy.__dict__.update(autocast=_autocast, device=CpuDevice)
    return proxy


def _cpu_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(new_state)


def rng_replacements() -> dict[str, Callable[..., Any]]:
    """Functions of ``megatron.core.tensor_parallel.random`` by name, over the CPU generator."""
    return {"_get_cuda_rng_state": _cpu_rng_state, "_set_cuda_rng_state": _set_cpu_rng_state}


def rng_tracker_methods(default_name: str) -> dict[str, Callable[..., Any]]:
    """Methods for megatron's ``CudaRNGStatesTracker`` that keep its contract over the CPU generator.

    Parameters
    ----------
    default_name : str
        State that ``fork()`` takes when no name is given.

    Returns
    -------
    dict
        ``add`` and ``fork``.
    """

    def add(self: Any, name: str, seed: int) -> None:
        self._is_initialized = True
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"rng state {name!r} with seed {seed}: this name or this seed is in use already")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self: Any, name: str = default_name) -> Iterator[None]:
        if name not in self.states_:
            raise ValueError(f"rng state {name!r} was never added; known: {sorted(self.states_)}")
        outer_state, outer_name = torch.get_rng_state(), self._current_state_name
        if outer_name != "default-rng":
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer_state if outer_name == "default-rng" else self.states_[outer_name])
            self._current_state_name = outer_name

    return {"add": add, "fork": fork}


def with_cpu_type_names(code: types.CodeType) -> types.CodeType:
    """Return ``code`` with constants such as ``'torch.cuda.FloatTensor'`` naming CPU types; itself if it has none."""

    def changed(const: Any) -> Any:
        if isinstance(const, types.CodeType):
            return with_cpu_type_names(const)
        if isinstance(const, str):
            return CPU_TYPE_NAMES.get(const, const)
        if isinstance(const, tuple) and any(isinstance(item, str) for item in const):
            new = tuple(CPU_TYPE_NAMES.get(item, item) if isinstance(item, str) else item for item in const)
            return new if new != const else const
        return const

    consts = tuple(map(changed, code.co_consts))
    same = all(new is old for new, old in zip(consts, code.co_consts, strict=True))
    return code if same else code.replace(co_consts=consts)


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Give every function that ``module`` defines: plain, in its classes, and below decorators."""
    values = list(vars(module).values())
    for value in list(values):
        if isinstance(value, type) and value.__module__ == module.__name__:
            values += vars(value).values()
    for value in values:
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        while inner is not None and not isinstance(inner, type):
            if isinstance(inner, types.FunctionType) and inner.__module__ == module.__name__:
                yield inner
            inner = getattr(inner, "__wrapped__", None)


class EagerFuser:
    """Stands in for ``jit_fuser`` (``torch.compile``): runs functions as they are, and compiles once off."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self.compiler = compiler
        self.active = True

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate ``function``: eager while this fuser is active, compiled on first use after that."""
        compiled: Callable[..., Any] | None = None

        @functools.wraps(function)
        def fused(*args: Any, **kwargs: Any) -> Any:
            nonlocal compiled
            if self.active:
                return function(*args, **kwargs)
            if compiled is None:
                compiled = self.compiler(function)
            return compiled(*args, **kwargs)

        return fused


def eager_original(value: object) -> object:
    """Return the plain function below a ``torch.compile`` wrapper, or None where ``value`` is not one."""
    return vars(value).get("_torchdynamo_orig_callable") if isinstance(value, types.FunctionType) else None


def move_splits_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace ``maybe_move_tensor_to_cpu``: a tensor that is on the CPU already still becomes numpy when asked."""
    return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor
