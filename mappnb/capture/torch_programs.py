"""Plain torch programs: optimizer steps, models, backward passes, pipelining stages, data loaders, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from mappnb.capture._checkpoints import watch_checkpoints
from mappnb.capture._compiled import compiled_modules
from mappnb.capture._flags import FAILED
from mappnb.capture._module_spans import ModuleSpans
from mappnb.capture._patches import ImportWatch, Patches, loaded
from mappnb.capture._pipelining import PipeliningHooks
from mappnb.capture._torch_models import parts_of
from mappnb.capture._torch_step import TorchSteps
from mappnb.capture.points import ProbeState, SessionLike, state_of
from mappnb.layout import Layout
from mappnb.terms import Category, Op, Phase

__all__ = ["TorchProbe", "environment_rank"]

Function = Callable[..., Any]

_RANKS: Final = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def environment_rank() -> tuple[int, int] | None:
    """Return (rank, world size) as the launcher's environment tells it: torchrun, Slurm, Open MPI, PMI; or None."""
    for rank, size in _RANKS:
        try:
            return int(os.environ[rank]), int(os.environ[size])
        except (KeyError, ValueError):
            continue
    return None


class TorchProbe:
    """Records programs that use torch without Megatron-core, whose own probe takes over where it runs.

    Notes
    -----
    A step begins with the first training forward or batch, and ends with the outermost optimizer step; programs with
    several optimizers call ``mappnb.step()`` instead. The model is found when it is first called: the outermost module
    with parameters, in training mode, with gradients on; until the first step is over a global forward hook looks for
    it, later none. ``FullyShardedDataParallel`` (both) and ``DistributedDataParallel`` are models like others.
    """

    name = "torch"

    def __init__(self) -> None:
        self._patches = Patches()
        self._session: SessionLike | None = None
        self._watch: ImportWatch | None = None
        self._hooks: _TorchHooks | None = None

    def install(self, session: SessionLike) -> None:
        """Put hooks on torch, now or when the program imports it."""
        self._session = session
        self._watch = ImportWatch(session.fail)
        hooks = self._hooks = _TorchHooks(session, self._patches)
        self._watch.when("torch.optim.optimizer", hooks.watch_optimizers)
        self._watch.when("torch.autograd", hooks.watch_backward)
        self._watch.when("torch.nn.modules.module", hooks.watch_modules)
        self._watch.when("torch.distributed.pipelining.stage", hooks.pipelining.watch)
        self._watch.when("torch.distributed.pipelining.schedules", hooks.pipelining.watch_schedules)
        if session.plan.data:
            self._watch.when("torch.utils.data.dataloader", hooks.watch_loaders)
        if session.plan.checkpoints:
            watch_checkpoints(session, self._patches, self._watch)
        state_of(session).at_step_end.append(hooks.step_ended)

    def uninstall(self) -> None:
        """Put everything back."""
        if self._session is None or self._watch is None or self._hooks is None:
            return
        self._watch.stop()
        self._patches.undo()
        self._hooks.stop()
        hooks = state_of(self._session).at_step_end
        if self._hooks.step_ended in hooks:
            hooks.remove(self._hooks.step_ended)
        self._session = self._watch = self._hooks = None

    def watch(self, model: Any) -> None:
        """Record the parts of ``model`` from now on, instead of waiting until it is found."""
        if self._hooks is not None:
            self._hooks.watch_model(model)


class _TorchHooks:
    """The hooks of one recording."""

    def __init__(self, session: SessionLike, patches: Patches) -> None:
        self.session = session
        self.recorder = session.recorder
        self.state: ProbeState = state_of(session)
        self.steps = TorchSteps(session)
        self.pipelining = PipeliningHooks(
            session, patches, self.steps, self.watch_parts, self.enter_backward, self.leave_backward
        )
        self._patches = patches
        self._handles: list[Any] = []
        self._finder: Any = None
        self._spans: ModuleSpans | None = None
        self._roots: list[int] = []
        self._backward_depth = 0
        self._described = False
        make = self.recorder.site
        self._backward = make(category=Category.COMPUTE, op=Op.BACKWARD_STEP, phase=Phase.BACKWARD)
        self._next = make(category=Category.DATA, op=Op.NEXT_BATCH)

    def stop(self) -> None:
        """Take off what is not an attribute patch."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stop_looking()
        if self._spans is not None:
            self._spans.detach()

    def step_ended(self) -> None:
        """Tell the step's sums; what is to be found has been found."""
        if self._roots or self.state.framework:
            self._stop_looking()
        self.steps.tell()
        if self._spans is not None:
            self._spans.drop_open()

    # ------------------------------------------------------------------ optimizers
    def watch_optimizers(self, module: ModuleType) -> None:
        """Put hooks on all optimizers."""
        self._handles.append(module.register_optimizer_step_pre_hook(self.steps.before_optimizer))
        self._handles.append(module.register_optimizer_step_post_hook(self.steps.after_optimizer))

    # ------------------------------------------------------------------ backward
    def watch_backward(self, module: ModuleType) -> None:
        """Wrap ``torch.autograd.backward``, which ``Tensor.backward`` calls too."""
        self._patches.wrap(module, "backward", self._wrap_backward)

    def _wrap_backward(self, original: Function) -> Function:
        recorder, state = self.recorder, self.state

        def backward(*args: Any, **kwargs: Any) -> Any:
            if not recorder.enabled or state.framework or self._backward_depth or not self.steps.training:
                return original(*args, **kwargs)
            self._backward_depth += 1
            token, flags = 0, FAILED
            try:
                self.steps.enter_backward(args[0] if args else kwargs.get("tensors"))
                token = recorder.begin(self._backward)
            except Exception as err:  # noqa: BLE001
                self.session.fail("backward", err)
            try:
                result = original(*args, **kwargs)
                flags = 0
                return result
            finally:
                self._backward_depth -= 1
                if token:
                    self.leave_backward(token, flags)

        return backward

    def enter_backward(self, phase: str) -> None:
        """Say which backward pass begins."""
        if self._spans is not None:
            self._spans.enter_backward(phase)

    def leave_backward(self, token: int, flags: int) -> None:
        """End a backward pass, and that of the modules that end with it."""
        try:
            if self._spans is not None:
                self._spans.end_tails()
                self._spans.forget()
            self.recorder.end(token, flags=flags)
            self.recorder.set_context(None, -1, -1, -1)
        except Exception as err:  # noqa: BLE001
            self.session.fail("backward", err)

    # ------------------------------------------------------------------ models
    def watch_modules(self, module: ModuleType) -> None:
        """Look for the model at every module's forward, until it is found."""
        if not self._roots:
            self._finder = module.register_module_forward_pre_hook(self._look)

    def watch_model(self, model: Any) -> None:
        """Put hooks on a model: its forward is the forward step, its parts are modules."""
        if id(model) in self._roots:
            return
        self._attach_root(model)
        self.watch_parts(model)

    def _stop_looking(self) -> None:
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    def _look(self, module: Any, args: tuple[Any, ...]) -> None:
        import torch

        if torch.compiler.is_compiling():  # torch.compile traces this too: the hook must be nothing then
            return
        if not self.recorder.enabled or self._finder is None:
            return
        try:
            if self.state.framework == "megatron":
                self._stop_looking()
            elif not self.state.framework and self._is_new_root(module):
                hook = self._attach_root(module)
                self.watch_parts(module)
                hook.pre(module, args, {})
        except Exception as err:  # noqa: BLE001
            self.session.fail("model", err)

    def _is_new_root(self, module: Any) -> bool:
        if self.steps.in_forward or id(module) in self._roots or not _trains(module):
            return False
        return bool(self._get_spans().graph_task() == -1)  # a call inside a backward pass is a recomputation

    def _attach_root(self, model: Any) -> Any:
        self._roots.append(id(model))
        self.describe(model)
        spans = self._get_spans()
        return spans.attach(model, op=Op.FORWARD_STEP, backward=False, before=self._enter_root, after=self._leave_root)

    def watch_parts(self, model: Any) -> None:
        """Put hooks on the parts of a model."""
        if self.session.plan.modules:
            compiled = compiled_modules(model)
            for part in parts_of(_inner(model)):
                if id(part.module) in compiled:
                    continue
                self._get_spans().attach(part.module, op=part.op, name=part.name, layer=part.layer)

    def _get_spans(self) -> ModuleSpans:
        if self._spans is None:
            self._spans = ModuleSpans(self.session)
        return self._spans

    def _enter_root(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._spans is not None:
            self._spans.forget()
        if not self.state.framework:
            training = _trains(module)
            self.steps.enter_forward(training=training)
            microbatch = self.recorder.context()[3]
            for watcher in self.state.watchers:
                watcher.enter(module, 0, microbatch, training=training, args=args, kwargs=kwargs)

    def _leave_root(self) -> None:
        if not self.state.framework:
            self.steps.leave_forward()
            for watcher in self.state.watchers:
                watcher.leave()

    def describe(self, model: Any) -> None:
        """Tell rank, layout and model, once."""
        if self._described:
            return
        self._described = True
        dist = loaded("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            self.session.set_rank(rank, world_size)
        else:
            rank, world_size = environment_rank() or (0, 1)
        if not self.state.framework:
            coords = {"tp": 0, "cp": 0, "ep": 0, "dp": rank, "pp": 0}
            self.session.set_layout(Layout(dp=world_size), coords)
        parameters = sum(p.numel() for p in model.parameters())
        inner = _inner(model)
        self.session.set_model(framework="torch", class_name=type(inner).__name__, parameters_local=parameters)

    # ------------------------------------------------------------------ data
    def watch_loaders(self, module: ModuleType) -> None:
        """Wrap ``next`` of data loaders."""
        self._patches.wrap(module._BaseDataLoaderIter, "__next__", self._wrap_next)

    def _wrap_next(self, original: Function) -> Function:
        recorder = self.recorder

        def next_batch(iterator: Any) -> Any:
            if not recorder.enabled:
                return original(iterator)
            self.steps.before_batch()
            token = recorder.begin(self._next)
            try:
                return original(iterator)
            finally:
                recorder.end(token)

        return next_batch


def _trains(module: Any) -> bool:
    """Whether a call of ``module`` now is a training forward."""
    import torch

    return (
        bool(module.training)
        and torch.is_grad_enabled()
        and next((True for p in module.parameters() if p.requires_grad), False)
    )


def _inner(model: Any) -> Any:
    """Return the model inside wrappers that call it ``module`` and have nothing else."""
    while len(list(model.children())) == 1 and hasattr(model, "module"):
        model = model.module
    return model
