"""mappnb exec: programs are recorded without a change to their code, and nothing else about them changes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from capture.programs import wait_until

import mappnb
from mappnb.capture.autostart import is_launcher, program_of
from mappnb.capture.execute import check_run_dir, execute
from mappnb.cli import main
from mappnb.errors import CaptureError, RunExistsError
from mappnb.testing.runs import make_run

ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
TRAIN = """
    import os, sys, torch
    torch.set_num_threads(1)

    def train(num=3):
        model = torch.nn.Linear(3, 1)
        if torch.distributed.is_initialized():
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(num):
            model(torch.ones(1, 3)).mean().backward()
            optimizer.step()
"""


def write(path: Path, body: str, head: str = TRAIN) -> str:
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return str(path)


@pytest.fixture
def run_exec(monkeypatch, capfd, tmp_path):
    """Run a program by ``mappnb exec`` in ``tmp_path``; returns what it wrote to stdout and stderr."""

    def run(run_dir, *program: str, status: int = 0, **env: str) -> tuple[str, str]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**ENV, **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        found = main(["exec", "--run-dir", str(run_dir), "--", *program])
        out, err = capfd.readouterr()
        assert found == status, f"{found}\n{out}\n{err}"
        return out, err

    return run


# ------------------------------------------------------------------------------------------------ what is a launcher
@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("python /usr/bin/torchrun --nproc-per-node 2 train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -mtorch.distributed.run train.py", True),
        ("python -u -X dev -m torch.distributed.launch train.py", True),
        ("python -m pip install x", True),
        ("python -m mappnb.cli exec -- python train.py", True),
        ("python -u -m mappnb.testing.gpt --steps 2", False),
        ("python -m mappnb.testing.gpt --run-dir runs/a", True),
        ("python -m mappnb.testing.gpt --settings-json {}", True),
        ("python /venv/bin/accelerate launch train.py", True),
        ("python train.py --data /data/accelerate", False),
        ("python train.py pip", False),
        ("python -W ignore train.py torchrun", False),
        ("python -m torch.distributed.checkpoint.tool", False),
        ("python -m mytrainer -m torchrun", False),
        ("python -c pass", False),
        ("python", False),
    ],
)
def test_launchers_are_told_from_programs(line, launcher):
    assert is_launcher(line.split()) is launcher


def test_the_reference_job_ends_a_recording_before_it_leaves(monkeypatch):
    from mappnb.capture import marks
    from mappnb.testing import gpt

    done = []
    monkeypatch.setattr(marks, "current", lambda: SimpleNamespace(stop=lambda: done.append("stopped")))
    monkeypatch.setattr(os, "_exit", done.append)
    gpt.exit_now(3)
    assert done == ["stopped", 3]


def test_program_of_a_command_line():
    assert program_of(["python", "-X", "dev", "-u", "a.py", "-m", "b"]) == ("", "a.py")
    assert program_of(["python", "-Wignore", "-c", "print(1)", "x"]) == ("-c", "print(1)")
    assert program_of(["python", "-i"]) == ("", "")


# ------------------------------------------------------------------------------------------------ before it starts
def test_messages_before_anything_starts(tmp_path):
    cases = {
        "no program": (([],), {}, "no program; write: mappnb exec --run-dir RUN -- python train.py"),
        "unknown": ((["trian.py"],), {}, "no program 'trian.py' on PATH; write the interpreter too"),
        "plan": ((["true"],), {"plan": "defualt"}, "unknown plan 'defualt'.*did you mean 'default'"),
        "no interpreter": ((["./script"],), {}, "cannot be started.*write the interpreter too"),
    }
    script = tmp_path / "script"
    script.write_bytes(b"\x00\x01not a program")
    script.chmod(0o755)
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for arguments, options, message in cases.values():
            with pytest.raises(CaptureError, match=message):
                execute(*arguments, run_dir=str(tmp_path / "run"), **options)
    finally:
        os.chdir(before)
    assert not (tmp_path / "run").exists()


def test_a_taken_run_directory_is_refused_before_training(tmp_path, run_exec):
    out, err = run_exec(make_run(tmp_path / "run"), sys.executable, "-c", "print('trained')", status=2)
    assert "holds a run already" in err and "--resume" in err and "trained" not in out


def test_which_run_directories_are_free(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        check_run_dir(tmp_path / name, resume=False)
    for name in ("file", "other"):
        with pytest.raises(RunExistsError, match="new or an empty folder"):
            check_run_dir(tmp_path / name, resume=False)

    def begun(name: str, *, job: str = "", host: str = "") -> Path:
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", job)
        if host:
            monkeypatch.setattr(socket, "gethostname", lambda: host)
        session = mappnb.record(tmp_path / name, probes=[], rank=0, world_size=2).start()
        session.stop()
        monkeypatch.undo()
        monkeypatch.delenv("RANK", raising=False)
        return tmp_path / name

    elsewhere = begun("elsewhere", host="node2")
    check_run_dir(elsewhere, resume=False)  # rank 1 of a job whose rank 0 is on another host
    for file in [elsewhere, *elsewhere.rglob("*")]:
        os.utime(file, (time.time() - 3600, time.time() - 3600))
    with pytest.raises(RunExistsError):
        check_run_dir(elsewhere, resume=False)
    check_run_dir(elsewhere, resume=True)
    here = begun("here")
    with pytest.raises(RunExistsError):
        check_run_dir(here, resume=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_run_dir(here, resume=False)  # mpirun -n 2 mappnb exec -- python train.py
    monkeypatch.undo()
    requeued = begun("requeued", job="77")
    with pytest.raises(RunExistsError):
        check_run_dir(requeued, resume=False)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    check_run_dir(requeued, resume=False)


# ---------------------------------------------------------------------------- any program, with a torch that loads fast
FAKE_TORCH = """
class cuda:
    is_available = is_initialized = staticmethod(lambda: False)

class version:
    cuda = hip = None
"""


@pytest.fixture
def fake_torch(tmp_path):
    """A module that is called torch, so that processes arm and begin without the seconds that the real one takes."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "torch.py").write_text(FAKE_TORCH)
    return {"PYTHONPATH": str(tmp_path / "lib")}


def test_only_the_process_that_trains_records(tmp_path, fake_torch, run_exec):
    """Its helpers do not, nor what runs before it trains; the user's own sitecustomize runs; the exit status is passed on."""
    (tmp_path / "lib" / "sitecustomize.py").write_text("import os\nos.environ['CUSTOMIZED'] = __name__\n")
    script = write(
        tmp_path / "train.py",
        """
        import multiprocessing, os, subprocess, sys
        assert sys.modules["sitecustomize"].__file__.endswith("lib/sitecustomize.py") and os.environ["CUSTOMIZED"]
        import torch, mappnb

        def helper():
            import torch
            from mappnb.capture import marks
            if marks.current() is not None:
                marks.current()._writer.flush(5.0)

        if __name__ == "__main__":
            def helpers():
                subprocess.run([sys.executable, "-c", "import torch, time; time.sleep(0.1)"], check=True)
                for method in ("fork", "spawn", "forkserver"):
                    child = multiprocessing.get_context(method).Process(target=helper)
                    child.start(); child.join(); assert child.exitcode == 0, method

            helpers()
            assert not os.path.exists(os.environ["MAPPNB_RUN_DIR"]), "nothing has trained yet"
            for i in range(3):
                with mappnb.step():
                    pass
            from mappnb.capture import marks
            assert marks.current().flush()
            helpers()
            sys.exit(5)
        """,
        head="",
    )
    _, err = run_exec(tmp_path / "run", sys.executable, script, status=5, **fake_torch)
    assert "mappnb: recording into" in err and "not recording" not in err, err
    run = mappnb.attach(tmp_path / "run")
    assert list(run.incarnations[0].ranks) == [0] and run.meta["world_size"] == 1 and len(run.incarnations) == 1
    assert run.steps.step.values.tolist() == [0, 1, 2] and run.ranks.ended.tolist() == ["exit"]
    assert run.meta["degraded"] == {} and run.meta["problems"] == {}


def test_a_program_that_does_not_train_leaves_no_trace(tmp_path, fake_torch, run_exec):
    _, err = run_exec(tmp_path / "run", sys.executable, "-c", "import torch", **fake_torch)
    assert not (tmp_path / "run").exists()
    assert "nothing was recorded: no process initialised torch.distributed or took an optimizer step" in err
    run_exec(tmp_path / "run", "sh", "-c", "kill -TERM $$", status=143)
    run_exec(tmp_path / "run", "sh", "-c", "exit 7", status=7)


def test_a_program_that_records_itself_keeps_its_own_recording(tmp_path, fake_torch, run_exec):
    script = write(
        tmp_path / "train.py",
        """
        import torch, mappnb
        with mappnb.record("own"):
            mappnb.step(); mappnb.step()
        """,
        head="",
    )
    _, err = run_exec(tmp_path / "run", sys.executable, script, **fake_torch)
    assert "gives way" in err
    assert mappnb.attach(tmp_path / "own").ranks.ended.tolist() == ["finished"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_the_program_and_its_status_comes_back(tmp_path, fake_torch, number, status):
    code = "import torch, mappnb, time\nmappnb.step()\nprint('runs', flush=True)\ntime.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-m", "mappnb.cli", "exec", "--run-dir", str(tmp_path / "run"), "--", sys.executable, "-c", code],
        env={**os.environ, **ENV, **fake_torch}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout.readline() == "runs\n"
    wait_until(lambda: list((tmp_path / "run").rglob("open-*")))
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(child.pid, number)
    else:
        child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert child.returncode == status, err
    reason = {signal.SIGINT: "KeyboardInterrupt", signal.SIGTERM: "signal SIGTERM"}[number]
    assert mappnb.attach(tmp_path / "run").ranks.ended.tolist() == [reason]


# --------------------------------------------------------------------------------------------------- real torch programs
@pytest.mark.dist
def test_a_torch_program_with_data_workers(tmp_path, run_exec):
    pytest.importorskip("torch")
    script = write(
        tmp_path / "train.py",
        """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return torch.ones(3)

        if __name__ == "__main__":
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"):
                model(batch).mean().backward()
                optimizer.step()
            print("trained")
        """,
    )
    out, _ = run_exec(tmp_path / "run", sys.executable, script)
    assert out == "trained\n"
    run = mappnb.attach(tmp_path / "run")
    assert len(run.incarnations) == 1 and list(run.incarnations[0].ranks) == [0]
    assert run.steps.step.values.tolist() == [0, 1, 2, 3] and run.ranks.ended.tolist() == ["exit"]
    assert run.sel(op="next_batch").sizes["event"] >= 4 and run.meta["degraded"] == {}


@pytest.mark.dist
def test_data_workers_that_are_spawned(tmp_path, run_exec):
    pytest.importorskip("torch")
    script = write(
        tmp_path / "train.py",
        """
        if __name__ == "__main__":
            train(2)
            for batch in torch.utils.data.DataLoader(torch.ones(4, 3), num_workers=1, multiprocessing_context="spawn"):
                train(1)
        """,
    )
    run_exec(tmp_path / "run", sys.executable, script)
    run = mappnb.attach(tmp_path / "run")
    assert len(run.incarnations) == 1 and list(run.incarnations[0].ranks) == [0] and run.meta["degraded"] == {}
    assert run.steps.step.values.tolist() == list(range(6))


GLOO = """
    import datetime
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    train()
    torch.distributed.destroy_process_group()
"""


def check_two_ranks(path, incarnation: int = 0) -> None:
    run = mappnb.attach(path)
    assert len(run.incarnations) == incarnation + 1
    assert list(run.incarnations[incarnation].ranks) == [0, 1] and run.meta["world_size"] == 2
    assert run.meta["degraded"] == {} and run.meta["problems"] == {}
    assert {i["ended"]["reason"] for i in run.incarnations[incarnation].ranks.values()} == {"exit"}
    assert run.steps.sizes == {"step": 3, "rank": 2} and (run.steps.incarnation == incarnation).all()
    assert run.sel(category="collective", incarnation=incarnation).sizes["event"] > 0


@pytest.mark.dist
def test_torchrun(tmp_path, run_exec):
    pytest.importorskip("torch")
    script = write(tmp_path / "train.py", GLOO)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_exec(tmp_path / "run", *torchrun, script)
    check_two_ranks(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.dist
def test_torchrun_restart_is_the_next_incarnation(tmp_path, run_exec):
    pytest.importorskip("torch")
    body = """
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # a store of its own: gloo meets its dead predecessor's address in the agent's (torch 2.13, with no mappnb at all)
        torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store{attempt}", rank=rank, world_size=size)
        first = attempt == "0"
        train(2 if first else 3)
        if first:
            sys.exit(3)
        torch.distributed.destroy_process_group()
    """
    script = write(tmp_path / "train.py", body)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_exec(tmp_path / "run", *torchrun, "--max-restarts", "1", script)
    check_two_ranks(tmp_path / "run", incarnation=1)
    first = mappnb.attach(tmp_path / "run").incarnations[0].ranks
    assert {i["ended"]["reason"] for i in first.values()} <= {"exit", "signal SIGTERM"}


@pytest.mark.dist
def test_processes_that_the_program_spawns_itself(tmp_path, run_exec):
    """The first process is no rank: it must not take the run directory, however long it waits."""
    pytest.importorskip("torch")
    body = """
        def rank_main(rank, port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
            train()
            torch.distributed.destroy_process_group()

        if __name__ == "__main__":
            import socket
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            torch.multiprocessing.spawn(rank_main, args=(port,), nprocs=2)
    """
    run_exec(tmp_path / "run", sys.executable, write(tmp_path / "train.py", body))
    check_two_ranks(tmp_path / "run")
