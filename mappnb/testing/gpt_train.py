"""The training loop of the reference job, as one rank runs it."""

from __future__ import annotations

import datetime
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mappnb.testing.gpt_settings import StepReport, TrainResult, TrainSettings
from mappnb.testing.interrupt import StopFlag
from mappnb.testing.megatron_cpu import megatron_on_cpu

__all__ = ["run_training"]

DIST_TIMEOUT = datetime.timedelta(seconds=300)


def run_training(
    settings: TrainSettings,
    *,
    on_step: Callable[[StepReport], None] | None = None,
    stop: StopFlag | None = None,
    started_s: float | None = None,
    forward_backward_func: Callable[..., Any] | None = None,
) -> TrainResult:
    """Train on this rank; see `mappnb.testing.gpt.train`, which has the same arguments."""
    started_s = time.time() if started_s is None else started_s
    on_cpu = settings.device == "cpu" or not torch.cuda.is_available()
    with ExitStack() as stack:
        if on_cpu:
            stack.enter_context(megatron_on_cpu(force=True))
        device = _device(on_cpu)
        stack.enter_context(_process_group(device))
        settings.check(dist.get_world_size())
        stack.enter_context(_model_parallel(settings, on_cpu))
        if (link := settings.link()) is not None:
            from mappnb.testing.faults import slow_link

            stack.enter_context(slow_link(*link))
        with _recording(settings):
            job = _Job.build(settings, device)
            startup_s = time.time() - started_s
            reports = list(job.steps(on_step, stop or StopFlag(), forward_backward_func))
        dist.barrier()  # nobody leaves, and so closes the store, while others still work
    return TrainResult.from_reports(reports, settings, world_size=job.world_size, startup_s=startup_s)


def _device(on_cpu: bool) -> torch.device:
    if on_cpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """Join the job's process group; one that exists already is used and left alone."""
    if dist.is_initialized():
        yield
        return
    backend = "gloo" if device.type == "cpu" else "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=DIST_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=DIST_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _model_parallel(settings: TrainSettings, on_cpu: bool) -> Iterator[None]:
    """Make megatron-core's process groups and seed its generators."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tp,
        pipeline_model_parallel_size=settings.pp,
        virtual_pipeline_model_parallel_size=settings.vpp if settings.vpp > 1 else None,
        context_parallel_size=settings.cp,
        expert_model_parallel_size=settings.ep,
        expert_tensor_parallel_size=1 if settings.experts else None,
        create_gloo_process_groups=not on_cpu,
    )
    torch.manual_seed(settings.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed, force_reset_rng=True)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _recording(settings: TrainSettings) -> Any:
    """Give the recorder, or nothing where the settings name no run directory."""
    if not settings.run_dir:
        return nullcontext()
    return importlib.import_module("mappnb").record(settings.run_dir, plan=settings.plan, **settings.record_options)


@dataclass
class _Job:
    """Model, optimizer and data of one rank."""

    settings: TrainSettings
    device: torch.device
    config: Any
    chunks: list[Any]
    optimizer: Any
    data: list[Any]
    rank: int
    world_size: int
    num_microbatches: int
    last_stage: bool
    cp_group: Any
    reports_loss: bool  # one rank per data-parallel replica does
    mask: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        length = self.settings.sequence_length
        self.mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=self.device).triu(1)

    @classmethod
    def build(cls, settings: TrainSettings, device: torch.device) -> _Job:
        from megatron.core import parallel_state

        from mappnb.testing import gpt_model
        from mappnb.testing.gpt_data import Batches

        config = gpt_model.model_config(settings, device)
        chunks = gpt_model.build_model(settings, config, device)
        optimizer = gpt_model.build_optimizer(settings, chunks)
        gpt_model.connect(settings, config, chunks, optimizer)
        last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        tp_rank, cp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        return cls(
            settings=settings,
            device=device,
            config=config,
            chunks=chunks,
            optimizer=optimizer,
            data=[Batches(settings, device) for _ in chunks],
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            num_microbatches=settings.num_microbatches(dist.get_world_size()),
            last_stage=last_stage,
            cp_group=parallel_state.get_context_parallel_group(),
            reports_loss=last_stage and tp_rank == 0 and cp_rank == 0,
        )

    def steps(
        self, on_step: Callable[[StepReport], None] | None, stop: StopFlag, forward_backward_func: Any
    ) -> Iterator[StepReport]:
        """Train; after each step give its report. Ends early, on all ranks at once, when any rank is to stop."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        forward_backward = forward_backward_func or get_forward_backward_func()
        stop.training = True
        for step in range(self.settings.steps):
            start_s = time.perf_counter()
            losses, grad_norm = self._train_step(step, forward_backward)
            loss, stopping = self._share(losses, stop)
            step_s = time.perf_counter() - start_s
            report = StepReport(step, loss, grad_norm, step_s, self.settings.tokens_per_step / step_s)
            if on_step is not None:
                on_step(report)
            yield report
            if stopping:
                return

    def _train_step(self, step: int, forward_backward: Callable[..., Any]) -> tuple[list[torch.Tensor], float]:
        settings = self.settings
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [batches.at(step) for batches in self.data]
        outputs = forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=iterators if settings.vpp > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=self.num_microbatches,
            seq_length=settings.sequence_length,
            micro_batch_size=settings.micro_batch,
            forward_only=False,
        )
        _, grad_norm, _ = self.optimizer.step()
        return [output["loss"] for output in outputs], float("nan") if grad_norm is None else float(grad_norm)

    def _forward_step(self, iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        """One microbatch through one model chunk, as megatron-core's schedules call it."""
        if self.rank == self.settings.slow_rank:
            from mappnb.testing.faults import burn

            burn(self.settings.slow_ms / 1e3, self.device)
        batch = next(iterator)
        mask = self.mask
        if "padding" in batch:  # True: not to be looked at
            positions = torch.arange(mask.size(-1), device=self.device)
            mask = mask | (positions < batch["padding"][:, None])[:, None, None, :]
        output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        return output, partial(_loss, cp_group=self.cp_group, weights=batch.get("weights"))

    def _share(self, losses: list[torch.Tensor], stop: StopFlag) -> tuple[float, bool]:
        """Mean loss of the step, and whether any rank was told to stop: one all_reduce for both."""
        dtype = torch.float64
        shared = torch.zeros(3, dtype=dtype, device=self.device)
        if self.reports_loss:
            shared[0], shared[1] = torch.stack(losses).to(dtype).mean(), 1.0
        shared[2] = float(stop.is_set)
        dist.all_reduce(shared)
        total, replicas, stopping = shared.tolist()
        return total / replicas, stopping > 0


def _loss(
    token_losses: torch.Tensor, *, cp_group: Any, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss of a microbatch (padding counts as 0); its copy for the report, since schedules divide the returned loss in place."""
    losses = token_losses.float()
    loss = (losses if weights is None else losses * weights).mean()
    cp_size = cp_group.size()
    report = loss.detach().clone()
    if cp_size > 1:  # each rank has an equal share of the tokens
        dist.all_reduce(report, group=cp_group)
        report /= cp_size
    return loss / cp_size, {"loss": report}
