"""One training step of the reference GPT on one rank, with what its taps show; the ranks' parts put together again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["assemble", "captured", "gpt"]


@contextmanager
def gpt(settings: Any) -> Iterator[Any]:
    """Give the reference job of `mappnb.testing.gpt_train` on this rank."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # megatron-core warns of its own old names and of packages that this job does without
        from mappnb.testing import gpt_train
        from mappnb.testing.cpu_groups import cpu_groups

        with cpu_groups(settings):
            yield gpt_train._Job.build(settings, torch.device("cpu"))


def captured(text: str, points: list[str]) -> dict[str, Any]:
    """Train one step; return by full name the local arrays of each microbatch with their shard, and what is missing."""
    import torch

    from mappnb.capture.activations.microbatch import zigzag
    from mappnb.capture.activations.taps import attached, find_taps, weights_of
    from mappnb.testing.gpt_settings import TrainSettings

    settings = TrainSettings.from_json(text)
    found: dict[str, Any] = {}
    missing: list[str] = []

    def keep(tap: Any, tensor: Any) -> None:
        item = found.setdefault(tap.name, {"shard": tap.shard, "arrays": []})
        item["arrays"].append(tensor.detach().numpy().copy())

    with gpt(settings) as job:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        weights = {n: {"shard": s, "arrays": [t.numpy().copy()]} for n, (t, s, _) in weights_of(job.chunks).items()}
        with attached(find_taps(job.chunks, points=points, missing=missing), keep):
            losses, _ = job._train_step(0, get_forward_backward_func())
        cp_rank, cp_size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        index = zigzag(settings.sequence_length, cp_rank, cp_size)
        torch.distributed.barrier()
    return {
        "found": {**found, **weights},
        "missing": missing,
        "token_index": index,
        "losses": [float(x) for x in losses],
    }


def assemble(ranks: list[dict[str, Any]], sizes: dict[str, int]) -> dict[str, list[np.ndarray]]:
    """Whole arrays of each microbatch from the parts of all ranks, by their shards; every element must come from somewhere."""
    whole: dict[str, list[np.ndarray]] = {}
    filled: dict[str, list[np.ndarray]] = {}
    for rank in ranks:
        for name, item in rank["found"].items():
            shard, arrays = item["shard"], item["arrays"]
            assert arrays[0].shape[-len(shard.sizes) :] == shard.sizes
            if not shard.writes:
                continue
            shape, place = _place(shard, arrays[0], rank["token_index"], sizes)
            out = whole.setdefault(name, [np.full(shape, np.nan, np.float32) for _ in arrays])
            count = filled.setdefault(name, [np.zeros(shape, int) for _ in arrays])
            for number, array in enumerate(arrays):
                out[number][place] = array
                count[number][place] += 1
    for name, counts in filled.items():
        for count in counts:
            assert (count == 1).all(), f"{name}: written {count.min()} to {count.max()} times"
    return whole


def _place(
    shard: Any, array: np.ndarray, token_index: np.ndarray, sizes: dict[str, int]
) -> tuple[tuple[int, ...], Any]:
    shape, place = [], []
    for dim, length in zip(shard.dims, array.shape, strict=True):
        if dim == "token":
            slots = token_index[shard.tokens(len(token_index))]
            assert len(slots) == length
            shape.append(sizes["token"])
            place.append(slots)
        elif dim == "sample":
            shape.append(length)
            place.append(np.arange(length))
        else:
            part = shard.part(dim)
            assert part.stop - part.start == length
            shape.append(part.total)
            place.append(np.arange(part.start, part.stop))
    return tuple(shape), np.ix_(*place)
