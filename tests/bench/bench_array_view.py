"""Size and CPU time of arrays as pictures: ``array_view(da)`` to HTML, the best of some rounds.

    OMP_NUM_THREADS=1 python tests/bench/bench_array_view.py [--rounds 5]

The arrays of a billion values are a zarr store that is read lazily and a view of one line in memory. ``png`` is the part of the page that
is the picture, ``values`` the exact values for hover and table, both in base64. ``canvas`` is what the colours of the same cells would take
as bytes for a canvas to draw, deflated as a PNG is: smaller, but nothing would be seen where scripts are blocked.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
import zlib

import numpy as np
import xarray as xr
import zarr

from mappnb.widgets import array_view


def arrays(folder: str) -> dict[str, xr.DataArray]:
    rng = np.random.default_rng(0)
    group = zarr.open_group(folder, mode="w")
    group.create_array("big", shape=(1000,) * 3, chunks=(50, 200, 200), dtype="f4", dimension_names=("a", "b", "c"))
    line = rng.standard_normal(1000).astype("f4")
    few = rng.integers(0, 8, (12, 32))
    dates = np.datetime64("2026-01-01", "ns") + np.arange(10_000).reshape(100, 100).astype("m8[m]")
    return {
        "30 x 4096 x 576 float32": xr.DataArray(rng.standard_normal((30, 4096, 576), dtype="f4")),
        "30 x 4096 x 576 float16": xr.DataArray(rng.standard_normal((30, 4096, 576), dtype="f4").astype("f2")),
        "4096 x 4096 float64": xr.DataArray(rng.standard_normal((4096, 4096))),
        "4096 x 4096 int64": xr.DataArray(rng.integers(-(2**60), 2**60, (4096, 4096))),
        "4096 x 1024 complex64": xr.DataArray((rng.standard_normal((4096, 1024)) * (1 + 1j)).astype("c8")),
        "12 x 16 x 64 x 64 float32": xr.DataArray(rng.standard_normal((12, 16, 64, 64), dtype="f4")),
        "1 x 1": xr.DataArray(np.ones((1, 1))),
        "0-d": xr.DataArray(1.5),
        "0 x 3": xr.DataArray(np.ones((0, 3))),
        "3 ** 12 float64": xr.DataArray(rng.standard_normal((3,) * 12)),
        "12 x 32 int, 8 categories": xr.DataArray(few),
        "100 x 100 datetime": xr.DataArray(dates),
        "40 x 40 words": xr.DataArray(np.array([f"word {k}" for k in range(1600)]).reshape(40, 40)),
        "10^9 float32, zarr, lazy": xr.open_zarr(folder, chunks=None, consolidated=False).big,
        "10^9 float32, in memory": xr.DataArray(np.broadcast_to(line, (1000,) * 3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(
        f"{'array':28s} {'html kB':>8s} {'png kB':>7s} {'values kB':>9s} {'canvas kB':>9s} {'cells':>6s} {'CPU ms':>7s}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, da in arrays(folder).items():
            best = np.inf
            for _ in range(rounds):
                start = time.process_time()
                text = array_view(da)._repr_html_()
                best = min(best, time.process_time() - start)
            png = sum(map(len, re.findall(r'class="mpa-f".*?src="([^"]*)"', text)))
            packed = re.search(r'"v":"([^"]*)"', text)
            content = array_view(da).content() if da.size else None
            canvas = len(zlib.compress(content.cells.tobytes())) * 4 / 3 if content else 0
            cells = content.grid.num_cells if content else 0
            print(
                f"{name:28s} {len(text.encode()) / 1e3:8.1f} {png / 1e3:7.1f} {len(packed[1]) / 1e3 if packed else 0:9.1f} "
                f"{canvas / 1e3:9.1f} {cells:6d} {best * 1e3:7.1f}"
            )


if __name__ == "__main__":
    main()
