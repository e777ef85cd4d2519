"""Data of the reference job: bytes of Python's own help texts, the same sample in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state

if TYPE_CHECKING:
    from mappnb.testing.gpt_settings import TrainSettings

__all__ = ["Batches", "help_text"]


def help_text() -> bytes:
    """Return the texts behind Python's ``help()``, about half a megabyte of English and code, no download needed."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


class Batches:
    """Iterator over microbatches: sample ``k`` of step ``i`` depends on the seed, ``i`` and ``k`` only.

    Parameters
    ----------
    settings : TrainSettings
        The job.
    device : torch.device
        Where the batches go.

    Notes
    -----
    Data-parallel rank ``d`` takes its share of each step's samples, a context-parallel rank its share of the
    sequence; so every layout sees the same samples in a step.
    """

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._text = torch.frombuffer(bytearray(help_text()), dtype=torch.uint8)
        self._dp_size = parallel_state.get_data_parallel_world_size()
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._positions = torch.arange(settings.sequence_length).expand(settings.micro_batch, -1)
        self._step, self._microbatch = 0, 0

    def at(self, step: int) -> Batches:
        """Rewind to the first microbatch of ``step``."""
        self._step, self._microbatch = step, 0
        return self

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Return itself."""
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next microbatch of this rank.

        Returns
        -------
        dict of Tensor, dims (micro_batch, sequence / cp_size)
            ``tokens``, ``labels`` (the next byte) and ``position_ids``; with left padding also ``weights`` (0 where padded, else 1)
            and ``padding``, dims (micro_batch,): the number of padding tokens.
        """
        size = self._settings.micro_batch
        first = (self._microbatch * self._dp_size + self._dp_rank) * size
        self._microbatch += 1
        window = torch.stack([self._sample(first + row) for row in range(size)])
        batch = {"tokens": window[:, :-1], "labels": window[:, 1:], "position_ids": self._positions}
        if self._settings.left_padding:
            batch = self._padded(batch, first)
        if self._settings.cp > 1:
            from mappnb.testing.context_parallel import local_share

            padding = batch.pop("padding", None)
            batch = {name: local_share(value, 1) for name, value in batch.items()}
            batch |= {} if padding is None else {"padding": padding}
        return {name: value.contiguous().to(self._device) for name, value in batch.items()}

    def _padded(self, batch: dict[str, torch.Tensor], first: int) -> dict[str, torch.Tensor]:
        """Put padding in place of the first tokens of each sample; how many depends on the sample's number only."""
        most = self._settings.left_padding
        padding = torch.tensor([7 * (first + row) % (most + 1) for row in range(self._settings.micro_batch)])
        real = self._positions >= padding[:, None]
        return {
            "tokens": batch["tokens"] * real,
            "labels": batch["labels"],
            "position_ids": (self._positions - padding[:, None]).clamp(min=0),
            "weights": real.float(),
            "padding": padding,
        }

    def _sample(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the current step: ``sequence_length + 1`` bytes of text."""
        settings = self._settings
        generator = torch.Generator().manual_seed(settings.seed * 7919 + self._step * settings.global_batch + index)
        last = len(self._text) - settings.sequence_length - 1
        start = int(torch.randint(0, last, (1,), generator=generator))
        return self._text[start : start + settings.sequence_length + 1].long()
