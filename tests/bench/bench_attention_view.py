"""What the attention view sends and how long a click takes, at 12 layers x 12 heads x 128 tokens.

python tests/bench/bench_attention_view.py [--layers 12] [--heads 12] [--tokens 128] [--clicks 40]

"kernel" is processor time of the kernel's half for a message. "click" is from a click on a thumbnail to the end of the frame that draws the
head, with the message there and back (a bridge in this process, no Jupyter). "draw" is one call that draws. Sizes are of whole messages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from browser import lab
from browser.live_page import live
from widgets.attention_data import activations
from widgets.front import Front

from mappnb.widgets import Attention

LIMIT_BYTES, PAGE_BYTES = 40_000, 2_000_000
VIEW = "document.querySelector('.mappnb-attn').mappnbView"
IDLE = f"() => {{ const v = {VIEW}; return Boolean(v && v.state && v.store.idle && !v.pending); }}"


def cpu_ms(call) -> float:
    begin = time.process_time()
    call()
    return 1e3 * (time.process_time() - begin)


def kernel_half(data, clicks: int) -> tuple[dict[str, float], dict[str, int]]:
    """CPU ms and bytes of each kind of message; a head is asked for when its layer is worked out already (the thumbnails needed it)."""
    view = Attention(data, compare=1)
    front = Front(view)
    layers, heads = len(view._source.layers), len(view._source.heads)
    ms = {"thumbs": cpu_ms(lambda: front.ask("thumbs", sample=0, compare=None, first=0, pool="max"))}
    for kind, compare in (("detail", None), ("difference", 1)):
        took = []
        for i in range(clicks):
            body = {"layer": i % layers, "head": i % heads, "window": None, "pool": "max"}
            took.append(cpu_ms(lambda b=body, k=kind, c=compare: front.ask(k, sample=0, compare=c, **b)))
        ms[kind] = float(np.median(took))
    ms["row"] = float(
        np.median(
            [
                cpu_ms(lambda i=i: front.ask("row", sample=0, compare=None, layer=0, head=0, at=i, axis="query"))
                for i in range(20)
            ]
        )
    )
    ms["scores"] = cpu_ms(lambda: front.ask("scores", sample=0))
    front.ask("tokens", sample=0)
    assert view.errors == []
    sizes: dict[str, int] = {}
    for content, buffers in front.sent:
        sizes[content["kind"]] = max(sizes.get(content["kind"], 0), len(json.dumps(content)) + sum(map(len, buffers)))
    view.close()
    return ms, sizes


def browser_half(data, clicks: int) -> dict[str, float]:
    """Median ms in Chromium."""
    view = Attention(data)
    with lab.browser() as found, live(found, view, render="renderAttention") as shown:
        shown.page.wait_for_function(IDLE, timeout=60_000)
        took = []
        for i in range(clicks):
            index = (i * 37) % (len(view._source.layers) * len(view._source.heads))
            shown.page.evaluate(f"(i) => {VIEW}.open(i)", index)
            shown.page.wait_for_function(IDLE, timeout=20_000)
            took.append(shown.page.evaluate(f"() => {VIEW}.stats.clickMs"))
        detail = shown.page.evaluate(f"() => {VIEW}.store.times.filter(([k]) => k === 'detail').map(([, t]) => t)")
        shown.page.evaluate(f"() => {{ {VIEW}.stats.draws.length = 0; }}")
        for i in range(40):
            shown.page.evaluate(f"(i) => {VIEW}.setCursor([i, i >> 1])", i)
            shown.page.wait_for_timeout(20)
        hover = shown.page.evaluate(f"() => {VIEW}.stats.draws")
        assert shown.failed == [] and view.errors == []
    view.close()
    return {
        "click": float(np.median(took)),
        "click p95": float(np.quantile(took, 0.95)),
        "message": float(np.median(detail)),
        "hover draw": float(np.median(hover)),
    }


def main() -> int:
    """Print the figures; 1 if a size is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("heads", 12), ("tokens", 128), ("clicks", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    data = activations(layers=range(options.layers), heads=options.heads, kv_heads=options.heads, tokens=options.tokens)
    ms, sizes = kernel_half(data, options.clicks)
    print(f"{options.layers} layers, {options.heads} heads, {options.tokens} tokens")
    print("kernel, CPU ms: " + ", ".join(f"{k} {v:.2f}" for k, v in ms.items()))
    print("messages, bytes: " + ", ".join(f"{k} {v:,}" for k, v in sorted(sizes.items())))
    view = Attention(data)
    page: list[str] = []
    took = cpu_ms(lambda: page.append(view.to_html()))
    samples = page[0].count('"codes":')
    snapshot = len(view.snapshot()._repr_html_())
    print(
        f"page {len(page[0].encode()):,} bytes ({took / 1e3:.2f} s CPU, {samples} samples), snapshot {snapshot:,} bytes"
    )
    if shutil.which("chromium") or shutil.which("google-chrome"):
        print("browser, ms: " + ", ".join(f"{k} {v:.1f}" for k, v in browser_half(data, options.clicks).items()))
    if (options.layers, options.heads, options.tokens) != (12, 12, 128):
        return 0
    good = max(sizes.values()) <= LIMIT_BYTES and len(page[0].encode()) <= PAGE_BYTES
    print(f"limits: message {LIMIT_BYTES:,}, page {PAGE_BYTES:,}: {'kept' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
