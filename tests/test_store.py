"""The run directory: joining without a collective, restarts, and every kind of bad folder with a message that names the cure."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time

import pytest

import mappnb
from mappnb.errors import FormatVersionError, NotARunError, RunExistsError
from mappnb.joining import RunWriter
from mappnb.layout import Layout
from mappnb.schema import FORMAT_VERSION
from mappnb.store import Store
from mappnb.testing.runs import make_run

LAUNCH = {"MASTER_PORT": "1", "id": "a"}


def join(path, rank=0, world_size=2, launch=LAUNCH, **options) -> RunWriter:
    run = RunWriter.join(path, rank=rank, world_size=world_size, launch=launch, **options)
    run.write_rank({})
    return run


def _join_in_process(path, rank, queue):
    run = join(path, rank, world_size=8)
    queue.put((run.run_id, run.incarnation, run.created_wall_ns))


def test_ranks_that_come_together_agree(tmp_path):
    context = multiprocessing.get_context("fork")
    for trial in range(3):
        queue = context.Queue()
        ranks = [context.Process(target=_join_in_process, args=(tmp_path / f"run{trial}", r, queue)) for r in range(8)]
        for r in ranks:
            r.start()
        found = {queue.get(timeout=30) for _ in ranks}
        for r in ranks:
            r.join()
        assert len(found) == 1 and next(iter(found))[1] == 0
        assert len(Store(tmp_path / f"run{trial}").incarnations()[0].ranks) == 8


def test_restart_of_one_job_is_the_next_incarnation(tmp_path):
    launch = {"job": "slurm-7", "SLURM_RESTART_COUNT": "0"}
    assert [join(tmp_path, r, launch=launch).incarnation for r in (0, 1)] == [0, 0]
    again = {**launch, "SLURM_RESTART_COUNT": "1"}
    assert [join(tmp_path, r, launch=again).incarnation for r in (1, 0)] == [1, 1]


def test_torchrun_restart_is_the_next_incarnation(tmp_path):
    launch = {"MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}
    join(tmp_path, launch=launch)
    assert join(tmp_path, launch={**launch, "TORCHELASTIC_RESTART_COUNT": "1"}).incarnation == 1


@pytest.mark.parametrize("other", [{"id": "b"}, {"MASTER_PORT": "2"}, {}, LAUNCH])
def test_another_job_is_refused_and_nothing_is_touched(tmp_path, other):
    join(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(RunExistsError, match="resume=True"):
        join(tmp_path, launch=other)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert join(tmp_path, launch=other, resume=True).incarnation == 1


def test_a_rank_that_came_too_late_to_ask_for_the_id_joins_its_launch(tmp_path, monkeypatch):
    launch = {"MASTER_PORT": "29500", "id": "abc"}
    join(tmp_path, 0, launch=launch)
    late = {"MASTER_PORT": "29500"}
    with pytest.raises(RunExistsError):
        join(tmp_path, 1, launch={"MASTER_PORT": "29501"})
    with pytest.raises(RunExistsError):  # its file is there: this is another launch
        join(tmp_path, 0, launch=late)
    now = time.time_ns()
    monkeypatch.setattr("mappnb.joining.time.time_ns", lambda: now + 61 * 10**9)
    with pytest.raises(RunExistsError):
        join(tmp_path, 1, launch=late)
    monkeypatch.undo()
    assert join(tmp_path, 1, launch=late).incarnation == 0


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunExistsError, match=r"not empty and not a run directory \(holds thesis.tex\)"):
        join(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]


def test_attach_messages(tmp_path):
    cases = {
        "absent": "no such folder",
        "empty": "the folder is empty: no rank has begun to record yet",
        "file": "a file, not a run directory; to read a trace file use mappnb.import_trace",
        "other": "not a run directory (no run.json; found a.txt)",
        "parent": "it holds 2 of them; attach to one:",
        "norun": "run.json is missing beside inc=000",
        "broken": "run.json is unreadable",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("x")
    for name in ("parent/one", "parent/two", "norun", "broken"):
        make_run(tmp_path / name)
    (tmp_path / "norun" / "run.json").unlink()
    (tmp_path / "broken" / "run.json").write_text('{"format_version": 1, ')
    for name, text in cases.items():
        with pytest.raises(NotARunError) as err:
            mappnb.attach(tmp_path / name)
        assert text in str(err.value) and str(tmp_path) in str(err.value), name


def test_newer_format_names_the_cure(tmp_path):
    path = make_run(tmp_path / "run")
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "format_version": FORMAT_VERSION + 1}))
    with pytest.raises(FormatVersionError, match="pip install -U mappnb"):
        mappnb.attach(path)


def test_two_runs_in_one_folder_are_told(tmp_path):
    one, two = make_run(tmp_path / "one", layout=Layout(dp=2)), make_run(tmp_path / "two", layout=Layout(dp=2))
    shutil.copy(two / "inc=000/ranks/rank=00001.json", one / "inc=000/ranks/rank=00001.json")
    shutil.rmtree(one / "inc=000/events/rank=00001")
    shutil.copytree(two / "inc=000/events/rank=00001", one / "inc=000/events/rank=00001")
    run = mappnb.attach(one)
    assert set(run.sel()["rank"].values.tolist()) == {0}
    problems = run.meta["problems"]
    assert any("two runs were copied into one folder" in why for why in problems.values())
    assert any("belongs to another run" in why for why in problems.values())


@pytest.mark.parametrize("damage", ["truncate", "zeros", "garbage", "empty"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_damaged_segment_is_skipped_and_reported(tmp_path, damage, ended):
    path = make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=8, segment_rows=20, ended=ended)
    whole = mappnb.attach(path).events.sizes["event"]
    pattern = "*.parquet" if ended else "open-*.arrows"
    victim = sorted((path / "inc=000/events/rank=00001").glob(pattern))[-1]
    data = victim.read_bytes()
    victim.write_bytes(
        {"truncate": data[:100], "zeros": bytes(len(data)), "garbage": b"x" * len(data), "empty": b""}[damage]
    )
    run = mappnb.attach(path)
    assert 0 < run.events.sizes["event"] < whole
    assert len(run.sel(rank=0)["rank"]) == len(mappnb.attach(path).sel(rank=0)["rank"]) > 0
    if damage != "empty" or ended:
        assert any(victim.name in where and "skipped" in why for where, why in run.meta["problems"].items())


def test_a_lost_segment_is_reported(tmp_path):
    path = make_run(tmp_path / "run", num_steps=8, segment_rows=20)
    (path / "inc=000/events/rank=00000/seg-000001.parquet").unlink()
    run = mappnb.attach(path)
    assert run.events.sizes["event"] > 0
    assert "segments 1 are missing" in next(iter(run.meta["problems"].values()))


def test_temporary_files_are_ignored(tmp_path):
    path = make_run(tmp_path / "run")
    folder = path / "inc=000/events/rank=00000"
    (folder / "seg-000009.parquet.123.tmp").write_bytes(b"half")
    run = mappnb.attach(path)
    assert run.meta["problems"] == {} and run.events.sizes["event"] > 0


def test_reading_never_writes(tmp_path):
    path = make_run(tmp_path / "run", ended=False)
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in path.rglob("*")}
    run = mappnb.attach(path)
    run.sel(step=1)
    run.steps.load()
    run._repr_html_()
    run.refresh()
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in path.rglob("*")} == before


def test_read_through_fsspec(tmp_path):
    import fsspec

    path = make_run(tmp_path / "run", layout=Layout(pp=2), ended=False)
    memory = fsspec.filesystem("memory")
    memory.put(str(path), "/copied", recursive=True)
    try:
        local, remote = mappnb.attach(path), mappnb.attach("memory://copied")
        for name in ("start_ns", "op", "seq"):
            assert (local.sel()[name].values == remote.sel()[name].values).all()
        assert remote.steps.sizes == local.steps.sizes
    finally:
        memory.rm("/copied", recursive=True)
