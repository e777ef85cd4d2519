"""The main job as a user runs it: a real training run, recorded and reported; and stopped in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import mappnb

pytest.importorskip("megatron.core", reason="needs torch and megatron-core")
pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def start(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "mappnb.cli", "demo", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def test_demo(tmp_path):
    run_dir = tmp_path / "run"
    demo = start("--steps", "4", "--run-dir", str(run_dir))
    out, err = demo.communicate(timeout=280)
    assert demo.returncode == 0, err
    assert re.search(r"step 4/4  loss \d\.\d+  [\d,]+ tokens/s", err) and "Traceback" not in err
    for text in ("step ", "bubble ", "wait peer", "rank 3 · pp1 dp1", "report.html", "mappnb.attach"):
        assert text in out
    run = mappnb.attach(run_dir)
    assert run.meta["state"] == "ended" and not run.meta["degraded"] and run.steps.sizes == {"step": 4, "rank": 4}
    loss = run.steps.loss.mean("rank").values
    assert loss[-1] < loss[0]
    assert (run.steps.mfu > 0).all() and (run.steps.mfu < 1).all()
    assert (run_dir / "report.html").stat().st_size > 10_000
    telemetry = run.telemetry
    assert set(telemetry["rank"].values.tolist()) == {0, 1, 2, 3} and (telemetry.rss_bytes > 1e7).all()


def test_ctrl_c_ends_all_ranks_and_the_run_stays_readable(tmp_path):
    run_dir = tmp_path / "run"
    demo = start("--steps", "500", "--run-dir", str(run_dir), start_new_session=True)
    children: list[psutil.Process] = []
    try:
        for line in demo.stderr:
            if line.startswith("step 1/"):
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        time.sleep(1.5)
        os.killpg(demo.pid, signal.SIGINT)  # what a terminal does
        out, err = demo.communicate(timeout=90)
    finally:
        demo.kill()
    assert demo.returncode == 130, err
    assert "stopped; all ranks have ended" in err and "Traceback" not in err and "Traceback" not in out
    assert len(children) >= 4
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    run = mappnb.attach(run_dir)
    assert run.steps.sizes["step"] >= 1 and not run.meta["problems"] and not run.meta["missing_ranks"]
    assert run.meta["state"] == "ended", run.ranks
    assert (run_dir / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--tp", "2", "--pp", "2", "--dp", "1", "--sequence-parallel"],
        ["--pp", "2", "--vpp", "2", "--dp", "1"],
        ["--tp", "1", "--pp", "1", "--dp", "1"],
        ["--slow-rank", "1", "--slow-ms", "60"],
        ["--slow-link", "0,2,60"],
    ],
)
def test_demo_options(tmp_path, words):
    demo = start("--steps", "4", "--run-dir", str(tmp_path / "run"), *words)
    out, err = demo.communicate(timeout=280)
    assert demo.returncode == 0, err
    run = mappnb.attach(tmp_path / "run")
    if "--slow-rank" in words:  # the slow rank computes longer and its data-parallel peer waits for it
        parts = mappnb.analysis.breakdown(run).seconds.isel(step=slice(1, None)).median("step")
        compute = parts.sel(category="compute")
        assert int(compute["rank"].values[compute.values.argmax()]) == 1
        assert float(parts.sel(rank=1, category="wait_peer")) < float(parts.sel(rank=0, category="wait_peer"))
    if "--slow-link" in words:
        stall = run.sel(op="recv", rank=2).duration_ns.values / 1e6
        assert (stall >= 60).mean() > 0.5
