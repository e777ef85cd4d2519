"""What is known of the microbatch whose activations pass: who it is, and its tokens on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Microbatch", "zigzag"]


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One microbatch on this rank.

    Attributes
    ----------
    step, chunk, microbatch, dp_rank : int
        Which one; a sample is (step, dp_rank, microbatch, index).
    batch : int
        Samples.
    token_index : array of int, dims (token,)
        Slot in the whole sequence of each token that this rank has; with sequence parallelism some points have a part of them only:
        ``shard.tokens(len(token_index))``.
    num_tokens : int
        Slots of the whole sequence.
    token_ids, positions, mask : tensor or None, dims (sample, token)
        Of this rank's tokens; None where the rank does not know them. ``mask`` is True for real tokens, False for padding.
    prompts : sequence of str, optional
        Texts of the samples, where the program tells them.
    """

    step: int
    chunk: int
    microbatch: int
    dp_rank: int
    batch: int
    token_index: NDArray[np.int64]
    num_tokens: int
    token_ids: Any = None
    positions: Any = None
    mask: Any = None
    prompts: Sequence[str] | None = field(default=None, repr=False)


def zigzag(num_tokens: int, cp_rank: int, cp_size: int) -> NDArray[np.int64]:
    """Return the slots of a context-parallel rank, in the order in which it has them.

    Notes
    -----
    Megatron-core cuts a sequence in ``2 * cp_size`` pieces; rank ``r`` has pieces ``r`` and ``2 * cp_size - 1 - r``
    (``megatron.core.utils.get_batch_on_this_cp_rank``).
    """
    slots = np.arange(num_tokens, dtype=np.int64)
    if cp_size == 1:
        return slots
    pieces = slots.reshape(2 * cp_size, -1)
    return np.concatenate([pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]])
