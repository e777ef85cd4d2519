"""attach and Run: windows equal a brute-force filter, live runs grow, clocks of one host stay exact, text is escaped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import segments
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.schema import EVENTS, check
from mappnb.store import Store
from mappnb.testing.runs import make_run


@pytest.fixture
def run(make):
    return make(layout=Layout(pp=2, dp=2), num_steps=6, segment_rows=100, num_microbatches=4)


def test_events_follow_the_schema(run):
    check(run.events, EVENTS, name="events")
    check(run.sel(step=0), EVENTS, name="window")
    assert run.events.sizes["event"] == run.sel().sizes["event"]


@pytest.mark.parametrize(
    "where",
    [
        dict(step=2),
        dict(step=slice(1, 3)),
        dict(rank=1),
        dict(rank=[0, 3]),
        dict(rank=slice(1, 2)),
        dict(category="p2p"),
        dict(category=["compute", "optimizer"], rank=2),
        dict(op="send", step=slice(4, None)),
        dict(time=slice(1.05, 1.11)),
        dict(time=slice(None, 1.2), rank=0, category="compute"),
        dict(time=slice(50, 60)),
    ],
)
def test_windows_equal_a_brute_force_filter(run, where):
    everything = run.events.load().to_dataframe()
    keep = np.ones(len(everything), bool)
    for key in ("step", "rank"):
        if key in where:
            value = where[key]
            if isinstance(value, slice):
                lo, hi = -(10**9) if value.start is None else value.start, 10**9 if value.stop is None else value.stop
                keep &= (everything[key] >= lo) & (everything[key] <= hi)
            else:
                keep &= everything[key].isin(np.atleast_1d(value))
    for key in ("category", "op"):
        if key in where:
            keep &= everything[key].isin([where[key]] if isinstance(where[key], str) else where[key])
    if "time" in where:
        t0, t1 = where["time"].start or -1, where["time"].stop
        end = everything.start_ns + everything.duration_ns
        keep &= (everything.start_ns < t1 * 1e9) & ((end > t0 * 1e9) | (everything.start_ns >= t0 * 1e9))
    want = everything[keep].sort_values(["start_ns", "rank", "duration_ns", "op"]).reset_index(drop=True)
    found = (
        run.sel(**where).to_dataframe().sort_values(["start_ns", "rank", "duration_ns", "op"]).reset_index(drop=True)
    )
    assert (np.diff(run.sel(**where).start_ns) >= 0).all()
    assert len(found) == len(want) and (found[list(EVENTS)] == want[list(EVENTS)]).all(axis=None)


def test_lazy_columns_read_what_is_asked(run):
    lazy = run.refresh().events
    np.testing.assert_array_equal(lazy.op.isel(event=slice(50, 10, -3)).values, run.events.op.values[50:10:-3])
    assert lazy.seq.isel(event=7).item() == run.events.seq.values[7]
    np.testing.assert_array_equal(lazy["rank"].isel(event=[3, 200, 1]), run.events["rank"].values[[3, 200, 1]])


def test_a_live_run_grows(tmp_path):
    one = make_run(tmp_path / "one", num_steps=2, ended=False, ranks=[0], layout=Layout(dp=2))
    run = mappnb.attach(one)
    before = run.events.sizes["event"]
    assert before and run.meta["missing_ranks"] == [1] and run.meta["state"] == "recording"
    info = json.loads((one / "run.json").read_text())
    two = make_run(tmp_path / "two", num_steps=2, layout=Layout(dp=2))
    (two / "run.json").write_text(json.dumps(info))  # stands in for a second rank that joins later
    for folder in ("events", "steps"):
        shutil.copytree(two / f"inc=000/{folder}/rank=00001", one / f"inc=000/{folder}/rank=00001")
    assert run.events.sizes["event"] == before  # a snapshot stays what it was
    run.refresh()
    assert run.meta["problems"]  # those segments name the other run, and are not mixed in
    assert run.events.sizes["event"] == before


def test_follow_looks_again_by_itself(tmp_path, monkeypatch):
    path = make_run(tmp_path / "run", num_steps=2)
    monkeypatch.setattr("mappnb.run.FOLLOW_S", 0.0)
    run = mappnb.attach(path, follow=True)
    first = run.events.sizes["event"]
    make_run(path, num_steps=2, resume=True)
    assert run.events.sizes["event"] == 2 * first
    assert len(run.incarnations) == 2


def test_incarnations_repeat_steps(tmp_path):
    path = make_run(tmp_path / "run", num_steps=4)
    make_run(path, num_steps=2, resume=True, forward_s=0.020)
    run = mappnb.attach(path)
    assert run.steps.incarnation.values.tolist() == [1, 1, 0, 0]
    assert run.steps.attrs["repeated_rows"] == 2
    assert run.sel(incarnation=1)["step"].max() == 1
    assert set(run.sel(step=0).incarnation.values.tolist()) == {0, 1}
    with pytest.raises(MappnbError, match=r"no incarnation 2; there are \[0, 1\]"):
        run.sel(incarnation=2)


def test_clocks_of_hosts_are_brought_together(tmp_path):
    """Each host's monotonic clock counts from its own boot; ranks of one host keep their exact differences."""
    offsets = {2: 5 * 10**12, 3: 5 * 10**12}
    plain = mappnb.attach(make_run(tmp_path / "a", layout=Layout(dp=4), num_hosts=2)).sel()
    apart = mappnb.attach(make_run(tmp_path / "b", layout=Layout(dp=4), num_hosts=2, clock_offset_ns=offsets)).sel()
    raw = apart.raw_start_ns.values
    assert raw.max() - raw.min() > 4 * 10**12
    key = ["rank", "step", "op", "microbatch", "phase", "layer"]
    one, two = (d.to_dataframe().sort_values([*key, "start_ns"]) for d in (plain, apart))
    np.testing.assert_array_equal(one.start_ns.to_numpy(), two.start_ns.to_numpy())


def test_html_and_script_in_names_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    run = mappnb.attach(make_run(tmp_path / "<b>run", name=evil))
    info = tmp_path / "<b>run/inc=000/ranks/rank=00000.json"
    info.write_text(
        json.dumps(
            {**json.loads(info.read_text()), "host": evil, "degraded": evil, "plan": evil, "versions": {evil: evil}}
        )
    )
    run.refresh()
    text = run._repr_html_()
    assert "<script" not in text and "&lt;script&gt;" in text and "<b>" not in text
    assert evil in set(run.sel().name.values.tolist())  # kept as data


def test_repr_is_stable(make):
    assert (
        repr(make("a", layout=Layout(pp=2, dp=2)))
        == repr(make("b", layout=Layout(pp=2, dp=2)))
        == "Run(4 ranks, pp2 × dp2)"
    )


def test_steps_throughput(make):
    run = make(layout=Layout(pp=2, dp=2), num_steps=3, num_microbatches=4)
    steps = run.steps
    np.testing.assert_allclose(
        steps.tokens_per_s, 2 * 4 * 64 / steps.step_s
    )  # two replicas of four microbatches of 64 tokens
    np.testing.assert_allclose(steps.mfu, steps.tokens_per_s * 1e6 / (1e12 * 4))
    assert np.isnan(steps.loss.sel(rank=[0, 1])).all() and np.isfinite(steps.loss.sel(rank=[2, 3])).all()


def test_engine(make):
    run = make(layout=Layout(dp=2))
    assert xr.open_dataset(run.path).sizes == run.events.sizes
    assert xr.open_dataset(run.path, engine="mappnb", group="steps").sizes == run.steps.sizes
    tree = xr.open_datatree(run.path, engine="mappnb")
    assert set(tree.children) == {"events", "steps", "telemetry", "metrics"}
    assert "flags" not in xr.open_dataset(run.path, engine="mappnb", drop_variables="flags")
    with pytest.raises(MappnbError, match="did you mean 'events'"):
        xr.open_dataset(run.path, engine="mappnb", group="event")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run: run.sel(rank=9), "no rank 9; the run has ranks 0 to 3"),
        (lambda run: run.sel(category="collectives"), "no category 'collectives'; known: compute, collective, p2p"),
        (lambda run: run.timelime(), "Run has no 'timelime'"),
    ],
)
def test_messages(run, call, text):
    with pytest.raises((MappnbError, AttributeError)) as err:
        call(run)
    assert text in str(err.value)


def test_import_is_light():
    """`import mappnb` brings neither torch nor bokeh; nor does attaching, selecting and analysing."""
    code = (
        "import sys, mappnb; mappnb.attach; mappnb.analysis; mappnb.step; mappnb.record; "
        "print([m for m in ('torch', 'megatron', 'bokeh', 'ipywidgets', 'anywidget') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_exist():
    for name in mappnb.__all__:
        assert getattr(mappnb, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        mappnb.atach  # noqa: B018


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("cuda:0 NVIDIA H100 80GB HBM3", 989e12),
        ("cuda:3 NVIDIA H100 PCIe", 756e12),
        ("cuda:0 NVIDIA A100-SXM4-80GB", 312e12),
        ("cuda:0 NVIDIA H200", 989e12),
        ("cuda:0 NVIDIA H20", 148e12),
        ("cpu", None),
    ],
)
def test_peak_of_known_devices(device, peak):
    from mappnb.devices import peak_flops_of

    assert peak_flops_of(device) == peak


def test_a_run_of_many_ranks_does_not_use_up_the_files_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_limit", lambda: 16)
    path = make_run(tmp_path / "run", num_steps=1, layout=Layout(dp=60))
    run = mappnb.attach(path)
    whole = run.sel()

    def held() -> int:
        links = (
            os.readlink(f"/proc/self/fd/{f}")
            for f in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{f}")
        )
        return sum(str(path) in link for link in links)

    assert len(np.unique(whole["rank"])) == 60 and held() <= 16
    assert run.sel().sizes == whole.sizes and 0 < held() <= 16


def test_attach_lists_and_reads_rank_files_at_the_first_need(tmp_path, monkeypatch):
    path = make_run(tmp_path / "run", layout=Layout(dp=6), num_steps=1)
    read = []
    plain = Store._json
    monkeypatch.setattr(Store, "_json", lambda self, *parts: (read.append(parts[-1]), plain(self, *parts))[1])
    run = mappnb.attach(path)
    assert [n for n in read if n.startswith("rank")] == []
    assert run.layout == Layout(dp=6) and sorted(run.incarnations[0].ranks) == list(range(6))
    assert len([n for n in read if n.startswith("rank")]) == 6
    info = path / "inc=000/ranks/rank=00002.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "degraded": "the disk was full"}))
    (path / "inc=000/ranks/rank=00004.json").write_text("{")
    (path / "inc=000/ranks/rank=00005.json").unlink()
    read.clear()
    meta = run.refresh().meta  # what did not change is not read again
    assert sorted(n for n in read if n.startswith("rank")) == ["rank=00002.json", "rank=00004.json"]
    assert meta["degraded"] == {2: "the disk was full"} and meta["missing_ranks"] == [4, 5]
    assert list(meta["problems"]) == ["inc=000/ranks/rank=00004.json"]


@pytest.mark.parametrize("ended", [True, False])
def test_tables_read_in_one_piece_equal_those_read_part_by_part(tmp_path, ended):
    """A mask makes the reader go part by part: one that keeps everything must change nothing."""
    path = make_run(tmp_path / "run", layout=Layout(dp=3), num_steps=4, ended=ended)
    make_run(path, layout=Layout(dp=3), num_steps=1, resume=True)  # one row: its whole numbers are constant
    reader = mappnb.attach(path)._reader("steps")
    everything = (-(2**31), 2**31 - 1)
    for _ in range(2):  # rows that came with the index, and rows that are decoded again
        together, *places = reader.window()
        apart, *others = reader.window(steps=everything)
        assert len(together["step"]) == 3 * 5
        for name, values in together.items():
            assert values.dtype == apart[name].dtype
            np.testing.assert_array_equal(values, apart[name])
        for one, other in zip(places, others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_small_segment_with_a_broken_page_is_told(tmp_path):
    path = make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=40)
    segment = next((path / "inc=000/steps/rank=00001").glob("seg-*.parquet"))
    content = bytearray(segment.read_bytes())
    content[4:40] = bytes(36)
    segment.write_bytes(content)
    run = mappnb.attach(path)
    with pytest.warns(UserWarning, match="its rows are left out"):
        steps = run.steps
    assert steps["rank"].values.tolist() == [0]
    assert list(run.meta["problems"]) == [f"inc=000/steps/rank=00001/{segment.name}"]
