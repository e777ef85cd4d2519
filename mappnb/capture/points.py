"""What capture attaches to: the probe and session interfaces, the plans, and the table of capture points."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from mappnb.capture.recorder import Recorder
from mappnb.errors import CaptureError, did_you_mean
from mappnb.layout import Layout

if TYPE_CHECKING:
    from mappnb.capture.activations.plan import CapturePlan

__all__ = [
    "CAPTURE_POINTS",
    "PLANS",
    "CapturePoint",
    "ForwardWatcher",
    "Plan",
    "Probe",
    "ProbeState",
    "SessionLike",
    "build_probes",
    "parse_plan",
    "state_of",
]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recording takes in.

    Attributes
    ----------
    name : str
        Name of the plan, kept in the run's meta.
    modules : bool
        Forward spans of embedding, layers, attention, MLP, output layer and loss.
    backward_modules : bool
        Their backward spans too; needs ``modules``.
    metrics : bool
        Tokens and document lengths per microbatch, tokens per expert.
    telemetry_s : float
        Seconds between two telemetry samples; 0 switches telemetry off.
    gc : bool
        Pauses of Python's garbage collector.
    data : bool
        Waits for the next batch.
    checkpoints : bool
        Saving and loading of checkpoints.
    ddp_hook : bool
        Register a communication hook (bit-equal to the built-in path) on DistributedDataParallel models that have
        none, since the all-reduces of its C++ reducer are invisible otherwise.
    """

    name: str
    modules: bool = True
    backward_modules: bool = True
    metrics: bool = True
    telemetry_s: float = 2.0
    gc: bool = True
    data: bool = True
    checkpoints: bool = True
    ddp_hook: bool = True

    def __post_init__(self) -> None:
        if self.telemetry_s < 0:
            raise CaptureError(
                f"plan {self.name!r}: telemetry_s is {self.telemetry_s}; expected 0 (off) or more seconds"
            )
        if self.backward_modules and not self.modules:
            raise CaptureError(f"plan {self.name!r}: backward_modules needs modules=True")


PLANS: Final[dict[str, Plan]] = {
    "base": Plan("base", modules=False, backward_modules=False, metrics=False, telemetry_s=5.0),
    "default": Plan("default"),
}
"""The named plans: ``base`` has no module spans (at most 0.3 % of a 0.5 s step), ``default`` has them (at most 1 %)."""


def parse_plan(plan: str | Plan) -> Plan:
    """Return the plan of this name, or the plan itself.

    Raises
    ------
    CaptureError
        If no plan has that name.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str) or plan not in PLANS:
        known = ", ".join(PLANS)
        raise CaptureError(
            f"unknown plan {plan!r}; known: {known}, or a mappnb.capture.points.Plan{did_you_mean(plan, PLANS)}"
        )
    return PLANS[plan]


@runtime_checkable
class Probe(Protocol):
    """Something that patches or hooks the training program, and takes everything back."""

    name: str

    def install(self, session: SessionLike) -> None:
        """Patch and hook; must not import torch or megatron where the program has not yet."""
        ...

    def uninstall(self) -> None:
        """Leave nothing patched."""
        ...


class SessionLike(Protocol):
    """What probes need of the recording session."""

    recorder: Recorder
    plan: Plan

    @property
    def meta(self) -> dict[str, Any]:
        """Facts kept with the rank: ``missing_points``, ``degraded``, ..."""
        ...

    def begin_step(self, step: int | None = None) -> None:
        """Open the iteration span unless it is open, and set the step of the context."""
        ...

    def end_step(self) -> None:
        """Close the iteration span if it is open."""
        ...

    def step_values(self, **values: Any) -> None:
        """Add values of the current step: loss, grad_norm, lr, skipped; tokens and microbatches are summed."""
        ...

    def metric(
        self, name: str, value: Any, *, microbatch: int = -1, chunk: int = -1, layer: int = -1, index: int = 0
    ) -> None:
        """Keep one number, or a 1-d tensor as rows of index 0 to n-1."""
        ...

    def set_layout(self, layout: Layout, coords: dict[str, int]) -> None:
        """Tell the parallel layout and this rank's place in it."""
        ...

    def add_group(self, group_id: int, *, ranks: list[int], backend: str, desc: str, name: str, ordinal: int) -> None:
        """Tell a process group that this rank is a member of."""
        ...

    def set_model(self, **info: Any) -> None:
        """Tell facts about the model: parameters, num_layers, flops_per_token, ..."""
        ...

    def set_rank(self, rank: int, world_size: int) -> None:
        """Tell this process's global rank."""
        ...

    def fail(self, where: str, err: BaseException) -> None:
        """Log once, switch recording off, and leave ``meta["degraded"]``."""
        ...

    def note(self, **facts: Any) -> None:
        """Keep plain values with the rank."""
        ...

    def folder(self, name: str) -> str | None:
        """Return this rank's folder of that name in the run directory, not made; None until the rank has joined the run."""
        ...

    def defer(self, fn: Callable[[], bool]) -> None:
        """Call ``fn`` on the writer thread until it returns True."""
        ...


class ForwardWatcher(Protocol):
    """What is told of each forward step by the probe that sees it."""

    def begin_schedule(
        self, chunks: list[Any], *, sequence_length: int, micro_batch: int, num_microbatches: int
    ) -> None:
        """See all model chunks of this rank, and what a training step is made of."""
        ...

    def enter(
        self, model: Any, chunk: int, microbatch: int, *, training: bool, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> None:
        """Begin the forward step of a microbatch; ``kwargs`` is None where the arguments are not known yet."""
        ...

    def leave(self) -> None:
        """End the forward step."""
        ...


@dataclass
class ProbeState:
    """What the probes of one session tell each other.

    Attributes
    ----------
    framework : str
        ``"megatron"`` once a Megatron schedule has run: the generic probes then leave steps and modules to it.
    optimizer_depth : int
        Optimizer steps being inside one another now; only the outermost is recorded.
    at_step_end : list of callables
        Called by whichever probe ends the step, just before it does.
    watchers : list of ForwardWatcher
        Told of forward steps.
    """

    framework: str = ""
    optimizer_depth: int = 0
    at_step_end: list[Callable[[], None]] = field(default_factory=list)
    watchers: list[ForwardWatcher] = field(default_factory=list)

    def end_step(self, session: SessionLike) -> None:
        """Run the hooks of the step's end, then end the step."""
        for fn in self.at_step_end:
            fn()
        session.end_step()


_STATES: Final[weakref.WeakKeyDictionary[SessionLike, ProbeState]] = weakref.WeakKeyDictionary()


def state_of(session: SessionLike) -> ProbeState:
    """Return the state that the probes of ``session`` share."""
    state = _STATES.get(session)
    if state is None:
        state = _STATES[session] = ProbeState()
    return state


def build_probes(plan: Plan, activations: CapturePlan | None = None) -> list[Probe]:
    """Return the probes of the plans, in the order in which to install them; uninstall in the reverse order."""
    from mappnb.capture.collectives import CollectiveProbe
    from mappnb.capture.device_spans import DeviceProbe
    from mappnb.capture.hostevents import GcProbe
    from mappnb.capture.megatron import MegatronProbe
    from mappnb.capture.torch_programs import TorchProbe

    probes: list[Probe] = [DeviceProbe(), CollectiveProbe(), MegatronProbe(), TorchProbe()]
    if activations is not None:
        from mappnb.capture.activations.probe import ActivationProbe

        probes.append(ActivationProbe(activations))
    return [*probes, GcProbe()] if plan.gc else probes


@dataclass(frozen=True, slots=True)
class CapturePoint:
    """One row of the table of capture points.

    Attributes
    ----------
    name : str
        Event op, metric or column that it gives.
    what : str
        What is measured.
    when : str
        How often, and in which plans.
    source : str
        Function of Megatron-core or torch that it attaches to.
    """

    name: str
    what: str
    when: str
    source: str


def _points(rows: Sequence[tuple[str, str, str, str]]) -> tuple[CapturePoint, ...]:
    return tuple(CapturePoint(*row) for row in rows)


CAPTURE_POINTS: Final[tuple[CapturePoint, ...]] = _points(
    [
        ("iteration", "one optimizer step", "each step", "schedules.forward_backward_* to MegatronOptimizer.step"),
        ("forward_step", "forward of one microbatch on one chunk", "each microbatch", "schedules.forward_step"),
        ("backward_step", "backward of one microbatch on one chunk", "each microbatch", "schedules.backward_step"),
        ("evaluate", "a forward-only schedule", "each call", "schedules.forward_backward_*(forward_only=True)"),
        ("next_batch", "wait for data", "each batch", "next(data_iterator); DataLoader iterator __next__"),
        ("model", "model chunk, forward", "each microbatch; default", "nn.Module.register_forward_hook"),
        (
            "layer",
            "transformer layer, forward, backward, recompute",
            "each microbatch; default",
            "TransformerLayer: forward hooks, grad_fn hooks",
        ),
        ("attention", "self attention, same", "each microbatch; default", "TransformerLayer.self_attention"),
        ("mlp", "MLP or MoE layer, same", "each microbatch; default", "TransformerLayer.mlp"),
        ("embedding", "embedding, same", "each microbatch; default", "LanguageModel.embedding"),
        ("output_layer", "output projection, same", "each microbatch; default", "LanguageModel.output_layer"),
        ("loss", "loss from logits, same", "each microbatch; default", "LanguageModule.compute_language_model_loss"),
        (
            "grad_sync",
            "data-parallel gradient reduction of a bucket group",
            "each bucket group",
            "_ParamAndGradBucketGroup.start_grad_sync, .finish_grad_sync",
        ),
        (
            "param_sync",
            "parameter all-gather of a bucket group, where it waits",
            "each bucket group",
            "_ParamAndGradBucketGroup.start_param_sync, .finish_param_sync",
        ),
        ("finalize_grads", "gradient work after the last backward", "each step", "config.finalize_model_grads_func"),
        (
            "optimizer_step",
            "outermost optimizer step",
            "each step",
            "MegatronOptimizer.step; torch.optim.optimizer.register_optimizer_step_pre_hook",
        ),
        (
            "checkpoint_save",
            "saving a checkpoint",
            "each call",
            "dist_checkpointing.save, torch.save, torch.distributed.checkpoint.save",
        ),
        (
            "checkpoint_load",
            "loading a checkpoint",
            "each call",
            "dist_checkpointing.load, torch.load, torch.distributed.checkpoint.load",
        ),
        (
            "all_reduce ... barrier",
            "collectives: bytes, dtype, group, seq, root",
            "each call",
            "ProcessGroup methods, _functional_collectives functions, DistributedDataParallel comm hook",
        ),
        ("send, recv", "point-to-point: bytes, peer, seq per pair", "each call", "ProcessGroup.send, .recv"),
        ("wait", "stall in Work.wait of an asynchronous operation", "each wait", "Work.wait"),
        ("gc", "pause of Python's garbage collector", "each collection; plan.gc", "gc.callbacks"),
        (
            "expert_tokens",
            "metric: tokens routed to each expert",
            "each microbatch and MoE layer; plan.metrics",
            "TopKRouter.routing",
        ),
        (
            "tokens",
            "metric: tokens of a microbatch; also summed per step",
            "each microbatch; plan.metrics",
            "model forward's input_ids",
        ),
        (
            "document_tokens",
            "metric: lengths of the documents in a microbatch",
            "each microbatch; plan.metrics",
            "packed_seq_params.cu_seqlens_q, or resets in position_ids on a CPU",
        ),
        ("loss, grad_norm, lr, skipped", "step values", "each step", "loss function's dict; MegatronOptimizer.step"),
        (
            "activations",
            "tensors inside the model: see the page on activations",
            "steps of the capture plan; record(activations=)",
            "forward and tensor hooks on the model's modules",
        ),
        ("telemetry", "clocks, power, temperature, throttling, memory, CPU", "every plan.telemetry_s", "NVML; psutil"),
    ]
)
"""Where capture attaches, for the documentation."""
