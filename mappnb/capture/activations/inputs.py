"""What a model's call tells of a microbatch: token ids, positions, padding, and which slots this rank has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mappnb.capture.activations.microbatch import Microbatch, zigzag

__all__ = ["IDS", "CallReader", "padding_of"]

IDS = ("input_ids", "tokens", "ids", "idx", "input", "x")
"""Names that models give to token ids."""


class CallReader:
    """Reads the arguments of a model's forward.

    Parameters
    ----------
    core
        The model, unwrapped.
    coords, layout : mapping
        This rank's place, and the sizes of the job.
    """

    def __init__(self, core: Any, coords: Mapping[str, int], layout: Mapping[str, Any]) -> None:
        self._core = core
        self._names = [p.name for p in inspect.signature(core.forward).parameters.values()]
        self._dp_rank = int(coords.get("dp", 0))
        self._cp_rank, self._cp_size = int(coords.get("cp", 0)), int(layout.get("cp", 1))
        config = getattr(core, "config", None)
        split = bool(getattr(config, "sequence_parallel", False))
        self._sp_size = int(layout.get("tp", 1)) if split else 1

    def read(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        step: int,
        chunk: int,
        microbatch: int,
    ) -> Microbatch | None:
        """Return the microbatch of one call.

        Parameters
        ----------
        args, kwargs
            Of the call.
        step, chunk, microbatch : int
            Which one.
        """
        found = {**dict(zip(self._names, args, strict=False)), **kwargs}
        ids = next((found[n] for n in IDS if _is_ids(found.get(n))), None)
        positions = found.get("position_ids")
        size = _shape(ids) or _shape(positions) or self._input_shape() or self._features_shape(found)
        if size is None:
            return None
        batch, local = size
        num_tokens = local * self._cp_size
        index = zigzag(num_tokens, self._cp_rank, self._cp_size)
        return Microbatch(
            step=step,
            chunk=chunk,
            microbatch=microbatch,
            dp_rank=self._dp_rank,
            batch=batch,
            token_index=index,
            num_tokens=num_tokens,
            token_ids=None if ids is None else ids.detach(),
            positions=positions.detach() if positions is not None and _shape(positions) == size else None,
            mask=padding_of(found.get("attention_mask"), batch, index, num_tokens),
        )

    def _input_shape(self) -> tuple[int, int] | None:
        """Return samples and tokens of what a pipeline stage gets from the one before it."""
        given: Any = getattr(getattr(self._core, "decoder", None), "input_tensor", None)
        given = given[0] if isinstance(given, (list, tuple)) and given else given
        if given is None or not hasattr(given, "dim") or given.dim() != 3:
            return None
        return int(given.shape[1]), int(given.shape[0]) * self._sp_size

    def _features_shape(self, found: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return samples and tokens of the first argument of a torch model that is numbers, dims (sample, token, feature)."""
        if hasattr(self._core, "decoder"):
            return None
        numbers = (v for v in found.values() if hasattr(v, "dim") and v.dim() == 3 and v.is_floating_point())
        return next(((int(v.shape[0]), int(v.shape[1])) for v in numbers), None)


def padding_of(mask: Any, batch: int, token_index: Any, num_tokens: int) -> Any:
    """Return which tokens of this rank are real, dims (sample, token), from the attention mask of a call; None if it does not tell.

    Notes
    -----
    Megatron-core's mask, dims (sample or 1, 1, query, key), is True where a query must not look; a token that must not look at
    itself is padding. With context parallelism it has the rank's queries only, or all. Hugging Face's, dims (sample, token), is 1 for
    real tokens.
    """
    import torch

    if mask is None or not hasattr(mask, "dim"):
        return None
    slots = torch.as_tensor(token_index, device=mask.device)
    if mask.dim() == 2 and mask.shape[0] == batch and mask.shape[1] == len(slots):
        return mask.detach().bool()
    if mask.dim() != 4 or mask.dtype != torch.bool or mask.shape[3] != num_tokens:
        return None
    rows = slots if mask.shape[2] == num_tokens else torch.arange(len(slots), device=mask.device)
    if len(rows) > mask.shape[2]:
        return None
    return ~mask.detach()[:, 0, rows, slots].expand(batch, -1)


def _is_ids(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "dim") and value.dim() == 2 and not value.is_floating_point()


def _shape(value: Any) -> tuple[int, int] | None:
    if not hasattr(value, "dim") or value.dim() != 2:
        return None
    return int(value.shape[0]), int(value.shape[1])
