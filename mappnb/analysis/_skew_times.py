"""How long each microbatch was computed on each rank, and which documents it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import issue_only
from mappnb.analysis._intervals import innermost_segments
from mappnb.datasets import layout_of
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.terms import Category, Flag

__all__ = ["BACKWARD", "Documents", "compute_times", "documents_of"]

Array = np.ndarray[Any, Any]

BACKWARD: Final = ("backward", "backward_input", "backward_weight")
"""Phases that are part of a backward."""
METRIC: Final = "document_tokens"


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of the microbatches, one row each.

    Attributes
    ----------
    step, dp_rank, microbatch : int array, dims (document,)
        Where it was.
    tokens : array, dims (document,)
        Its length.
    """

    step: Array
    dp_rank: Array
    microbatch: Array
    tokens: Array

    def sums(self) -> pd.DataFrame:
        """Return ``tokens`` (sum of lengths) and ``squares`` (sum of squared lengths) by (step, dp_rank, microbatch)."""
        table = pd.DataFrame(
            {
                "step": self.step,
                "dp_rank": self.dp_rank,
                "microbatch": self.microbatch,
                "tokens": self.tokens,
                "squares": self.tokens**2,
            }
        )
        return table.groupby(["step", "dp_rank", "microbatch"])[["tokens", "squares"]].sum()


def compute_times(events: xr.Dataset) -> pd.DataFrame:
    """Return the compute time of each microbatch: transfers and waits inside it taken out.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Of whole steps.

    Returns
    -------
    DataFrame
        ``step, rank, dp_rank, stage, phase, microbatch, seconds``; one row each.
    """
    category = events.category.values
    beside = (events.flags.values & int(Flag.ASYNC)) != 0
    inside = np.flatnonzero((category != Category.MARK) & ~beside & ~issue_only(events))
    host = np.where(events.stream.values >= 0, -1, events.thread.values)
    columns = [events[n].values.astype(np.int64) for n in ("incarnation", "step", "rank", "stream")]
    lane = np.unique(np.stack([*columns, host], 1), axis=0, return_inverse=True)[1].ravel()
    start = events.start_ns.values
    span, left, right = innermost_segments(lane[inside], start[inside], (start + events.duration_ns.values)[inside])
    span = inside[span]
    mine = (
        (category[span] == Category.COMPUTE) & (events.microbatch.values[span] >= 0) & (events.stage.values[span] >= 0)
    )
    span, length = span[mine], (right - left)[mine]
    layout = layout_of(events)
    dp = np.array([layout.coords(r)["dp"] for r in range(layout.world_size)])
    rank = events["rank"].values[span]
    stage = events.stage.values[span].astype(np.int64)
    table = pd.DataFrame(
        {
            "step": events["step"].values[span],
            "rank": rank,
            "dp_rank": dp[np.clip(rank, 0, len(dp) - 1)],
            "stage": stage,
            "phase": events.phase.values[span].astype(str),
            "microbatch": events.microbatch.values[span],
            "seconds": length / 1e9,
        }
    )
    keys = [c for c in table if c != "seconds"]
    return table.groupby(keys)["seconds"].sum().reset_index()


def documents_of(run: Run | xr.Dataset, *, steps: Array | None = None) -> Documents:
    """Return the documents that a run recorded.

    Raises
    ------
    MappnbError
        If it recorded none; the message says how to record them.
    """
    if not isinstance(run, Run):
        raise MappnbError(
            "the lengths of documents are in a run's metrics, which a dataset of events does not have; give the Run"
        )
    table = run.metrics
    mine = (
        np.flatnonzero(table.name.values.astype(str) == METRIC)
        if table.sizes.get("sample", 0)
        else np.empty(0, np.int64)
    )
    if not len(mine):
        raise MappnbError(
            f"{run.path}: no metric {METRIC!r}; without recorded lengths use analysis.length_signature(run), or record them in "
            "training: one value per document, with its microbatch"
        )
    layout = run.layout
    dp = np.array([layout.coords(r)["dp"] for r in range(layout.world_size)])
    columns = {n: table[n].values[mine] for n in ("step", "rank", "microbatch", "index", "value")}
    keep = np.ones(len(mine), bool) if steps is None else np.isin(columns["step"], steps)
    where = pd.DataFrame({n: v[keep] for n, v in columns.items()})
    where["dp_rank"] = dp[np.clip(where["rank"], 0, len(dp) - 1)]
    where = where.drop_duplicates(["step", "dp_rank", "microbatch", "index"])  # ranks of one replica may all tell
    return Documents(*(where[n].to_numpy() for n in ("step", "dp_rank", "microbatch", "value")))
