"""Run stock megatron-core on CPU and gloo: reversible patches, each of which can be left out.

megatron-core 0.16.1 asks for CUDA in eight kinds of places. `megatron_on_cpu` answers them from the CPU, in
megatron-core's own modules only (P4 is the one change to torch). Where CUDA is available it does nothing, so that the
same training script runs unchanged with NCCL.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from mappnb.errors import DependencyError, MappnbError, did_you_mean

__all__ = ["PATCHES", "TESTED_VERSIONS", "MegatronOnCpu", "Patch", "PatchError", "megatron_on_cpu"]

TESTED_VERSIONS: Final = ("0.16.1",)
PREFIX: Final = "megatron.core"
TYPE_MODULES: Final = tuple(f"{PREFIX}.optimizer.{name}" for name in ("clip_grads", "optimizer", "distrib_optimizer"))


class PatchError(MappnbError, ValueError):
    """A patch name that does not exist, or a second set of patches while another is on."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One reason why megatron-core does not run on the CPU, and what `megatron_on_cpu` does about it.

    Attributes
    ----------
    number : str
        Short name, ``"P1"`` to ``"P8"``.
    name : str
        The word for ``megatron_on_cpu(patches=...)``.
    what : str
        What is put in place.
    first_failure : str
        What fails first in megatron-core 0.16.1 when only this patch is left out.
    """

    number: str
    name: str
    what: str
    first_failure: str


def _table(*rows: tuple[str, str, str]) -> dict[str, Patch]:
    return {name: Patch(f"P{i}", name, what, failure) for i, (name, what, failure) in enumerate(rows, start=1)}


PATCHES: Final = _table(
    (
        "torch_proxy",
        "the global `torch` of every megatron.core module becomes a copy of torch's namespace whose `.cuda` is the CPU",
        "distributed/param_and_grad_buffer.py: device=torch.cuda.current_device()",
    ),
    (
        "factories",
        "in that copy zeros, empty, tensor, ..., device and autocast take 'cuda' for 'cpu'",
        "optimizer/optimizer.py: torch.tensor([1.0], dtype=torch.float, device='cuda')",
    ),
    (
        "rng",
        "CudaRNGStatesTracker.add and .fork and the rng state functions use the CPU generator",
        "tensor_parallel/random.py: torch.cuda.random.get_rng_state() in fork()",
    ),
    (
        "tensor_cuda",
        "Tensor.cuda() returns the tensor itself: the only change to torch",
        "models/common/language_module/language_module.py: weight.data.cuda() with tied embeddings and pp > 1",
    ),
    (
        "type_strings",
        "the constants 'torch.cuda.FloatTensor' (Half, BFloat16) in optimizer code name CPU types",
        "optimizer/clip_grads.py: assert param.grad.type() == 'torch.cuda.FloatTensor'",
    ),
    (
        "jit_fuser",
        "functions decorated with jit_fuser (torch.compile) run eagerly",
        "none: without it each rank spends 10 s or more in torch.compile, the losses stay the same",
    ),
    (
        "moe_router",
        "moe_utils.te_general_gemm is defined (None) where TransformerEngine is missing",
        "transformer/moe/moe_utils.py: NameError te_general_gemm (by reading, on GPUs too)",
    ),
    (
        "moe_splits",
        "token_dispatcher's maybe_move_tensor_to_cpu(as_numpy=True) converts tensors that are on the CPU already",
        "tensor_parallel/mappings.py: all_to_all_single gets tensors as split sizes",
    ),
)
"""Every patch by name, in the order P1 to P8."""


class Journal:
    """Sets attributes and knows how to put every one of them back."""

    _MISSING: Final = object()

    def __init__(self) -> None:
        self._entries: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set ``owner.name``, remembering what was there (also that nothing was)."""
        self.on_undo(owner, name, vars(owner).get(name, self._MISSING) if name != "__code__" else owner.__code__)
        setattr(owner, name, value)

    def on_undo(self, owner: Any, name: str, old: object) -> None:
        """Remember that undoing means ``owner.name = old``."""
        self._entries.append((owner, name, old))

    def undo(self) -> None:
        """Put everything back, newest first."""
        while self._entries:
            owner, name, old = self._entries.pop()
            if old is self._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


class _PatchingLoader(importlib.abc.Loader):
    """Loads one module with its own loader, then patches it; leaves no trace of itself in the module."""

    def __init__(self, inner: importlib.abc.Loader, patcher: _Patcher) -> None:
        self._inner, self._patcher = inner, patcher

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._patcher.patch_module(module)


class _Patcher(importlib.abc.MetaPathFinder):
    """Patches each megatron.core module, those loaded already and those imported later."""

    def __init__(self, patches: Sequence[str]) -> None:
        from mappnb.testing import megatron_standins as standins

        self.patches = tuple(patches)
        self._standins = standins
        self._journal = Journal()
        self._fuser: Any = None
        self._swaps: dict[int, tuple[object, object]] = {}  # id of original and of replacement -> both

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PREFIX and not name.startswith(PREFIX + "."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and isinstance(spec.loader, importlib.abc.Loader) and hasattr(spec.loader, "exec_module"):
            spec.loader = _PatchingLoader(spec.loader, self)
        return spec

    def install(self) -> None:
        """Patch what is loaded, and stand ready for what is not."""
        import torch

        if {"torch_proxy", "factories"} & set(self.patches):
            self._swap(torch, self._standins.torch_proxy(self.patches))
        if "tensor_cuda" in self.patches:
            self._journal.set(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
        loaded = [m for name, m in sys.modules.items() if name == PREFIX or name.startswith(PREFIX + ".")]
        # first the modules that define what others have imported from them
        for module in sorted(filter(None, loaded), key=lambda module: module.__name__ not in self._SPECIAL):
            self.patch_module(module)
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Put everything back."""
        sys.meta_path.remove(self)
        if self._fuser is not None:
            self._fuser.active = False
        self._journal.undo()

    def patch_module(self, module: types.ModuleType) -> None:
        """Patch one megatron.core module that has just been executed."""
        special = self._SPECIAL.get(module.__name__)
        if special is not None and special[0] in self.patches:
            special[1](self, module)
        if module.__name__ in TYPE_MODULES and "type_strings" in self.patches:
            self._rewrite_type_names(module)
        if "jit_fuser" in self.patches:
            self._unwrap_compiled(module)
        for name, value in list(vars(module).items()):
            if (swap := self._swaps.get(id(value))) is not None:
                original, replacement = swap
                self._journal.on_undo(module, name, original)
                setattr(module, name, replacement)

    def _swap(self, original: object, replacement: object) -> None:
        """From now on every module's ``original`` is ``replacement``, until undone."""
        self._swaps[id(original)] = self._swaps[id(replacement)] = (original, replacement)

    def _patch_rng(self, module: types.ModuleType) -> None:
        for name, replacement in self._standins.rng_replacements().items():
            self._swap(getattr(module, name), replacement)
        default_name = module._MODEL_PARALLEL_RNG_TRACKER_NAME
        for name, method in self._standins.rng_tracker_methods(default_name).items():
            self._journal.set(module.CudaRNGStatesTracker, name, method)

    def _patch_jit(self, module: types.ModuleType) -> None:
        self._fuser = self._standins.EagerFuser(module.jit_fuser)
        self._swap(module.jit_fuser, self._fuser)

    def _patch_router(self, module: types.ModuleType) -> None:
        if not hasattr(module, "te_general_gemm"):
            self._journal.set(module, "te_general_gemm", None)

    def _patch_splits(self, module: types.ModuleType) -> None:
        self._swap(module.maybe_move_tensor_to_cpu, self._standins.move_splits_to_numpy)

    _SPECIAL: Final = {
        f"{PREFIX}.tensor_parallel.random": ("rng", _patch_rng),
        f"{PREFIX}.jit": ("jit_fuser", _patch_jit),
        f"{PREFIX}.transformer.moe.moe_utils": ("moe_router", _patch_router),
        f"{PREFIX}.transformer.moe.token_dispatcher": ("moe_splits", _patch_splits),
    }

    def _rewrite_type_names(self, module: types.ModuleType) -> None:
        for function in self._standins.functions_of(module):
            code = self._standins.with_cpu_type_names(function.__code__)
            if code is not function.__code__:
                self._journal.set(function, "__code__", code)

    def _unwrap_compiled(self, module: types.ModuleType) -> None:
        classes = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
        for owner in (module, *classes):
            for name, value in list(vars(owner).items()):
                if (original := self._standins.eager_original(value)) is not None:
                    self._journal.set(owner, name, original)


class MegatronOnCpu:
    """What `megatron_on_cpu` returns: says whether the patches are on, and takes them off.

    Attributes
    ----------
    patches : tuple of str
        Names of the patches this handle stands for; empty where CUDA is used.
    """

    _current: ClassVar[MegatronOnCpu | None] = None  # patches are a fact of the whole process, so is this

    def __init__(self, patches: Sequence[str], patcher: _Patcher | None) -> None:
        self.patches = tuple(patches)
        self._patcher = patcher

    @property
    def enabled(self) -> bool:
        """True while the patches are on, whoever switched them on."""
        return bool(self.patches) and MegatronOnCpu._current is not None

    def disable(self) -> None:
        """Put back everything this handle changed; a handle that found the patches on already leaves them on."""
        if self._patcher is not None:
            self._patcher.uninstall()
            self._patcher = MegatronOnCpu._current = None

    def __enter__(self) -> MegatronOnCpu:
        """Return itself: the patches are on since `megatron_on_cpu` returned."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take the patches off."""
        self.disable()

    def __repr__(self) -> str:
        """Say whether the patches are on, and which."""
        return (
            f"<megatron_on_cpu {'enabled' if self.enabled else 'disabled'}: {', '.join(self.patches) or 'no patches'}>"
        )


def megatron_on_cpu(*, patches: Iterable[str] | None = None, force: bool = False) -> MegatronOnCpu:
    """Let stock megatron-core train on CPU and gloo, until undone; a no-op where CUDA is available.

    Works before and after megatron-core was imported. A plain call leaves the patches on for the life of the
    process; ``with megatron_on_cpu():`` takes them off at the end of the block.

    Parameters
    ----------
    patches : iterable of str, optional
        Names out of `PATCHES`; default those that are on already, else all eight.
    force : bool
        Patch although CUDA is available, to train on the CPU of a GPU machine.

    Returns
    -------
    MegatronOnCpu
        Handle with ``enabled``, ``disable()`` and ``patches``; usable in ``with``.

    Raises
    ------
    DependencyError
        If torch or megatron-core is not installed.
    PatchError
        For an unknown patch, or if another set of patches is on.

    Warns
    -----
    UserWarning
        If this version of megatron-core was not tested.

    Examples
    --------
    >>> with megatron_on_cpu() as cpu:  # doctest: +SKIP
    ...     train(TrainSettings(tp=2))
    """
    names = _checked(patches)
    version = megatron_version()
    import torch

    if torch.cuda.is_available() and not force:
        return MegatronOnCpu((), None)
    if (current := MegatronOnCpu._current) is not None:
        if patches is not None and set(current.patches) != set(names):
            raise PatchError(
                f"megatron_on_cpu is on with {', '.join(current.patches)}; asked for {', '.join(names)}: "
                "call disable() on the first handle before you choose other patches"
            )
        return MegatronOnCpu(current.patches, None)
    if version not in TESTED_VERSIONS:
        tested = ", ".join(TESTED_VERSIONS)
        warnings.warn(
            f"megatron-core {version} was not tested with megatron_on_cpu; tested: {tested}. "
            f"If training fails inside megatron.core: pip install megatron-core=={TESTED_VERSIONS[-1]}",
            stacklevel=2,
        )
    patcher = _Patcher(names)
    patcher.install()
    MegatronOnCpu._current = MegatronOnCpu(names, patcher)
    return MegatronOnCpu._current


def _checked(patches: Iterable[str] | None) -> tuple[str, ...]:
    """Return patch names in the order of `PATCHES`; raise for unknown ones."""
    wanted = set(PATCHES if patches is None else [patches] if isinstance(patches, str) else patches)
    for name in sorted(wanted - PATCHES.keys()):
        raise PatchError(f"unknown patch {name!r}; known: {', '.join(PATCHES)}{did_you_mean(name, PATCHES)}")
    return tuple(name for name in PATCHES if name in wanted)


def megatron_version() -> str:
    """Return the version of megatron-core without importing it.

    Returns
    -------
    str
        Such as ``"0.16.1"``, or ``"unknown"``.

    Raises
    ------
    DependencyError
        If torch or megatron-core is not installed.
    """
    try:
        spec = importlib.util.find_spec(PREFIX) if importlib.util.find_spec("torch") else None
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise DependencyError("training with Megatron needs torch and megatron-core: pip install mappnb[megatron]")
    info = importlib.util.spec_from_file_location("_megatron_info", Path(spec.origin).with_name("package_info.py"))
    if info is None or info.loader is None or not Path(str(info.origin)).exists():
        return "unknown"
    module = importlib.util.module_from_spec(info)
    info.loader.exec_module(module)
    return str(getattr(module, "__version__", "unknown"))
