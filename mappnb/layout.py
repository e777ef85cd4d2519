"""Which rank sits where: global rank <-> (dp, pp, cp, tp, ep) coordinates, stages, and process groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property

from mappnb.errors import LayoutError, did_you_mean

__all__ = ["AXES", "Layout"]

AXES: tuple[str, ...] = ("tp", "cp", "ep", "dp", "pp")
"""The axes of parallelism, in Megatron-core's default order (the first varies fastest)."""


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a job.

    Attributes
    ----------
    tp, cp, ep, dp, pp : int
        Sizes of the tensor, context, expert, data and pipeline groups. Expert ranks are a second reading of the
        ``tp × cp × dp`` ranks of a stage, so ``ep`` does not enter ``world_size``.
    etp : int
        Size of the tensor groups inside experts.
    num_chunks : int
        Model chunks per pipeline rank (virtual pipeline size).
    order : str
        Order of the axes, the fastest first, as ``megatron.core.parallel_state.initialize_model_parallel(order=)``.
    stage_order : str
        ``"interleaved"``: stage ``chunk * pp + pp_rank``; ``"v"``: odd chunks run backwards through the ranks.

    Notes
    -----
    Mirrors ``megatron.core.parallel_state.RankGenerator`` (megatron-core 0.16).
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    etp: int = 1
    num_chunks: int = 1
    order: str = "tp-cp-ep-dp-pp"
    stage_order: str = "interleaved"

    def __post_init__(self) -> None:
        for axis in (*AXES, "etp", "num_chunks"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise LayoutError(f"layout: {axis} is {size!r}; expected an integer of at least 1")
        axes = self.order.split("-")
        if sorted(axes) != sorted(AXES):
            raise LayoutError(f"layout: order {self.order!r}; expected each of {', '.join(AXES)} once, joined by '-'")
        if self.stage_order not in ("interleaved", "v"):
            raise LayoutError(f"layout: stage_order {self.stage_order!r}; expected 'interleaved' or 'v'")
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise LayoutError(
                f"layout: ep {self.ep} × etp {self.etp} does not divide the {self.tp * self.cp * self.dp} ranks of a stage "
                f"(tp × cp × dp); choose sizes that do"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages: pipeline ranks × chunks."""
        return self.pp * self.num_chunks

    @property
    def edp(self) -> int:
        """Size of the data-parallel groups of the experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @cached_property
    def _dense(self) -> dict[str, int]:
        return {a: getattr(self, a) for a in self.order.split("-") if a != "ep"}

    @cached_property
    def _expert(self) -> dict[str, int]:
        sizes = {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return {a: sizes[a] for a in self.order.split("-")}

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank: keys tp, cp, ep, dp, pp.

        Raises
        ------
        LayoutError
            If ``rank`` is outside the layout.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank}: the layout {self} has ranks 0 to {self.world_size - 1}")
        dense, expert = _unravel(rank, self._dense), _unravel(rank, self._expert)
        return {a: (expert if a == "ep" else dense)[a] for a in AXES}

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the global rank at the given coordinates."""
        where = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        result, stride = 0, 1
        for axis, size in self._dense.items():
            if not 0 <= where[axis] < size:
                raise LayoutError(f"{axis} rank {where[axis]}: the layout {self} has {axis} ranks 0 to {size - 1}")
            result += where[axis] * stride
            stride *= size
        return result

    def groups(self, axes: str) -> list[tuple[int, ...]]:
        """Return the process groups along ``axes`` (such as ``"tp"`` or ``"dp-cp"``), each a tuple of global ranks."""
        wanted = axes.split("-")
        for axis in wanted:
            if axis not in AXES:
                raise LayoutError(f"axis {axis!r}: known are {', '.join(AXES)}{did_you_mean(axis, AXES)}")
        sizes = self._expert if "ep" in wanted else self._dense
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            where = _unravel(rank, sizes)
            groups.setdefault(tuple(where[a] for a in sizes if a not in wanted), []).append(rank)
        return [tuple(g) for g in groups.values()]

    def stage(self, pp_rank: int, chunk: int = 0) -> int:
        """Return the stage (position in model order) of a chunk of a pipeline rank."""
        if self.stage_order == "v" and chunk % 2:
            return chunk * self.pp + (self.pp - 1 - pp_rank)
        return chunk * self.pp + pp_rank

    def place(self, stage: int) -> tuple[int, int]:
        """Return (pp_rank, chunk) of a stage: the inverse of :meth:`stage`."""
        if not 0 <= stage < self.num_stages:
            raise LayoutError(f"stage {stage}: the layout {self} has stages 0 to {self.num_stages - 1}")
        chunk, position = divmod(stage, self.pp)
        return (self.pp - 1 - position if self.stage_order == "v" and chunk % 2 else position), chunk

    def label(self, rank: int) -> str:
        """Return the coordinates in words, axes of size 1 left out: ``"pp1 dp0"``."""
        where = self.coords(rank)
        named = [f"{a}{where[a]}" for a in ("pp", "dp", "cp", "ep", "tp") if getattr(self, a) > 1]
        return " ".join(named) or "rank 0"

    def to_dict(self) -> dict[str, int | str]:
        """Return the fields as plain values, for JSON and dataset attributes."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Layout:
        """Return the layout that :meth:`to_dict` wrote; unknown keys are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [f"{a}{getattr(self, a)}" for a in ("pp", "dp", "cp", "ep", "tp") if getattr(self, a) > 1]
        chunks = [f"vpp{self.num_chunks}"] if self.num_chunks > 1 else []
        return " × ".join(parts + chunks) or "single rank"


def _unravel(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    where = {}
    for axis, size in sizes.items():
        rank, where[axis] = divmod(rank, size)
    return where
