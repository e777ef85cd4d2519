"""The self-time table of a run while it is written: the same numbers as afterwards, each step once, and nobody is waited for for ever."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import analysis
from mappnb.analysis.work import WorkTable
from mappnb.joining import RunWriter
from mappnb.layout import Layout
from mappnb.paths import INC_NAME, RUN
from mappnb.schema import SITE_FIELDS
from mappnb.table_specs import TABLES
from mappnb.testing import generate_run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("live") / "whole"
    generate_run(path, layout=Layout(pp=2, dp=2), num_microbatches=2, num_steps=12, seed=5)
    return mappnb.attach(path)


@pytest.fixture
def copy(recorded, tmp_path):
    """Makes a job that writes the recorded run again; its files are left as a killed job leaves them."""
    made = []
    yield lambda **options: made.append(Copy(recorded, tmp_path / "run", **options)) or made[-1]
    for job in made:
        for out in job.out.values():
            out.abandon()


class Copy:
    """Writes the run again, as a job does: some rows of each rank at a time, in order of their end, in small segments."""

    def __init__(self, run, path, *, max_rows=40):
        info = run.store.info
        path.mkdir()
        shutil.copy(f"{run.path}/{RUN}", path / RUN)
        (path / INC_NAME.format(0)).mkdir()
        shutil.copy(f"{run.path}/{INC_NAME.format(0)}/incarnation.json", path / INC_NAME.format(0))
        (path / INC_NAME.format(0) / "ranks").mkdir()
        for file in Path(run.path, INC_NAME.format(0), "ranks").iterdir():
            facts = json.loads(file.read_text())
            facts["ended"] = None
            (path / INC_NAME.format(0) / "ranks" / file.name).write_text(json.dumps(facts))
        self.path, self.sites, self.rows, self.tables, self.out = path, [], {}, {}, {}
        ds, codes = run.sel(), {}
        site = np.array(
            [codes.setdefault(s, len(codes)) for s in zip(*(ds[f].values.tolist() for f in SITE_FIELDS), strict=True)]
        )
        self.sites = list(codes)
        stored = {
            c: ds["raw_start_ns" if c == "start_ns" else c].values for c in TABLES["events"].columns if c != "site"
        }
        stored["site"] = site.astype(np.int32)
        for rank in np.unique(ds["rank"].values).tolist():
            mine = np.flatnonzero(ds["rank"].values == rank)
            mine = mine[np.argsort((stored["start_ns"] + stored["duration_ns"])[mine], kind="stable")]
            self.rows[rank] = {c: np.ascontiguousarray(stored[c][mine]) for c in TABLES["events"].columns}
            self.out[rank] = out = RunWriter(path, info["run_id"], int(info["created_wall_ns"]), 0, rank, 4)
            self.tables[rank] = out.table("events", site=lambda i: self.sites[i], max_rows=max_rows, max_age_s=1e9)
            self.written = dict.fromkeys(self.rows, 0)

    def write(self, rank, upto):
        """Write the rank's rows of the steps before ``upto``, and the first few of that step."""
        rows, first = self.rows[rank], self.written[rank]
        last = int(np.searchsorted(rows["step"], upto)) + 3
        for at in range(first, last, 7):
            part = slice(at, min(at + 7, last, len(rows["step"])))
            if part.stop > part.start:
                self.tables[rank].append({c: v[part] for c, v in rows.items()})
        self.written[rank] = min(last, len(rows["step"]))


def test_updates_together_are_the_table_of_the_whole_run(recorded, copy):
    """Segments close between updates; ranks are not equally far; every step comes once, when the slowest has ended it."""
    job = copy()
    table = WorkTable(mappnb.attach(job.path))
    assert table.update() is None
    found = []
    for upto in (1, 2, 4, 5, 9, 12):
        for rank in range(4):
            job.write(rank, upto - (rank == 3 and upto < 12))
        found.append(table.update())
    found = [f for f in found if f is not None]
    assert [list(f["step"].values) for f in found] == [[0], [1, 2], [3], [4, 5, 6, 7], [8, 9, 10, 11]]
    together = xr.concat(found, "step", data_vars="minimal", coords="minimal")
    whole = analysis.work(recorded)
    for name in whole.data_vars:
        np.testing.assert_allclose(together[name], whole[name], rtol=0, atol=1e-12, err_msg=name)
    assert table.update() is None


def test_a_rank_that_is_gone_is_not_waited_for(copy):
    job = copy()
    table = WorkTable(mappnb.attach(job.path), gone_s=0.3)
    for rank in range(4):
        job.write(rank, 2)
    assert list(table.update()["step"].values) == [0, 1]
    for rank in range(3):
        job.write(rank, 6)
    assert table.update() is None
    time.sleep(0.4)
    for rank in range(3):
        job.write(rank, 7)
    found = table.update()
    assert list(found["step"].values) == [2, 3, 4, 5, 6]
    assert 3 not in found["rank"].values or not found.present.sel(rank=3, step=slice(3, None)).any()


def test_a_run_that_ended_gives_all_its_steps_at_once(recorded):
    xr.testing.assert_allclose(WorkTable(mappnb.attach(recorded.path), gone_s=0.0).update(), analysis.work(recorded))


def test_a_look_reads_only_what_was_added(copy, monkeypatch):
    job = copy(max_rows=10**6)
    table = WorkTable(mappnb.attach(job.path))
    for rank in range(4):
        job.write(rank, 8)
    table.update()
    store, read = table.run.store, []
    plain = store.fs.cat_file
    monkeypatch.setattr(store.fs, "cat_file", lambda p, **o: read.append(plain(p, **o)) or read[-1])
    for rank in range(4):
        job.write(rank, 9)
    assert list(table.update()["step"].values) == [8]
    total = sum(s.size for s in store.segments("events", 0))
    assert 0 < sum(map(len, read)) < total / 6
    read.clear()
    assert table.update() is None and not read
