"""What the analyses and views of activations cost: CPU seconds, bytes of messages and pages.

Run ``python tests/bench/bench_activation_views.py``; one core, about two minutes.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from interp.lens_data import stream
from interp.stats_data import statistics
from widgets.activation_views import trace, tree
from widgets.front import Front

from mappnb.interp import drift, logit_lens, outliers, trajectories
from mappnb.widgets import ActivationStats, CausalTrace, Densities, Lens, Trajectories


def timed(name, call):
    start = time.process_time()
    found = call()
    print(f"{name:64s} {time.process_time() - start:8.2f} s CPU")
    return found


def analyses():
    made = stream(
        layers=30, tokens=128, hidden=576, vocab=49_152, samples=1, heads=9, head_dim=64, neurons=8, dtype=np.float32
    )
    x = made["full"]["resid_post"].values[0].reshape(-1, 576)
    weight = made["weights"]["unembed"].values[0]
    timed(
        "the matrix products alone, 30 layers x 128 tokens x 49152",
        lambda: [x[i : i + 64] @ weight.T for i in range(0, len(x), 64)],
    )
    tracemalloc.start()
    timed("logit_lens of the same, with tracing of memory", lambda: logit_lens(made))
    print(f"{'  beside the result at most':64s} {tracemalloc.get_traced_memory()[1] / 2**20:8.0f} MiB")
    tracemalloc.stop()
    timed(
        "logit_lens of one token, 30 layers",
        lambda: logit_lens(made["full"].to_dataset().isel(token=[5]), made["weights"].to_dataset()),
    )
    timed("trajectories of 3840 vectors of 576", lambda: trajectories(made, components=6))
    base = statistics(steps=tuple(range(0, 50, 10)))
    many = base.isel(step=np.arange(1000) % 5).assign_coords(step=np.arange(1000))
    timed("drift of 1000 steps x 6 points x 9 layers", lambda: drift(many))
    timed("outliers of the same", lambda: outliers(many))


def views():
    made = {
        "stats": (lambda: ActivationStats(statistics()), {"panel": "heat", "row": 1, "col": 2}),
        "lens": (lambda: Lens(tree()), {"panel": "grid", "row": 1, "col": 2}),
        "trajectories": (lambda: Trajectories(tree()), {"panel": "points", "index": 5}),
        "trace": (lambda: CausalTrace(trace()), {"panel": "mlp", "row": 1, "col": 2}),
        "densities": (lambda: Densities(tree()), {"panel": "cells", "row": 1, "col": 2}),
    }
    for name, (make, pick) in made.items():
        view = make()
        front = Front(view)
        front.ask("show", changes={}, theme="light")
        timed(f"{name}: show", lambda: front.ask("show", changes={}, theme="light"))
        shown = front.largest
        timed(f"{name}: pick", lambda: front.ask("pick", **pick, theme="light"))
        page = timed(f"{name}: to_html", view.to_html)
        picture = view.twin_html()
        print(
            f"{'  largest message, page, twin':64s} {shown / 1e3:8.0f} kB {len(page) / 1e6:6.2f} MB {len(picture) / 1e3:6.0f} kB"
        )
        view.close()


if __name__ == "__main__":
    analyses()
    views()
