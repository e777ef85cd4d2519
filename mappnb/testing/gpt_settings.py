"""Settings and result of the reference training job: plain values, readable without torch."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_type_hints

from mappnb.errors import LayoutError, MappnbError, did_you_mean

__all__ = ["SettingsError", "StepReport", "TrainResult", "TrainSettings"]


class SettingsError(MappnbError, ValueError):
    """A training setting that cannot work, found before any process starts."""


def _setting(default: Any, help: str) -> Any:
    if isinstance(default, dict):
        return field(default_factory=dict, hash=False, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """One training job: model, layout, data, faults and recording. The data-parallel size is what is left over.

    Every field is a command-line flag of ``python -m mappnb.testing.gpt`` too (``--sequence-length 64``); see
    ``--help`` for what each means.

    Raises
    ------
    SettingsError
        For a value that cannot work.
    LayoutError
        For parallel sizes that do not fit the model or each other.
    """

    tp: int = _setting(1, "tensor-parallel size")
    pp: int = _setting(1, "pipeline-parallel size")
    vpp: int = _setting(1, "model chunks per pipeline rank; above 1 = interleaved schedule")
    cp: int = _setting(1, "context-parallel size")
    ep: int = _setting(1, "expert-parallel size")
    sequence_parallel: bool = _setting(False, "shard norms and residuals along the sequence; needs tp > 1")
    experts: int = _setting(0, "experts per layer; 0 = dense model")
    dispatcher: Literal["alltoall", "allgather"] = _setting("alltoall", "how tokens reach their experts")
    distributed_optimizer: bool = _setting(False, "shard the optimizer state over data-parallel ranks")
    overlap: bool = _setting(False, "overlap data-parallel communication with compute")
    layers: int = _setting(4, "transformer layers")
    hidden: int = _setting(128, "hidden size")
    heads: int = _setting(4, "attention heads")
    kv_heads: int = _setting(0, "heads of keys and values (query groups); 0 = as many as heads")
    sequence_length: int = _setting(64, "tokens per sample")
    vocab: int = _setting(256, "vocabulary size; the data are bytes, so at least 256")
    left_padding: int = _setting(0, "samples begin with up to this many padding tokens, masked and without loss")
    global_batch: int = _setting(8, "samples per step, over all ranks")
    micro_batch: int = _setting(1, "samples per microbatch")
    steps: int = _setting(6, "optimizer steps")
    lr: float = _setting(1e-3, "learning rate of Adam")
    clip: float = _setting(1.0, "gradient norm to clip to; 0 = no clipping")
    seed: int = _setting(1234, "seed of weights and data")
    dropout: float = _setting(0.0, "dropout probability; above 0 losses depend on the layout")
    gated_mlp: bool = _setting(False, "SwiGLU instead of GELU")
    untie: bool = _setting(False, "separate weights for embedding and output layer")
    recompute: bool = _setting(False, "recompute every layer's forward pass in the backward pass")
    device: Literal["auto", "cpu"] = _setting("auto", "auto = CUDA and NCCL where there is a GPU; cpu = CPU and gloo")
    run_dir: str = _setting("", "record into this run directory; empty = do not record")
    plan: str = _setting("default", "what to record")
    record_options: Mapping[str, Any] = _setting({}, "more arguments of mappnb.record, as JSON")
    slow_rank: int = _setting(-1, "global rank that computes longer; -1 = none")
    slow_ms: float = _setting(0.0, "extra milliseconds in each forward step of the slow rank")
    slow_link: str = _setting("", "SRC,DST,MS: receives of rank DST from rank SRC complete MS milliseconds late")

    def __post_init__(self) -> None:
        """Check everything that does not depend on the number of ranks."""
        _check_types(self)
        _check_values(self)
        _check_model_layout(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, over all ranks."""
        return self.global_batch * self.sequence_length

    def dp(self, world_size: int) -> int:
        """Return the data-parallel size in a job of ``world_size`` ranks."""
        return world_size // (self.tp * self.pp * self.cp)

    def num_microbatches(self, world_size: int) -> int:
        """Return the number of microbatches per step and rank in a job of ``world_size`` ranks."""
        return self.global_batch // (self.micro_batch * self.dp(world_size))

    def link(self) -> tuple[int, int, float] | None:
        """Return the slow link as (source rank, destination rank, delay in seconds), or None."""
        return _parse_link(self.slow_link) if self.slow_link else None

    def check(self, world_size: int) -> None:
        """Raise unless this job can run on ``world_size`` ranks.

        Parameters
        ----------
        world_size : int
            Number of ranks.

        Raises
        ------
        LayoutError
            If the ranks or the batch cannot be divided as asked.
        SettingsError
            If a fault names a rank or a link that the job does not have.
        """
        _check_world(self, world_size)
        _check_faults(self, world_size)

    def to_json(self) -> str:
        """Write all settings as one line of JSON; `from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; settings that are not given take their defaults."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise SettingsError(f'settings must be a JSON object, e.g. {{"tp": 2}}; found {text[:60]!r}')
        known = [setting.name for setting in fields(cls)]
        for name in values:
            if name not in known:
                raise SettingsError(f"unknown setting {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
        return cls(**values)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag for every setting to ``parser``."""
        hints = get_type_hints(cls)
        for setting in fields(cls):
            flags = ["--" + setting.name.replace("_", "-"), *(["--sp"] if setting.name == "sequence_parallel" else [])]
            parser.add_argument(*flags, **_flag_options(setting, hints[setting.name]))

    @classmethod
    def from_flags(cls, flags: argparse.Namespace) -> Self:
        """Build settings from flags that `add_flags` defined."""
        return cls(**{setting.name: getattr(flags, setting.name) for setting in fields(cls)})


def _flag_options(setting: Field[Any], hint: Any) -> dict[str, Any]:
    """Keyword arguments of ``add_argument`` for one setting."""
    default = {} if setting.default is MISSING else setting.default
    options: dict[str, Any] = {"dest": setting.name, "default": default, "help": setting.metadata["help"]}
    if hint is bool:
        return {**options, "action": "store_true"}
    if hint in (int, float, str):
        return {**options, "type": hint, "metavar": hint.__name__.upper()}
    if isinstance(default, dict):
        return {**options, "type": json.loads, "metavar": "JSON"}
    return {**options, "choices": hint.__args__}


def _check_types(settings: TrainSettings) -> None:
    hints = get_type_hints(TrainSettings)
    for setting in fields(settings):
        hint, value = hints[setting.name], getattr(settings, setting.name)
        if hint is float and type(value) is int:
            continue
        if hint in (bool, int, float, str) and type(value) is not hint:
            raise SettingsError(f"{setting.name} must be {hint.__name__}; found {value!r}")
        if hasattr(hint, "__args__") and isinstance(setting.default, str) and value not in hint.__args__:
            known = ", ".join(map(repr, hint.__args__))
            raise SettingsError(
                f"{setting.name} must be one of {known}; found {value!r}{did_you_mean(value, hint.__args__)}"
            )


def _check_values(s: TrainSettings) -> None:
    at_least_one = ("tp", "pp", "vpp", "cp", "ep", "layers", "hidden", "heads", "sequence_length", "global_batch")
    for name in (*at_least_one, "micro_batch", "steps"):
        if getattr(s, name) < 1:
            raise SettingsError(f"{name} must be 1 or more; found {getattr(s, name)}")
    for name in ("experts", "clip", "slow_ms", "seed", "kv_heads", "left_padding"):
        if getattr(s, name) < 0:
            raise SettingsError(f"{name} must not be negative; found {getattr(s, name)}")
    if not 0 <= s.dropout < 1:
        raise SettingsError(f"dropout is a probability in [0, 1); found {s.dropout}")
    if s.left_padding >= s.sequence_length:
        raise SettingsError(f"left_padding={s.left_padding} leaves no token of sequence_length={s.sequence_length}")
    if s.vocab < 256:
        raise SettingsError(f"vocab must be 256 or more, the data are bytes; found {s.vocab}")
    if s.lr <= 0:
        raise SettingsError(f"lr must be above 0; found {s.lr}")
    if (s.slow_rank >= 0) != (s.slow_ms > 0):
        raise SettingsError(f"slow_rank and slow_ms go together; found slow_rank={s.slow_rank}, slow_ms={s.slow_ms}")
    if s.slow_link:
        _parse_link(s.slow_link)


def _check_model_layout(s: TrainSettings) -> None:
    _divides(s.hidden, "hidden", s.heads, "heads")
    if (s.hidden // s.heads) % 2:
        raise SettingsError(f"hidden / heads = {s.hidden // s.heads} must be even: rotary embeddings turn pairs")
    if s.kv_heads:
        _divides(s.heads, "heads", s.kv_heads, "kv_heads")
        _divides(max(s.kv_heads, s.tp), "kv_heads or tp", min(s.kv_heads, s.tp), "the smaller of the two")
    _divides(s.layers, "layers", s.pp * s.vpp, "pp * vpp")
    _divides(s.heads, "heads", s.tp, "tp")
    _divides(s.vocab, "vocab", s.tp, "tp")
    if s.vpp > 1 and s.pp == 1:
        raise LayoutError(f"vpp={s.vpp} needs a pipeline: set pp to 2 or more, or vpp to 1")
    if s.sequence_parallel and s.tp == 1:
        raise LayoutError("sequence_parallel needs tp > 1: it shards over the tensor-parallel ranks")
    if s.cp > 1:
        _divides(s.sequence_length, "sequence_length", 2 * s.cp, "2 * cp")
    if s.sequence_parallel:
        _divides(s.sequence_length, "sequence_length", s.cp * s.tp, "cp * tp (sequence_parallel)")
    if s.ep > 1 and not s.experts:
        raise LayoutError(f"ep={s.ep} needs experts: set experts to a multiple of {s.ep}, or ep to 1")
    if s.experts == 1:
        raise LayoutError("experts=1: each token goes to 2 experts, so set 2 or more (0 = dense model)")
    _divides(s.experts, "experts", s.ep, "ep")
    if s.experts and s.tp > 1 and not s.sequence_parallel:
        raise LayoutError(f"experts with tp={s.tp} need sequence_parallel=True: megatron-core refuses to train without")


def _check_world(s: TrainSettings, world_size: int) -> None:
    model_ranks = s.tp * s.pp * s.cp
    if world_size < 1 or world_size % model_ranks:
        near = max(1, round(world_size / model_ranks)) * model_ranks
        raise LayoutError(
            f"world_size={world_size} is not a multiple of tp * pp * cp = {s.tp} * {s.pp} * {s.cp} = {model_ranks}: "
            f"use {near} ranks, or other sizes"
        )
    _divides(world_size // s.pp, "world_size / pp", s.ep, "ep")
    dp = s.dp(world_size)
    _divides(s.global_batch, "global_batch", s.micro_batch * dp, f"micro_batch * dp (dp = {dp})")
    num_microbatches = s.num_microbatches(world_size)
    if s.vpp > 1 and num_microbatches % s.pp:
        raise LayoutError(
            f"the interleaved schedule needs a multiple of pp={s.pp} microbatches per rank; found {num_microbatches} "
            f"= global_batch {s.global_batch} / (micro_batch {s.micro_batch} * dp {dp}): change global_batch"
        )


def _check_faults(s: TrainSettings, world_size: int) -> None:
    if s.slow_rank >= world_size:
        raise SettingsError(f"slow_rank={s.slow_rank} does not exist: ranks are 0 to {world_size - 1}")
    if (link := s.link()) is None:
        return
    links = _pipeline_links(s, world_size)
    if link[:2] not in links:
        known = ", ".join(f"{src},{dst}" for src, dst in links[:8]) or "none, because pp=1"
        raise SettingsError(
            f"slow_link={s.slow_link!r}: rank {link[0]} sends no pipeline messages to rank {link[1]}, "
            f"so the delay would have no effect; links of this layout: {known}{' ...' if len(links) > 8 else ''}"
        )


def _pipeline_links(s: TrainSettings, world_size: int) -> list[tuple[int, int]]:
    """(source, destination) of all pipeline messages: Megatron's rank order has pp outermost."""
    stride = world_size // s.pp
    hops = range(s.pp if s.vpp > 1 else s.pp - 1)
    pairs = [(hop * stride + i, (hop + 1) % s.pp * stride + i) for hop in hops for i in range(stride)]
    return sorted({*pairs, *((dst, src) for src, dst in pairs)})


def _parse_link(text: str) -> tuple[int, int, float]:
    try:
        src, dst, delay_ms = text.split(",")
        link = (int(src), int(dst), float(delay_ms) / 1e3)
    except ValueError:
        raise SettingsError(f"cannot read slow_link {text!r}: write SRC,DST,MS, e.g. '1,2,40'") from None
    if link[0] < 0 or link[1] < 0 or link[0] == link[1] or link[2] <= 0:
        raise SettingsError(f"slow_link {text!r}: give two different ranks and a delay above 0, e.g. '1,2,40'")
    return link


def _divides(value: int, value_name: str, by: int, by_name: str) -> None:
    if value % by:
        raise LayoutError(f"{value_name}={value} cannot be divided by {by_name}={by}: change one of them")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is known after one step; the same on every rank.

    Attributes
    ----------
    step : int
        Counted from 0.
    loss, grad_norm : float
        Mean loss of the step's samples before the update; global gradient norm before clipping.
    step_s, tokens_per_s : float
        Seconds of the step, with the reduction of the loss; tokens over all ranks per second.
    """

    step: int
    loss: float
    grad_norm: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished training job.

    Attributes
    ----------
    losses, grad_norms, step_s : tuple of float, one per step
        See `StepReport`; exact, so that two runs can be compared bit by bit.
    world_size, tokens_per_step : int
        Ranks; tokens of one step over all ranks.
    startup_s : float
        Seconds from the start of rank 0's process to its first step.
    interrupted : bool
        True if SIGINT ended the job before its last step.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    step_s: tuple[float, ...]
    world_size: int
    tokens_per_step: int
    startup_s: float
    interrupted: bool

    @property
    def median_step_s(self) -> float:
        """Median seconds per step, without the first, which warms up."""
        return statistics.median(self.step_s[1:] or self.step_s or (float("nan"),))

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all ranks, at the median step time."""
        return self.tokens_per_step / self.median_step_s

    def to_json(self) -> str:
        """Write the result as JSON; Python writes floats so that they read back exactly."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("losses", "grad_norms", "step_s")})

    @classmethod
    def from_reports(
        cls, reports: Iterable[StepReport], settings: TrainSettings, *, world_size: int, startup_s: float
    ) -> Self:
        """Collect the reports of all steps."""
        done: Sequence[StepReport] = list(reports)
        return cls(
            losses=tuple(report.loss for report in done),
            grad_norms=tuple(report.grad_norm for report in done),
            step_s=tuple(report.step_s for report in done),
            world_size=world_size,
            tokens_per_step=settings.tokens_per_step,
            startup_s=startup_s,
            interrupted=len(done) < settings.steps,
        )
