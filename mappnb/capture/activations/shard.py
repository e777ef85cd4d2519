"""Which part of a whole tensor a rank holds: of its tokens, and of its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Shard", "Split"]


@dataclass(frozen=True, slots=True)
class Split:
    """Part of one feature dim.

    Attributes
    ----------
    rank, size : int
        Place in the group over which the dim is split, and the ranks in it.
    start, stop : int
        This rank holds ``start`` to ``stop - 1``.
    total : int
        Length of the whole dim.
    """

    rank: int
    size: int
    start: int
    stop: int
    total: int

    @classmethod
    def even(cls, rank: int, size: int, total: int) -> Split:
        """Return the part of ``rank`` where all ranks hold equally much."""
        length = total // size
        return cls(rank, size, rank * length, (rank + 1) * length, total)


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank's local tensor at a point is part of. Plain values: ``to_dict`` is JSON.

    Attributes
    ----------
    dims : tuple of str
        Dims of the local canonical tensor: sample, token, features. Weights have features only.
    sizes : tuple of int
        Local lengths of the feature dims, in their order.
    token : str
        ``"whole"``; ``"sp"``, ``"cp"`` or ``"cp+sp"``: what its tokens are split over.
    token_rank, token_size : int
        Sequence parallelism: this is part ``token_rank`` of ``token_size`` equal consecutive parts of the tokens that the rank
        has elsewhere (with context parallelism, of its zigzag share); 0 of 1 without.
    split : dict
        Feature dim -> its part; dims that are whole are not in it.
    replicated : bool
        True if other tensor-parallel ranks hold the same.
    writes : bool
        True for the one among them that is to write it.
    """

    dims: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    token: str = "whole"
    token_rank: int = 0
    token_size: int = 1
    split: Mapping[str, Split] = field(default_factory=dict)
    replicated: bool = False
    writes: bool = True

    @property
    def features(self) -> tuple[str, ...]:
        """Feature dims."""
        return tuple(d for d in self.dims if d not in ("sample", "token"))

    def part(self, dim: str) -> Split:
        """Return this rank's part of a feature dim: all of it, where it is not split."""
        found = self.split.get(dim)
        if found is None:
            size = self.sizes[self.features.index(dim)]
            return Split(0, 1, 0, size, size)
        return found

    def tokens(self, num_tokens: int) -> slice:
        """Return which of the rank's ``num_tokens`` tokens the point has here."""
        length = num_tokens // self.token_size
        return slice(self.token_rank * length, (self.token_rank + 1) * length)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "dims": list(self.dims),
            "sizes": list(self.sizes),
            "token": self.token,
            "token_rank": self.token_rank,
            "token_size": self.token_size,
            "split": {
                dim: {"rank": s.rank, "size": s.size, "start": s.start, "stop": s.stop, "total": s.total}
                for dim, s in self.split.items()
            },
            "replicated": self.replicated,
            "writes": self.writes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Shard:
        """Return the shard that :meth:`to_dict` wrote."""
        known = {
            name: values[name]
            for name in ("token", "token_rank", "token_size", "replicated", "writes")
            if name in values
        }
        split = {dim: Split(**part) for dim, part in dict(values.get("split", {})).items()}
        return cls(tuple(values["dims"]), tuple(values.get("sizes", ())), split=split, **known)
