"""Captured activations of a run as labelled, lazy datasets: the shards of all ranks assembled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xarray as xr

from mappnb._activation_assembly import Memory
from mappnb._activation_dataset import Copies, assemble
from mappnb._activation_gaps import note_gaps
from mappnb._activation_index import WEIGHTS, BlockIndex, Found, newest_of_steps
from mappnb._activation_parts import Part, Shard
from mappnb._activation_tables import is_statistics, statistics_dataset, weights_dataset
from mappnb.errors import SchemaError, did_you_mean
from mappnb.store import Incarnation, Store

if TYPE_CHECKING:
    from mappnb.run import Run

__all__ = [
    "Memory",
    "Part",
    "Shard",
    "activation_tree",
    "assemble",
    "open_activations",
    "stream_with",
    "streams_of",
    "tree_of_run",
]


def open_activations(run: Run, *, verify: bool = False) -> xr.DataTree:
    """Return the captured activations of a run, as ``run.activations`` does.

    Parameters
    ----------
    run : Run
        From :func:`mappnb.attach`.
    verify : bool
        Compare tensors that several ranks wrote (only one of them is read otherwise); differences are told in
        ``run.meta["problems"]`` and in the attribute ``differences`` of the tree.

    Returns
    -------
    DataTree
        One child per stream of the plan. Streams of tensors: dims (sample, layer, token, features...), lazy; of statistics:
        dims (step, point, layer); ``weights``: dims (step, [layer,] ...).
    """
    if not verify:
        return run.activations
    copies: dict[str, Copies] = {}
    index = BlockIndex(run.store)
    tree = activation_tree(run.store, run.incarnations, index, run_id=run.meta["run_id"], copies=copies)
    tree.attrs["differences"] = json.dumps(_differences(copies, run.store))
    return tree


def tree_of_run(run: Run) -> xr.DataTree:
    """Return the activations of a run; what was read of its blocks before is kept, as long as the run is."""
    index = run.store.kept.get("activations")
    if index is None:
        index = run.store.kept["activations"] = BlockIndex(run.store)
    meta = run.meta
    live = meta["state"] == "recording"
    return activation_tree(run.store, run.incarnations, index, run_id=meta["run_id"], live=live)


def activation_tree(
    store: Store,
    incarnations: Sequence[Incarnation],
    index: BlockIndex,
    *,
    run_id: str,
    live: bool = False,
    copies: dict[str, Copies] | None = None,
) -> xr.DataTree:
    """Return the activations of a run directory as far as they are there.

    Parameters
    ----------
    store : Store
        The run directory; its ``problems`` get what is missing or cannot be read.
    incarnations : sequence of Incarnation
        Restarts of the job; of a step that several have, the last counts.
    index : BlockIndex
        Keeps what was read of the blocks between looks.
    run_id : str
        For the attributes.
    live : bool
        True while the job may still write: a rank that is behind is then no problem.
    copies : dict, optional
        Gets, by stream and point, shards that are equal.

    Returns
    -------
    DataTree
        See :func:`open_activations`.
    """
    found = index.look([i.number for i in incarnations])
    newest = newest_of_steps(found)
    streams: dict[str, list[Found]] = {}
    for one in found:
        streams.setdefault(one.stream, []).append(one)
    common, words = _attributes(found, run_id), _vocabulary(found)
    children = {}
    for name, those in streams.items():
        attrs = {**common, "stream": name}
        if name == WEIGHTS:
            children[name] = weights_dataset(those, newest, attrs)
        elif is_statistics(those):
            children[name] = statistics_dataset(those, newest, attrs)
        else:
            same: Copies | None = None if copies is None else copies.setdefault(name, {})
            children[name] = assemble(
                [f.part for f in those],
                newest=newest,
                vocabulary=words,
                attrs=attrs,
                copies=same,
                tellers=[f.part for f in found if f.stream != name and f.part.tables],
            )
    note_gaps(store, incarnations, found, newest, live=live)
    root = xr.Dataset(attrs=common)
    return xr.DataTree.from_dict({"/": root, **children}, name="activations")


def _attributes(found: Sequence[Found], run_id: str) -> dict[str, Any]:
    """Return what every dataset carries: the model, layout and plan of the newest incarnation."""
    if not found:
        return {"run_id": run_id}
    last = max(found, key=lambda f: (f.part.incarnation, -f.part.rank)).attrs
    plan = {k: v for k, v in dict(last.get("plan") or {}).items() if k != "vocabulary"}
    return {
        "run_id": run_id,
        "model": json.dumps(last.get("model") or {}),
        "layout": json.dumps(last.get("layout") or {}),
        "plan": json.dumps(plan),
    }


def _vocabulary(found: Sequence[Found]) -> Sequence[str] | str | None:
    """Return the newest incarnation's token texts; a list of them is in the first block of rank 0 only."""
    told = None
    for one in sorted(found, key=lambda f: f.part.incarnation, reverse=True):
        plan = one.attrs.get("plan") or {}
        words = plan.get("vocabulary") if isinstance(plan, Mapping) else None
        if isinstance(words, (str, list, tuple)):
            told = words
            break
    return told


def _differences(copies: Mapping[str, Copies], store: Store) -> list[str]:
    """Compare shards that should be equal, bit by bit; return one line for each pair that is not."""
    out = []
    for stream, points in copies.items():
        for point, pairs in points.items():
            for first, second in pairs:
                box = tuple(slice(0, a.shape[-1]) for a in first.at)
                a, b = first.source.read(box), second.source.read(box)
                if not np.array_equal(a, b, equal_nan=True):
                    worst = float(np.nanmax(np.abs(a.astype(np.float64) - b)))
                    where = store.relative(second.where)
                    line = (
                        f"{stream}/{point} differs by up to {worst:.3g} from the copy in {store.relative(first.where)}"
                    )
                    store.problems[where] = line
                    out.append(f"{where}: {line}")
    return out


def streams_of(activations: xr.DataTree | xr.Dataset) -> dict[str, xr.Dataset]:
    """Return the datasets of a tree by stream; of a dataset, itself, by the name it carries."""
    if isinstance(activations, xr.Dataset):
        return {str(activations.attrs.get("stream", "dataset")): activations}
    children = {str(name): child.to_dataset() for name, child in activations.children.items()}
    if not children and activations.data_vars:  # one stream, cut out of its tree
        return {str(activations.name): activations.to_dataset()}
    return children


_WORTH: Final = {"full": (2, 2), "cast": (2, 1), "int8": (2, 0), "topk": (1, 0), "bucket": (0, 0), "sketch": (0, 0)}


def _worth(ds: xr.Dataset, points: Sequence[str]) -> tuple[int, ...]:
    """Order streams that hold the same points."""
    whole, fine = min((_WORTH.get(str(ds[p].attrs.get("mode", "full")), (2, 2)) for p in points), default=(2, 2))
    return whole, int(ds.sizes.get("sample", 0)), int(ds.sizes.get("token", 0)), fine


def stream_with(activations: xr.DataTree | xr.Dataset, *points: str) -> xr.Dataset:
    """Return the stream that holds all of some points.

    Parameters
    ----------
    activations : DataTree or Dataset
        ``run.activations``, or one stream of it.
    *points : str
        Variables, such as ``"q_rot"``, ``"resid_post_grad"``.

    Returns
    -------
    Dataset
        If there are several: one with whole vectors before top-k, and that before buckets and sketches; then the one with the most
        samples, the most tokens, the finest numbers.

    Raises
    ------
    SchemaError
        If no stream holds them all; the message names the streams and what each holds.
    """
    streams = streams_of(activations)
    fit = [ds for ds in streams.values() if all(p in ds.data_vars for p in points)]
    if fit:
        return max(fit, key=lambda ds: _worth(ds, points))
    known = {str(v) for ds in streams.values() for v in ds.data_vars}
    lost = next((p for p in points if p not in known), "")
    holds = "; ".join(f"{n!r}: {', '.join(map(str, ds.data_vars)) or 'nothing'}" for n, ds in streams.items())
    if not streams:
        raise SchemaError(
            f"activations: nothing was captured, so no {' and '.join(points)}; record with "
            f"mappnb.record(run_dir, activations=mappnb.CapturePlan(mappnb.Capture({list(points)!r})))"
        )
    raise SchemaError(
        f"activations: no stream holds {' and '.join(points)}{did_you_mean(lost, known) if lost else ''}; streams: {holds}; "
        f"record them together, e.g. mappnb.Capture({list(points)!r})"
    )
