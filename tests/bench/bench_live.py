"""CPU milliseconds of a live model's questions beside the bare forward passes they need: python tests/bench/bench_live.py"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


def cpu_ms(call, *, repeat=5):
    times = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        times.append((time.process_time() - start) * 1e3)
    return float(np.median(times))


def main() -> None:
    import torch
    from interp.live_models import bare, gpt

    from mappnb.interp import Edit, Model, causal_trace, explain, generate

    torch.set_num_threads(1)
    with gpt(layers=4, hidden=512, heads=8, kv_heads=4) as chunks:
        model = Model(chunks, "bytes")
        prompt = "a prompt of sixty-four tokens, with as many words as fit in here"
        tokens = np.array(list(prompt.encode()))
        chunks[0].eval()

        def forward():
            with torch.no_grad():
                bare(chunks, tokens)

        base = cpu_ms(forward)
        rows = [("bare forward, 64 tokens", base, 1)]
        for name, call, forwards in [
            ("Model.forward", lambda: model.forward(prompt), 1),
            ("Model.forward, capture of every point", lambda: model.forward(prompt, capture="all"), 1),
            (
                "Model.forward, 4 edits",
                lambda: model.forward(prompt, edits=[Edit(point="z", heads=h) for h in range(4)]),
                1,
            ),
            ("generate, per token (65 to 80 tokens)", lambda: generate(model, prompt, max_new_tokens=16), 16),
            (
                "causal_trace, 12 tokens, per cell and sample",
                lambda: causal_trace(model, prompt[:12], subject="prompt"),
                3 * 4 * 12 * 10,
            ),
            ("explain", lambda: explain(model, prompt, "a", instead_of="b"), 1),
        ]:
            rows.append((name, cpu_ms(call, repeat=3) / forwards, 1))
        for name, ms, _ in rows:
            print(f"{name:<48} {ms:8.2f} ms  {ms / base:6.2f} x bare")


if __name__ == "__main__":
    main()
