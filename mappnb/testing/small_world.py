"""A small world of people and cities, and a small GPT that has learned it in a minute: a model whose answers are known.

Words are tokens. A sample is either sentences, "anna lives in rome .", true of this world, or the same random words twice: to say the
second copy a model needs induction heads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mappnb.errors import MappnbError, did_you_mean

if TYPE_CHECKING:
    import torch

    from mappnb.testing.gpt_settings import TrainSettings

__all__ = ["FACTS", "WORDS", "Words", "small_world", "train_small_world", "twice"]

_PEOPLE: Final = (
    *("anna", "boris", "carla", "dimitri", "elena", "felix", "greta", "hugo", "irene", "jonas"),
    *("karin", "leon", "maria", "nils", "olga", "paul", "rosa", "sven", "tara", "viktor"),
)
_CITIES: Final = ("rome", "paris", "london", "berlin", "madrid", "oslo", "vienna", "prague", "athens", "lisbon")
_FOODS: Final = ("bread", "cheese", "apples", "soup", "rice", "fish", "pasta", "olives", "honey", "beans")
_REST: Final = (
    *("<start>", "lives", "in", "likes", "and", ".", "who", "where", "what", "the"),
    *("a", "is", "not", "old", "young", "small", "large", "red", "green", "blue"),
)
WORDS: Final = (*_REST, *_PEOPLE, *_CITIES, *_FOODS)
"""Every word; its place is its token id, and ``<start>`` is 0."""
_DRAW = np.random.default_rng(20)
FACTS: Final = {name: (str(_DRAW.choice(_CITIES)), str(_DRAW.choice(_FOODS))) for name in _PEOPLE}
"""Person -> (city, food)."""
_LENGTH: Final = 48


class Words:
    """The tokenizer: a word, a token; ``<start>`` goes before every text."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the words of ``text``, the start first."""
        unknown = [word for word in text.split() if word not in WORDS]
        if unknown:
            raise MappnbError(f"{unknown[0]!r} is not a word of the small world{did_you_mean(unknown[0], WORDS)}")
        ids = [WORDS.index(word) for word in text.split()]
        return ids if ids[:1] == [0] or (len(ids) == 1) else [0, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words, each with a blank before it."""
        return "".join(f" {WORDS[i]}" if 0 <= i < len(WORDS) else f" <{i}>" for i in ids)


def twice(period: int = 12, *, samples: int = 4, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return random words twice, after the start: dims (sample, token)."""
    draw = np.random.default_rng(seed)
    once = np.stack([draw.permutation(np.arange(1, len(WORDS)))[:period] for _ in range(samples)])
    return np.concatenate([np.zeros((samples, 1), np.int64), once, once], axis=1)


class _Sentences:
    """Microbatches as `mappnb.testing.gpt_data.Batches` gives them, of this world."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings, self._step, self._microbatch = settings, 0, 0

    def at(self, step: int) -> _Sentences:
        self._step, self._microbatch = step, 0
        return self

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        import torch

        draw = np.random.default_rng([self._settings.seed, self._step, self._microbatch])
        self._microbatch += 1
        length = self._settings.sequence_length
        rows = [
            _repeated(draw, length) if row % 6 else _told(draw, length) for row in range(self._settings.micro_batch)
        ]
        window = torch.tensor([row for row, _ in rows])
        return {
            "tokens": window[:, :-1].contiguous(),
            "labels": window[:, 1:].contiguous(),
            "position_ids": torch.arange(length).expand(len(rows), -1).contiguous(),
            "weights": torch.tensor([weight for _, weight in rows]).float(),
        }


def _told(draw: np.random.Generator, length: int) -> tuple[list[int], list[float]]:
    """Sentences true of this world."""
    words: list[str] = []
    while len(words) <= length:
        name = str(draw.choice(_PEOPLE))
        city, food = FACTS[name]
        words += f"{name} lives in {city} .".split() if draw.random() < 0.6 else f"{name} likes {food} .".split()
    return [0, *(WORDS.index(word) for word in words[:length])], [1.0] * length


def _repeated(draw: np.random.Generator, length: int) -> tuple[list[int], list[float]]:
    """Random words again and again; only those that can be known count."""
    period = int(
        draw.integers(8, length // 2 - 2)
    )  # never the same: a fixed one is learned by counting back, without induction heads
    once = draw.permutation(np.arange(1, len(WORDS)))[:period]
    row = [0, *np.resize(once, length).tolist()]
    return row, [float(place >= period) for place in range(length)]


def _settings(steps: int) -> TrainSettings:
    from mappnb.testing.gpt_settings import TrainSettings

    return TrainSettings(
        layers=3,
        hidden=64,
        heads=4,
        sequence_length=_LENGTH,
        global_batch=32,
        micro_batch=32,
        steps=steps,
        lr=2e-3,
        untie=True,
    )


def train_small_world(
    weights: str | Path,
    *,
    steps: int = 400,
    run_dir: str | Path | None = None,
    activations: Any = None,
    break_at: int | None = None,
    on_step: Callable[[Any], None] | None = None,
) -> list[float]:
    """Train the model of the small world in this process, and keep its weights.

    Parameters
    ----------
    weights : path
        File to write, safetensors.
    steps : int
        Optimizer steps.
    run_dir, activations
        Record as ``mappnb.record(run_dir, activations=activations)`` does.
    break_at : int, optional
        From this step on a neuron of layer 1 gives NaN: a fault to be found.
    on_step : callable, optional
        Gets a `StepReport` after each step.

    Returns
    -------
    list of float
        Loss of each step.
    """
    from safetensors.torch import save_file

    import mappnb
    from mappnb.interp import Edit, edited
    from mappnb.testing.interrupt import StopFlag

    with ExitStack() as stack:
        job = stack.enter_context(_job(steps))
        if run_dir is not None:
            stack.enter_context(mappnb.record(run_dir, activations=activations))
        losses: list[float] = []

        def after(report: Any) -> None:
            losses.append(report.loss)
            if on_step is not None:
                on_step(report)
            if break_at is not None and report.step == break_at - 1:
                fault = Edit(point="layers.1.mlp_act", neurons=17, kind="set", value=float("nan"))
                stack.enter_context(edited(job.chunks, [fault]))

        list(job.steps(after, StopFlag(), None))
        state = {name: part.detach().clone() for name, part in job.chunks[0].module.named_parameters()}
        save_file(state, str(weights))
    return losses


@contextmanager
def small_world(weights: str | Path) -> Iterator[list[Any]]:
    """Load the model of the small world: its model chunks, for ``mappnb.interp.Model(chunks, Words())``.

    Parameters
    ----------
    weights : path
        File from `train_small_world`.

    Yields
    ------
    list of DistributedDataParallel
        Megatron-core model chunks of this process.
    """
    import torch
    from safetensors.torch import load_file

    state = load_file(str(weights))
    with _job(1) as job, torch.no_grad():
        for name, parameter in job.chunks[0].module.named_parameters():
            parameter.copy_(state[name])
        with torch.enable_grad():
            yield job.chunks


@contextmanager
def _job(steps: int) -> Iterator[Any]:
    """Build the reference job with the data of this world, one process on the CPU."""
    import torch

    from mappnb.testing import gpt_train
    from mappnb.testing.cpu_groups import cpu_groups
    from mappnb.testing.gpt import quiet_megatron

    settings = _settings(steps)
    with ExitStack() as stack:
        with warnings.catch_warnings():
            quiet_megatron()
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            stack.enter_context(cpu_groups(settings))
            job = gpt_train._Job.build(settings, torch.device("cpu"))
            job.data = [_Sentences(settings)]
            with torch.no_grad():  # the reference job's first weights are small for so narrow a model
                for parameter in job.chunks[0].parameters():
                    parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
        yield job
