"""What the training thread hands to the writer: pieces of tensors, and which tokens they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Pending", "Piece", "StatsOfStep", "TokensOf", "WeightPiece"]

_Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Pending:
    """A copy of a tensor that may still be on its way from a GPU.

    Attributes
    ----------
    tensor : Tensor
        In main memory.
    event
        After it the copy is there; None: it is.
    reusable : bool
        True if its memory goes back to the pool of copies once written.
    """

    tensor: Any
    event: Any = None
    reusable: bool = True

    def array(self) -> _Array:
        """Wait for the copy, and return it as an array; bfloat16 as its bits."""
        from mappnb.capture.activations.encode import as_numpy

        if self.event is not None:
            self.event.synchronize()
            self.event = None
        return as_numpy(self.tensor)


@dataclass(slots=True, eq=False)
class TokensOf:
    """The tokens of one microbatch that one stream takes on this rank.

    Attributes
    ----------
    key : tuple of int
        step, dp_rank, microbatch.
    batch : int
        Samples.
    slots, slots_sp : int array, dims (token,)
        Slots in the whole sequence: of all points, and of those that sequence parallelism splits (None: none are seen yet).
    ids, positions, mask : Pending or None, dims (sample, token)
        Of the tokens of ``slots``.
    prompts : sequence of str or None
        Texts of the samples.
    of
        The microbatch itself, so that no other gets its id meanwhile.
    """

    key: tuple[int, int, int]
    batch: int
    slots: _Array
    slots_sp: _Array | None = None
    ids: Pending | None = None
    positions: Pending | None = None
    mask: Pending | None = None
    prompts: Any = None
    of: Any = None


@dataclass(slots=True)
class Piece:
    """One captured tensor of a microbatch, packed or about to be.

    Attributes
    ----------
    stream, name : str
        Where it is stored; ``name`` is the point, with ``_grad`` for a gradient, or a statistic of heads.
    layer : int
        Global layer, -1 for none.
    tokens : TokensOf
        Which rows and tokens it is of.
    parts : dict of Pending
        By name of part; with ``pack`` the tensor itself under ``""``.
    dims : tuple of str
        Dims after (sample, [layer]); with ``pack`` those of the packed main part.
    attrs : dict
        Of the stored array.
    pack : dict or None
        Options of `mappnb.activation_codecs.encode` where the writer packs.
    """

    stream: str
    name: str
    layer: int
    tokens: TokensOf
    parts: dict[str, Pending]
    dims: tuple[str, ...]
    attrs: Mapping[str, Any]
    pack: Mapping[str, Any] | None = None


@dataclass(slots=True)
class StatsOfStep:
    """Statistics of one step and stream: for each (name, layer) those of each microbatch, arrays or a Pending row."""

    stream: str
    step: int
    rows: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    shards: dict[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class WeightPiece:
    """The rank's part of a parameter at one step."""

    step: int
    name: str
    layer: int
    values: Pending
    dims: tuple[str, ...]
    attrs: Mapping[str, Any]
