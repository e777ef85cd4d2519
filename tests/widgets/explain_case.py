"""Explanations to draw: of a small Llama of plain torch, and a large one whose table is made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import xarray as xr
from interp.live_models import OTHER, PROMPT, llama

from mappnb.interp import Explanation, Model, explain


def small() -> Explanation:
    """Return a real explanation: 3 layers, 4 heads, 11 tokens."""
    return explain(Model(llama(), "bytes"), PROMPT, "a", instead_of="b", baseline=OTHER)


def large(told: Explanation, *, layers: int = 32, heads: int = 16, tokens: int = 300, seed: int = 0) -> Explanation:
    """Return an explanation of the size of a real model's: its numbers are random, its model is that of ``told``."""
    rng = np.random.default_rng(seed)
    texts = np.array([f"{'▁' if i % 3 else ''}word{i}" if i % 7 else "<b>\u202e" for i in range(tokens)], object)
    rows = [("embed", -1, -1, t) for t in range(tokens)]
    rows += [("head", at, h, t) for at in range(layers) for t in range(tokens) for h in range(heads)]
    rows += [("mlp", at, -1, t) for at in range(layers) for t in range(tokens)]
    table = pd.DataFrame(rows, columns=["component", "layer", "unit", "position"])
    table["component"] = table["component"].astype(object)
    table.insert(4, "token", texts[table["position"].to_numpy()])
    last = table["position"] == tokens - 1
    table["direct_effect"] = np.where(last, rng.normal(size=len(table)), 0.0)
    table["attribution"] = rng.normal(size=len(table)) ** 3 * 0.01
    table["in_sum"] = True
    metric = float(table["direct_effect"].sum()) + 0.01
    activations = xr.Dataset({"token_text": (("sample", "token"), texts[None])})
    return replace(
        told, table=table, metric=metric, unexplained=0.01, activations=activations, tokens=np.arange(tokens)
    )


def on_ranks(settings) -> dict[str, object]:
    """Run in each rank of a job: what a view of its model says, lets a click do, and gives to Python."""
    from interp.live_models import gpt
    from widgets.front import Front

    from mappnb.widgets import Explain

    with gpt(layers=2, **settings) as chunks:
        view = Explain(explain(Model(chunks, "bytes"), "hello", "a", instead_of="b"))
        front = Front(view)
        row = int(view.table.query("component == 'head' and layer == 1 and position == 4").index[0])
        refused = [
            front.ask(kind, **fields)[0].get("text", "")
            for kind, fields in (("ablate", {"row": row, "path": []}), ("level", {"path": [row]}), ("check", {"n": 4}))
        ]
        view.on_level({"path": []})
        return {
            "readonly": front.last("state")[0]["readonly"],
            "refused": refused,
            "ablated": view.ablate(row),
            "upstream": len(view.upstream(row)),
            "told": front.ask("level", path=[row])[0]["path"] == [row],
        }
