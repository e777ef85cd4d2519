"""Runs whose activations are known: whole tensors, cut as the ranks of a layout hold them, written as blocks."""

from __future__ import annotations

import itertools

import numpy as np

from mappnb.activation_blocks import Block, Stored, append_log, write_block
from mappnb.activation_codecs import encode, part_name
from mappnb.activation_points import POINTS
from mappnb.layout import Layout
from mappnb.testing.runs import make_run

LAYERS, TOKENS, HIDDEN, HEADS, KV, HEAD_DIM, NEURONS, VOCAB = 4, 16, 12, 4, 2, 6, 16, 20
SIZES = {
    "hidden": HIDDEN,
    "head": HEADS,
    "kv_head": KV,
    "head_dim": HEAD_DIM,
    "neuron": NEURONS,
    "vocab": VOCAB,
    "expert": 4,
}
FACTS = {"num_layers": LAYERS, "hidden": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV, "head_dim": HEAD_DIM}


def whole(point, step, dp_rank, microbatch, batch=2, tokens=TOKENS):
    """The whole tensor of a point for one microbatch, dims (sample, [layer,] token, features...): the same for every layout."""
    kind = POINTS[point.removesuffix("_grad")]
    seed = [ord(c) for c in point] + [step, dp_rank, microbatch]
    shape = (batch, *((LAYERS,) if kind.per_layer else ()), tokens, *(SIZES[d] for d in kind.dims))
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ids(step, dp_rank, microbatch, batch=2, tokens=TOKENS):
    return (np.arange(batch * tokens).reshape(batch, tokens) * 7 + 100 * step + 10 * dp_rank + microbatch) % 251


def zigzag(tokens, cp_rank, cp):
    pieces = np.array_split(np.arange(tokens), 2 * cp)
    return np.concatenate([pieces[cp_rank], pieces[2 * cp - 1 - cp_rank]]) if cp > 1 else np.arange(tokens)


def cut(point, values, *, layout, coords, sp=False):
    """A rank's share of a whole tensor, and its shard as a dict: (values, layers, shard) or None where it has none."""
    kind = POINTS[point.removesuffix("_grad")]
    per_stage = LAYERS // layout.num_stages
    layers = [
        layout.stage(coords["pp"], chunk) * per_stage + i
        for chunk in range(layout.num_chunks)
        for i in range(per_stage)
    ]
    if kind.per_layer:
        values = values[:, layers]
    elif coords["pp"] != (0 if point.startswith("embed") else layout.pp - 1):
        return None
    token = 1 + kind.per_layer
    local = zigzag(values.shape[token], coords["cp"], layout.cp)
    values = np.take(values, local, token)
    shard = {"dims": ["sample", "token", *kind.dims], "token": "cp" if layout.cp > 1 else "whole", "split": {}}
    if kind.sequence_parallel and sp:
        n = values.shape[token] // layout.tp
        values = np.take(values, np.arange(coords["tp"] * n, (coords["tp"] + 1) * n), token)
        shard["token"] = "cp+sp" if layout.cp > 1 else "sp"
    elif kind.split and layout.tp > 1:
        axis, total = token + 1 + kind.dims.index(kind.split), SIZES[kind.split]
        parts = min(layout.tp, total)
        if coords["tp"] % (layout.tp // parts):
            return None  # another rank holds the same
        number, n = coords["tp"] // (layout.tp // parts), total // parts
        values = np.take(values, np.arange(number * n, (number + 1) * n), axis)
        if parts > 1:
            split = {"rank": number, "size": parts, "start": number * n, "stop": (number + 1) * n, "total": total}
            shard["split"] = {kind.split: split}
    elif layout.tp > 1 and coords["tp"]:
        return None
    return values, layers if kind.per_layer else [], shard


def stored_point(name, values, layers, shard, sp, mode="full", **options):
    kind = POINTS[name.removesuffix("_grad")]
    parts, attrs = encode(mode, values, **options)
    attrs |= {
        "layers": layers,
        "shard": shard,
        "token_index": "token_index_sp" if sp and kind.sequence_parallel else "token_index",
    }
    last = {"topk": "k", "bucket": "bucket", "sketch": "component"}.get(mode, kind.dims[-1])
    dims = ("sample", *(["layer"] if kind.per_layer else []), "token", *kind.dims[:-1], last)
    if mode == "sketch" and shard["split"].get(kind.dims[-1]):
        attrs["combine"] = "sum"
    return {
        part_name(name, part): Stored(value, dims[:-1] if part == "scale" else dims, attrs if not part else {})
        for part, value in parts.items()
    }


def block_of(rank, layout, step, *, points, sp=False, batch=2, microbatches=2, tokens=TOKENS, change=None, mode=None):
    """One rank's block of one step."""
    coords = layout.coords(rank)
    dp, local = coords["dp"], zigzag(tokens, coords["cp"], layout.cp)
    n = len(local) // layout.tp
    slots_sp = local[coords["tp"] * n : (coords["tp"] + 1) * n]
    rows = list(itertools.product(range(microbatches), range(batch)))
    full_ids = np.concatenate([ids(step, dp, m, batch, tokens) for m in range(microbatches)])[:, local]
    arrays = {
        "step": Stored(np.full(len(rows), step), ("sample",)),
        "dp_rank": Stored(np.full(len(rows), dp), ("sample",)),
        "microbatch": Stored(np.array([m for m, _ in rows]), ("sample",)),
        "index": Stored(np.array([i for _, i in rows]), ("sample",)),
        "token_index": Stored(np.tile(local, (len(rows), 1)).astype(np.int32), ("sample", "token")),
        "token_id": Stored(full_ids, ("sample", "token")),
        "position": Stored(np.tile(local, (len(rows), 1)).astype(np.int32), ("sample", "token")),
        "mask": Stored(np.ones((len(rows), len(local)), bool), ("sample", "token")),
    }
    if sp:
        arrays["token_index_sp"] = Stored(np.tile(slots_sp, (len(rows), 1)).astype(np.int32), ("sample", "token_sp"))
    for point in points:
        values = np.concatenate([whole(point, step, dp, m, batch, tokens) for m in range(microbatches)])
        found = cut(point, values, layout=layout, coords=coords, sp=sp)
        if found is None:
            continue
        values, layers, shard = found
        options = dict(mode or {})
        if options.get("mode") == "sketch":
            options["start"] = shard["split"].get(POINTS[point].dims[-1], {"start": 0})["start"]
        arrays |= stored_point(point, values if change is None else change(values), layers, shard, sp, **options)
    attrs = {
        "rank": rank,
        "coords": coords,
        "layout": layout.to_dict(),
        "model": FACTS,
        "plan": {"rules": [{"name": "full", "points": list(points), "layers": None}], "vocabulary": "bytes"},
    }
    return Block(attrs, {"full": arrays})


def folder_of(path, rank, incarnation=0):
    return path / f"inc={incarnation:03d}" / "activations" / f"rank={rank:05d}"


def write_run(
    path,
    layout=None,
    *,
    points=("resid_post", "q", "k"),
    steps=(0, 1),
    ranks=None,
    resume=False,
    incarnation=0,
    **options,
):
    """A run with activations in whole; other arguments go to block_of."""
    layout = layout or Layout()
    make_run(path, layout=layout, num_steps=2, resume=resume)
    for rank in range(layout.world_size) if ranks is None else ranks:
        for number, step in enumerate(steps):
            add_block(path, rank, number, block_of(rank, layout, step, points=points, **options), incarnation)
    return path


def add_block(path, rank, number, block, incarnation=0):
    folder = folder_of(path, rank, incarnation)
    size = write_block(folder / f"block-{number:06d}.zarr.zip", block)
    steps = sorted({int(s) for a in block.streams.values() for s in np.atleast_1d(a["step"].values) if s >= 0})
    append_log(folder, {"file": f"block-{number:06d}.zarr.zip", "steps": steps, "bytes": size})
    return folder
