"""Which rows of a StragglerAnalysis trace belong together: peers, groups and numbers of calls."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from mappnb.layout import Layout

__all__ = ["groups_of_rows", "peers_of_rows", "sequence_of_rows", "with_microbatches"]

Array = np.ndarray[Any, Any]

SLACK_S: Final = 50e-6
"""How far a transfer may lie outside the computation it serves, s (the artifact's tolerance)."""

_GROUP_OF: Final = {
    "params-all-gather": "dp",
    "grads-reduce-scatter": "dp",
    "separate-grads-all-reduce": "dp",
    "layernorm-grads-all-reduce": "tp",
    "embedding-grads-all-reduce": "embd",
    "optimizer-clip-main-grad": "world",
}
_SLOT_OF: Final = {
    "params-all-gather": 0,
    "grads-reduce-scatter": 1,
    "separate-grads-all-reduce": 2,
    "layernorm-grads-all-reduce": 0,
    "embedding-grads-all-reduce": 0,
    "optimizer-clip-main-grad": 0,
    "forward-send": 0,
    "forward-recv": 0,
    "backward-send": 1,
    "backward-recv": 1,
}
"""Calls of one group (or pair of ranks) in a step come in these blocks, by number within them."""

_TOWARDS: Final = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""The peer is this many pipeline ranks further."""


def with_microbatches(rows: pd.DataFrame, layout: Layout) -> pd.DataFrame:
    """Give sends and receives the microbatch and chunk of the computation they serve, and tell those without a peer.

    Parameters
    ----------
    rows : DataFrame
        Rows with a ``worker``; times in s.
    layout : Layout
        Layout of the workers.

    Returns
    -------
    DataFrame
        The rows with ``mb_id``, ``mc`` and ``gmc`` filled, ``real`` (has a peer) and ``place`` (number among the real
        transfers of its kind on its worker in its step; -1 for other rows).

    Notes
    -----
    Dependency rule 3 of the artifact: the k-th send leaves the k-th computation of its direction, the k-th receive feeds
    it (the k+1-th, where the first computation of an end stage receives nothing). Stray records, long after the last or
    before the first computation, and sends and receives beyond the ends of the model have no peer.
    """
    out = rows.assign(real=True, place=np.int64(-1))
    arrays = {c: out[c].to_numpy().copy() for c in ("mb_id", "mc", "gmc", "real", "place")}
    base = pd.DataFrame(
        {
            "key": rows["step"] * layout.world_size + rows["worker"],
            "n": rows["seq_id"],
            "start": rows["start_ts"].astype(np.float64),
            "end": rows["start_ts"].astype(np.float64) + rows["duration"].astype(np.float64),
            "at": np.arange(len(rows)),
        }
    )
    kind = rows["optype"].to_numpy()
    for direction in ("forward", "backward"):
        compute = base[kind == f"{direction}-compute"].sort_values(["key", "n"])
        compute = compute.assign(k=compute.groupby("key").cumcount())
        for side in ("send", "recv"):
            transfers = base[kind == f"{direction}-{side}"].sort_values(["key", "n"])
            _serve(arrays, transfers, compute, layout, ahead=_TOWARDS[f"{direction}-{side}"], receives=side == "recv")
    return out.assign(**arrays)


def _serve(
    arrays: dict[str, Array],
    transfers: pd.DataFrame,
    compute: pd.DataFrame,
    layout: Layout,
    *,
    ahead: int,
    receives: bool,
) -> None:
    """Find the computation of each transfer of one kind, and fill ``arrays``."""
    bounds = compute.groupby("key").agg(last=("start", "max"), first=("end", "min"), count=("k", "size"))
    p = transfers.join(bounds, on="key")
    stray = (p["start"] > p["last"] + SLACK_S) if receives else (p["end"] < p["first"] - SLACK_S)
    arrays["real"][p["at"][stray]] = False
    p = p[~stray]
    k = p.groupby("key").cumcount()
    if receives:
        k += (p["count"] - p.groupby("key")["at"].transform("size") == 1).astype(np.int64)
    p = p.assign(k=k).merge(compute[["key", "k", "at"]], on=["key", "k"], how="left", suffixes=("", "_of"))
    found = p["at_of"].notna().to_numpy()
    at, of = p["at"].to_numpy()[found], p["at_of"].to_numpy()[found].astype(np.int64)
    for name in ("mb_id", "mc", "gmc"):
        arrays[name][at] = arrays[name][of]
    other = arrays["gmc"][at] + ahead
    arrays["real"][at] &= (arrays["gmc"][at] < 0) | ((other >= 0) & (other < layout.num_stages))
    p = p[arrays["real"][p["at"]]]
    arrays["place"][p["at"]] = p.groupby("key").cumcount()


def peers_of_rows(rows: pd.DataFrame, layout: Layout) -> Array:
    """Return the rank at the other side of each transfer, -1 where there is none; shape (row,)."""
    shift = rows["optype"].map(_TOWARDS).fillna(0).to_numpy().astype(np.int64)
    peer = (rows["stage"].to_numpy() + shift) % layout.pp * layout.dp + rows["dp_rank"].to_numpy()
    return np.where((shift != 0) & rows["real"].to_numpy(), peer, -1)


def groups_of_rows(rows: pd.DataFrame, layout: Layout) -> tuple[Array, list[tuple[str, tuple[int, ...]]]]:
    """Return the place of each row's group in the list of groups (-1: none), and that list: (name, ranks).

    The tensor-parallel group of a worker is the worker alone: its ranks are folded into one.
    """
    dp, pp = layout.dp, layout.pp
    groups: list[tuple[str, tuple[int, ...]]] = [("dp", tuple(range(s * dp, s * dp + dp))) for s in range(pp)]
    groups += [("embd", tuple(sorted({d, (pp - 1) * dp + d}))) for d in range(dp)]
    groups += [("pp", tuple(s * dp + d for s in range(pp))) for d in range(dp)]
    groups += [("tp", (worker,)) for worker in range(dp * pp)]
    groups.append(("world", tuple(range(dp * pp))))
    kind = rows["optype"].map(_GROUP_OF).to_numpy()
    stage, d = rows["stage"].to_numpy(), rows["dp_rank"].to_numpy()
    number = np.full(len(rows), -1, np.int64)
    number = np.where(kind == "dp", stage, number)
    number = np.where(kind == "embd", pp + d, number)
    number = np.where(rows["optype"].isin(list(_TOWARDS)) & rows["real"], pp + dp + d, number)
    number = np.where(kind == "tp", pp + 2 * dp + stage * dp + d, number)
    return np.where(kind == "world", len(groups) - 1, number), groups


def sequence_of_rows(rows: pd.DataFrame, number: Array) -> Array:
    """Return the number of each call in its group or pair; -1 for what is no call of several workers.

    ``number`` is the place of each row's step among the steps. The numbers come from the identity of a call in the trace, so
    that a row that is missing shifts no other.
    """
    kind, place = rows["optype"], rows["place"].to_numpy()
    own = np.where(place >= 0, place, rows["seq_id"].to_numpy())
    numbered = kind.isin(list(_SLOT_OF)).to_numpy() & rows["real"].to_numpy()
    slot = kind.map(_SLOT_OF).fillna(0).to_numpy().astype(np.int64)
    width = int(own[numbered].max(initial=0)) + 1
    return np.where(numbered, (number * 3 + slot) * width + own, -1)
