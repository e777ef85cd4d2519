"""How a tensor that passes a module becomes the point's canonical local tensor, dims (sample, token, features...), and back.

Views where torch can; ``back`` gives fresh memory, since Megatron-core's pipeline refuses outputs that are views.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

__all__ = [
    "FORMS",
    "BatchFirst",
    "ColumnPart",
    "Experts",
    "Form",
    "FusedHeads",
    "GroupedHeads",
    "SequenceFirst",
    "VocabPart",
]


class Form(Protocol):
    """One way in which a tensor is laid out in a model."""

    def hint(self, args: tuple[Any, ...]) -> Any:
        """Return what ``view`` needs to know of the call besides the tensor."""
        ...

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return the canonical tensor."""
        ...

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return what stands in the place of ``raw`` once its canonical tensor is ``value``."""
        ...

    def of_bias(self, bias: Any) -> Any:
        """Return the part of a bias that belongs to the canonical tensor."""
        ...


class _Plain:
    """What most forms have in common."""

    def hint(self, args: tuple[Any, ...]) -> Any:
        return None

    def of_bias(self, bias: Any) -> Any:
        return bias


@dataclass(frozen=True, slots=True)
class SequenceFirst(_Plain):
    """Megatron-core's (token, sample, features); ``head_dim`` above 0 parts flat heads; packed sequences lack the sample dim.

    ``flat``: heads are always flat, and the sample dim is there. A rank with one head has (token, sample, head_dim) too, which without
    this reads as (token, head, head_dim) of a packed sequence.
    """

    head_dim: int = 0
    flat: bool = False

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return dims (sample, token, features...)."""
        if self.flat:
            return raw.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        if self.head_dim and raw.shape[-1] != self.head_dim:
            raw = raw.unflatten(-1, (-1, self.head_dim))
        if self.head_dim and raw.dim() == 3:
            return raw.unsqueeze(0)
        return raw.transpose(0, 1)

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return dims and shape of ``raw``."""
        return _shaped(raw, value.transpose(0, 1))


@dataclass(frozen=True, slots=True)
class BatchFirst(_Plain):
    """(sample, token, features), as Hugging Face's models have it; ``heads_first``: (sample, head, token, head_dim)."""

    head_dim: int = 0
    heads_first: bool = False

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return dims (sample, token, features...)."""
        if self.heads_first:
            return raw.transpose(1, 2)
        if self.head_dim and raw.dim() == 3:
            return raw.unflatten(-1, (-1, self.head_dim))
        return raw

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return dims and shape of ``raw``."""
        if self.heads_first:
            value = value.transpose(1, 2)
        return _shaped(raw, value)


@dataclass(frozen=True, slots=True)
class ColumnPart(_Plain):
    """One of several equal parts of the last dim: the gate, or the linear part, of a gated MLP's first layer."""

    index: int
    parts: int
    inner: Form

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return the part, in canonical order."""
        return self.inner.view(raw.chunk(self.parts, -1)[self.index], hint)

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return all parts, this one replaced."""
        import torch

        parts = list(raw.chunk(self.parts, -1))
        parts[self.index] = self.inner.back(parts[self.index], value, hint)
        return torch.cat(parts, -1)

    def of_bias(self, bias: Any) -> Any:
        """Return the part of the bias."""
        return bias.chunk(self.parts, -1)[self.index]


@dataclass(frozen=True, slots=True)
class GroupedHeads(_Plain):
    """Queries, keys or values in Megatron-core's fused layout: for each key-value group its queries, its key, its value.

    Notes
    -----
    Mirrors ``SelfAttention.get_query_key_value_tensors``, dims (token, sample, group * (queries + 2) * head_dim); with an output gate
    each group has as many gates after its queries.
    """

    part: str
    groups: int
    queries: int
    head_dim: int
    gated: bool = False

    def _bounds(self) -> tuple[int, int]:
        first = self.queries * (2 if self.gated else 1)
        return {"q": (0, self.queries), "k": (first, first + 1), "v": (first + 1, first + 2)}[self.part]

    def _grouped(self, raw: Any) -> Any:
        return raw.unflatten(-1, (self.groups, -1, self.head_dim))

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return dims (sample, token, head, head_dim)."""
        start, stop = self._bounds()
        return self._grouped(raw)[..., start:stop, :].flatten(2, 3).transpose(0, 1)

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return the fused tensor with this part replaced."""
        start, stop = self._bounds()
        fused = self._grouped(raw).clone(memory_format=_contiguous())
        fused[..., start:stop, :] = value.transpose(0, 1).unflatten(2, (self.groups, stop - start))
        return fused.flatten(-3)


@dataclass(frozen=True, slots=True)
class FusedHeads(_Plain):
    """Heads number ``start`` to ``stop - 1`` of a fused tensor, dims (sample, token, heads * head_dim): GPT-2's [q | k | v]."""

    start: int
    stop: int
    head_dim: int

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return dims (sample, token, head, head_dim)."""
        return raw.unflatten(-1, (-1, self.head_dim))[..., self.start : self.stop, :]

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return the fused tensor with these heads replaced."""
        fused = raw.unflatten(-1, (-1, self.head_dim)).clone(memory_format=_contiguous())
        fused[..., self.start : self.stop, :] = value
        return fused.flatten(-2)


@dataclass(frozen=True, slots=True)
class Experts(_Plain):
    """A router's probabilities, dims (token * sample, expert), or with both dims apart."""

    batch_first: bool = False

    def hint(self, args: tuple[Any, ...]) -> Any:
        """Return the first two lengths of the router's input."""
        return args[0].shape[:2] if args and args[0].dim() > 2 else None

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return dims (sample, token, expert)."""
        if raw.dim() == 2 and hint is not None:
            raw = raw.unflatten(0, tuple(hint))
        return raw if self.batch_first else raw.transpose(0, 1)

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return dims and shape of ``raw``."""
        if not self.batch_first:
            value = value.transpose(0, 1)
        return _shaped(raw, value)


@dataclass(frozen=True, slots=True)
class VocabPart(_Plain):
    """A rank's part of the logits, dims (token, sample, vocab): also where the program has the parts of all ranks gathered."""

    start: int
    stop: int

    def view(self, raw: Any, hint: Any = None) -> Any:
        """Return dims (sample, token, vocab)."""
        return self._own(raw).transpose(0, 1)

    def back(self, raw: Any, value: Any, hint: Any = None) -> Any:
        """Return the logits with this rank's part replaced."""
        logits = raw.clone(memory_format=_contiguous())
        self._own(logits).copy_(value.transpose(0, 1))
        return logits

    def _own(self, raw: Any) -> Any:
        return raw[..., self.start : self.stop] if raw.shape[-1] > self.stop - self.start else raw


def _shaped(raw: Any, value: Any) -> Any:
    """Return a value in the shape of ``raw``, in memory of its own."""
    return value.reshape(raw.shape).clone(memory_format=_contiguous())


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


FORMS: Final = {"sequence_first": SequenceFirst(), "batch_first": BatchFirst()}
"""The two plain forms."""
