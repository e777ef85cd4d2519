"""Statistics of attention heads inside the job: from this rank's queries and keys, in tiles of queries. The twin of interp.heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mappnb.capture.activations.attention_rules import AttentionRules, attention_rules
from mappnb.errors import CaptureError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DIAGONALS", "STATISTICS", "head_statistics"]

DIAGONALS = 5
"""Offsets query - key from 0 whose mass is told."""

STATISTICS: dict[str, str] = {
    "entropy": "entropy of a row, nats; the share of a sink counts as one more key",
    "bos_mass": "mass on the first token",
    "previous_token": "mass on the token before",
    "duplicate_token": "mass on earlier tokens equal to the query's",
    "induction": "mass on tokens that follow an earlier token equal to the query's",
    **{f"diagonal_{offset}": f"mass on the key {offset} before the query" for offset in range(DIAGONALS)},
}
"""Name -> meaning. Each is an average over those queries of a sample that have such a key; see `mappnb.interp.head_statistics`."""

_TILE_ELEMENTS = 2**22


def head_statistics(
    q: Tensor,
    k: Tensor,
    token_ids: Tensor | None,
    facts: Mapping[str, Any],
    *,
    layer: int = 0,
    head_start: int = 0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    tile: int | None = None,
) -> dict[str, Tensor]:
    """Return the statistics of this rank's heads, without ever holding a whole pattern.

    Parameters
    ----------
    q : Tensor, dims (sample, token, head, head_dim)
        ``q_rot`` of this rank's heads, all tokens.
    k : Tensor, dims (sample, token, kv_head, head_dim)
        ``k_rot`` of this rank's key heads, all tokens.
    token_ids : Tensor, dims (sample, token), or None
        Without them ``duplicate_token`` and ``induction`` are NaN.
    facts : mapping
        Of the model; see `attention_rules`.
    layer : int
        Global number of the layer.
    head_start : int
        Global number of the first head of ``q``.
    mask : Tensor, dims (sample, token), optional
        True for real tokens, False for padding.
    sinks : Tensor, dims (head,), optional
        Learned sinks of this rank's heads as they are now (``core_attention.softmax_offset``), in place of those in ``facts``.
    tile : int, optional
        Queries at a time; by default what keeps a tile below 16 MiB in float32.

    Returns
    -------
    dict of str to Tensor, dims (sample, head)
        For each name of `STATISTICS`; NaN where a sample has no such query.

    Raises
    ------
    CaptureError
        If q and k have other tokens: under context parallelism a rank lacks keys of others, and no collective is added for them.

    Notes
    -----
    Equal to `mappnb.interp.head_statistics` but for the precision: float32, or float64 for such inputs. Untested on GPU.
    """
    if q.shape[1] != k.shape[1] or (token_ids is not None and token_ids.shape[1] != k.shape[1]):
        raise CaptureError(
            f"head statistics of layer {layer}: {q.shape[1]} queries, {k.shape[1]} keys"
            + ("" if token_ids is None else f", {token_ids.shape[1]} token ids")
            + "; expected the same whole sequence in all. Under context parallelism record q_rot and k_rot (mode='full') "
            "and use mappnb.interp.head_statistics when reading"
        )
    if q.shape[2] % k.shape[2]:
        raise CaptureError(
            f"head statistics of layer {layer}: {q.shape[2]} heads do not divide into {k.shape[2]} key heads"
        )
    known = facts if sinks is None else {**facts, "softmax_type": "vanilla", "sinks": None}
    job = _Job.start(q, k, token_ids, attention_rules(known, layer), head_start, mask)
    if sinks is not None:
        job.sinks = sinks.detach().to(job.q.dtype)[:, None, None]
    samples, tokens, heads, _ = q.shape
    step = tile or max(1, _TILE_ELEMENTS // max(1, samples * heads * tokens))
    for first in range(0, tokens, step):
        job.add(first, min(tokens, first + step))
    return job.means()


@dataclass(slots=True)
class _Job:
    """The running sums of one call."""

    q: Tensor
    k: Tensor
    rules: AttentionRules
    slopes: Tensor | None
    sinks: Tensor | None
    real: Tensor
    first: Tensor
    same: Tensor | None
    sums: dict[str, Tensor]
    counts: dict[str, Tensor]

    @classmethod
    def start(
        cls, q: Tensor, k: Tensor, token_ids: Tensor | None, rules: AttentionRules, head_start: int, mask: Tensor | None
    ) -> _Job:
        import torch

        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        samples, tokens, heads, dim = q.shape
        groups = k.shape[2]
        grouped = q.detach().to(dtype).reshape(samples, tokens, groups, heads // groups, dim).permute(0, 2, 3, 1, 4)
        real = (
            torch.ones(samples, tokens, dtype=torch.bool, device=q.device)
            if mask is None
            else mask.to(q.device, torch.bool)
        )
        mine = slice(head_start, head_start + heads)

        def of_heads(values: tuple[float, ...] | None) -> Tensor | None:
            return None if values is None else torch.tensor(values[mine], dtype=dtype, device=q.device)[:, None, None]

        zeros = {name: torch.zeros(samples, heads, dtype=dtype, device=q.device) for name in STATISTICS}
        return cls(
            q=grouped,
            k=k.detach().to(dtype).permute(0, 2, 3, 1),
            rules=rules,
            slopes=of_heads(rules.slopes),
            sinks=of_heads(rules.sinks),
            real=real,
            first=real.to(torch.int64).argmax(1),
            same=None if token_ids is None else token_ids.detach().to(q.device),
            sums=zeros,
            counts={name: torch.zeros(samples, dtype=dtype, device=q.device) for name in STATISTICS},
        )

    def add(self, start: int, stop: int) -> None:
        """Add the queries ``start`` to ``stop``."""
        import torch

        pattern, rest = self.pattern(start, stop)
        queries = torch.arange(start, stop, device=self.real.device)
        row = self.real[:, start:stop]
        entropy = -torch.xlogy(pattern, pattern).sum(-1) - torch.xlogy(rest, rest)
        self.note("entropy", entropy, row)
        after = row & (queries[None] > self.first[:, None])
        at_first = self.first[:, None, None, None].expand(*pattern.shape[:3], 1)
        self.note("bos_mass", pattern.gather(-1, at_first)[..., 0], after)
        for offset in range(DIAGONALS):
            key = (queries - offset).clamp(min=0)
            mass = pattern.gather(-1, key[None, None, :, None].expand(*pattern.shape[:3], 1))[..., 0]
            there = row & (queries >= offset)[None] & self.real[:, key]
            self.note(f"diagonal_{offset}", mass, there)
            if offset == 1:
                self.note("previous_token", mass, there)
        if self.same is not None:
            self.add_repeats(pattern, row, queries)

    def add_repeats(self, pattern: Tensor, row: Tensor, queries: Tensor) -> None:
        """Add the mass on earlier equal tokens, and on the tokens after them."""
        import torch

        assert self.same is not None
        mine = self.same[:, queries]
        keys = torch.arange(self.same.shape[1], device=queries.device)
        usable = self.real & (self.same >= 0)
        equal = (mine[:, :, None] == self.same[:, None, :]) & usable[:, None, :] & row[:, :, None]
        duplicate = equal & (keys[None, None] < queries[None, :, None])
        after = torch.zeros_like(duplicate)
        after[..., 1:] = duplicate[..., :-1]
        after &= self.real[:, None, :]
        for name, target in (("duplicate_token", duplicate), ("induction", after)):
            mass = torch.einsum("bhqk,bqk->bhq", pattern, target.to(pattern.dtype))
            self.note(name, mass, target.any(-1))

    def note(self, name: str, value: Tensor, queries: Tensor) -> None:
        """Add ``value`` (sample, head, query) of those ``queries`` (sample, query)."""
        self.sums[name] += value.masked_fill(~queries[:, None], 0.0).sum(-1)
        self.counts[name] += queries.sum(-1)

    def pattern(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the rows of these queries (sample, head, query, key), and the share of the sink (sample, head, query)."""
        import torch

        samples, groups, each, _, dim = self.q.shape
        tile = self.q[:, :, :, start:stop].reshape(samples, groups, each * (stop - start), dim)
        scores = (tile @ self.k).reshape(samples, groups * each, stop - start, -1) * self.rules.scale
        if self.rules.softcap:
            scores = self.rules.softcap * torch.tanh(scores / self.rules.softcap)
        apart = (
            torch.arange(scores.shape[-1], device=scores.device)[None]
            - torch.arange(start, stop, device=scores.device)[:, None]
        )
        if self.slopes is not None:
            scores = scores - self.slopes * apart.abs()
        seen = self.real[:, None, None, :].expand(samples, 1, stop - start, -1)
        before, behind = self.rules.reach()
        if behind is not None:
            seen = seen & (apart <= behind)
        if before is not None:
            seen = seen & (apart >= -before)
        scores = scores.masked_fill(~seen, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if self.sinks is not None:
            top = torch.maximum(top, self.sinks)
        top = top.masked_fill(top == float("-inf"), 0.0)
        weights = torch.exp(scores - top)
        sink = torch.zeros_like(top) if self.sinks is None else torch.exp(self.sinks - top)
        total = weights.sum(-1, keepdim=True) + sink
        total = total.masked_fill(total == 0, 1.0)
        return weights / total, (sink / total)[..., 0]

    def means(self) -> dict[str, Tensor]:
        """Return sums by counts; NaN where nothing was counted."""
        return {name: self.sums[name] / self.counts[name][:, None] for name in STATISTICS}
