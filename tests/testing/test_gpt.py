"""The reference job: all layouts agree with one process, faults show, errors are clear, no process is left behind."""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from mappnb.errors import LayoutError
from mappnb.testing import gpt, rank_processes
from mappnb.testing import launcher as launch_module
from mappnb.testing.gpt import SettingsError, StepReport, TrainResult, TrainSettings
from mappnb.testing.launcher import LaunchError, launch

ROOT = Path(__file__).resolve().parents[2]
TINY = TrainSettings(hidden=64, sequence_length=32, steps=6, lr=3e-3)
TOLERANCE = 1e-5  # measured: layouts agree to 2e-7, a forgotten sum of norm gradients makes 3e-4
HAVE_MEGATRON = bool(importlib.util.find_spec("torch") and importlib.util.find_spec("megatron"))
needs_megatron = pytest.mark.skipif(not HAVE_MEGATRON, reason="needs torch and megatron-core")
dist = [pytest.mark.dist, needs_megatron, pytest.mark.timeout(300)]


@functools.cache
def single(**changes):
    """Losses and norms of one process, computed once per session."""
    return launch(dataclasses.replace(TINY, **changes), world_size=1)


@pytest.fixture(scope="session")
def reference():
    return single


def difference(result, expected):
    """Largest relative difference of any step's loss."""
    return max(abs(a - b) / b for a, b in zip(result.losses, expected.losses, strict=True))


def layout(name, world_size, *marks, **changes):
    return pytest.param(world_size, changes, id=name, marks=[*dist, *marks])


slow = pytest.mark.slow
LAYOUTS = [
    layout("tp2_pp2", 4, tp=2, pp=2),
    layout("pp2_vpp2", 2, pp=2, vpp=2),
    layout("tp2", 2, slow, tp=2),
    layout("pp2", 2, slow, pp=2),
    layout("dp2", 2, slow),
    layout("pp2_dp2", 4, slow, pp=2),
    layout("pp4", 4, slow, pp=4),
    layout("cp2", 2, slow, cp=2),
    layout("tp2_sp", 2, slow, tp=2, sequence_parallel=True),
    layout("dp2_distributed_optimizer_overlap", 2, slow, distributed_optimizer=True, overlap=True),
    layout("tp2_pp2_dp2", 8, slow, tp=2, pp=2),
    layout("tp2_gated", 2, slow, tp=2, gated_mlp=True),
    layout("pp2_untied_recompute", 2, slow, pp=2, untie=True, recompute=True),
    layout("cp2_tp2_sp", 4, slow, cp=2, tp=2, sequence_parallel=True),
    layout("moe_ep2", 2, slow, experts=4, ep=2),
    layout("moe_ep2_allgather", 2, slow, experts=4, ep=2, dispatcher="allgather"),
    layout("moe_ep2_tp2_sp", 4, slow, experts=4, ep=2, tp=2, sequence_parallel=True),
    layout("tp2_pp2_unequal_heads_padded", 4, slow, tp=2, pp=2, kv_heads=2, left_padding=7, micro_batch=2),
    layout("tp4_one_group_for_two_ranks", 4, slow, tp=4, kv_heads=2),
    layout("cp2_unequal_heads_padded", 2, slow, cp=2, kv_heads=2, left_padding=7, micro_batch=2),
    layout("tp2_pp2_dp2_everything", 8, slow, tp=2, pp=2, vpp=2, sequence_parallel=True, distributed_optimizer=True,
           overlap=True),
]  # fmt: skip
MODEL = (
    "experts",
    "gated_mlp",
    "untie",
    "kv_heads",
    "left_padding",
    "micro_batch",
)  # what changes more than the layout


@pytest.mark.parametrize(("world_size", "changes"), LAYOUTS)
def test_losses_equal_those_of_one_process(reference, world_size, changes):
    expected = reference(**{name: changes[name] for name in MODEL if name in changes})
    result = launch(dataclasses.replace(TINY, **changes), world_size=world_size)
    assert difference(result, expected) <= TOLERANCE
    norm_errors = [abs(a - b) / b for a, b in zip(result.grad_norms, expected.grad_norms, strict=True)]
    assert norm_errors[0] <= TOLERANCE
    assert max(norm_errors) <= 1e-3
    assert result.world_size == world_size
    assert result.losses[-1] < result.losses[0] - 0.2, "the model learns"


@pytest.mark.dist
@needs_megatron
def test_a_small_error_is_noticed(reference):
    """The tolerance discriminates: a learning rate that is wrong by one in a thousand is too much."""
    assert difference(single(lr=TINY.lr * 1.001), reference()) > TOLERANCE


def child_script(tmp_path, monkeypatch, body):
    """Have launch() run ``body`` in every rank before training starts."""
    script = tmp_path / "child.py"
    script.write_text(
        "import os, time, contextlib\nfrom mappnb.testing import fork_ranks, gpt\n"
        "from mappnb.testing.megatron_cpu import megatron_on_cpu\nmegatron_on_cpu(force=True)\n"
        + textwrap.dedent(body)
        + "\ngpt.exit_now(fork_ranks.main())\n"
    )
    monkeypatch.setattr(rank_processes, "FORK_MAIN", (str(script),))


@pytest.mark.dist
@needs_megatron
def test_forgotten_sequence_parallel_mark_is_noticed(reference, tmp_path, monkeypatch):
    """The tolerance discriminates: norms whose gradients are not summed over the tensor-parallel ranks."""
    child_script(
        tmp_path,
        monkeypatch,
        """
        from mappnb.testing import gpt_spec
        import torch

        class UnmarkedNorm:
            def __new__(cls, config, hidden_size, eps=1e-5, **_):
                return torch.nn.LayerNorm(hidden_size, eps=eps)

        gpt_spec.TorchNorm = UnmarkedNorm
        """,
    )
    broken = launch(dataclasses.replace(TINY, tp=2, sequence_parallel=True), world_size=2, start="fork")
    assert difference(broken, reference()) > TOLERANCE


@pytest.mark.dist
@pytest.mark.slow
@needs_megatron
def test_spawned_ranks_give_the_same_losses_and_report_each_step(reference):
    reports = []
    result = launch(TINY, world_size=2, start="spawn", on_line=reports.append)
    forked = launch(TINY, world_size=2, start="fork")
    assert result.losses == forked.losses, "bit for bit"
    assert difference(result, reference()) <= TOLERANCE
    assert [report.step for report in reports] == list(range(TINY.steps))
    assert tuple(report.loss for report in reports) == result.losses
    assert all(isinstance(report, StepReport) and report.tokens_per_s > 0 for report in reports)


@pytest.mark.dist
@pytest.mark.slow
@needs_megatron
def test_faults_slow_the_job_by_what_they_say():
    base = dataclasses.replace(TINY, pp=2, steps=5)
    normal_s = launch(base, world_size=2).median_step_s
    rank_s = launch(dataclasses.replace(base, slow_rank=1, slow_ms=80.0), world_size=2).median_step_s
    link_s = launch(dataclasses.replace(base, slow_link="0,1,80"), world_size=2).median_step_s
    assert rank_s - normal_s > 0.8 * 8 * 0.080, "8 microbatches, 80 ms each"
    assert link_s - normal_s > 0.5 * 8 * 0.080


@needs_megatron
def test_slow_link_delays_and_combines_with_other_wrappers(monkeypatch):
    pytest.importorskip("torch")
    import torch.distributed as torch_dist
    from torch._C._distributed_c10d import ProcessGroup, Work

    from mappnb.testing.faults import slow_link

    class FakeWork:
        pass

    calls = []
    monkeypatch.setattr(torch_dist, "get_rank", lambda: 1)
    monkeypatch.setattr(torch_dist, "get_global_rank", lambda group, peer: peer)
    monkeypatch.setattr(ProcessGroup, "recv", lambda group, tensors, peer, tag=0: FakeWork())
    monkeypatch.setattr(Work, "wait", lambda work: True)

    def wait_s(src):
        work = ProcessGroup.recv("group", [], src)
        start_s = time.perf_counter()
        assert Work.wait(work)
        return time.perf_counter() - start_s

    original = ProcessGroup.recv, Work.wait
    with slow_link(0, 1, 0.05):
        assert wait_s(0) >= 0.05
        assert wait_s(2) < 0.04, "another link"
    assert (ProcessGroup.recv, Work.wait) == original
    with slow_link(0, 1, 0.05):
        inner_recv, inner_wait = ProcessGroup.recv, Work.wait

        def recv(*args):  # somebody wraps it meanwhile, and stays longer
            calls.append("recv")
            return inner_recv(*args)

        def wait(work):
            calls.append("wait")
            return inner_wait(work)

        ProcessGroup.recv, Work.wait = recv, wait
        assert wait_s(0) >= 0.05
    assert (ProcessGroup.recv, Work.wait) == (recv, wait), "the other wrapper is not torn off"
    assert wait_s(0) < 0.04, "the delay is over"
    assert calls == ["recv", "wait"] * 2


RECORDER = """
    import mappnb
    @contextlib.contextmanager
    def record(run_dir, *, plan, **options):
        rank = os.environ["RANK"]
        open(f"{run_dir}/opened-{rank}-{plan}-{options['note']}", "w").close()
        if rank == options.get("broken"):
            raise RuntimeError("no space left on this rank")
        try:
            yield
        finally:
            open(f"{run_dir}/closed-{rank}", "w").close()
    mappnb.record = record
"""


@pytest.mark.dist
@pytest.mark.slow
@needs_megatron
def test_recording_wraps_the_training(tmp_path, monkeypatch):
    child_script(tmp_path, monkeypatch, RECORDER)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = dataclasses.replace(TINY, steps=1, run_dir=str(run_dir), plan="base", record_options={"note": "n"})
    launch(settings, world_size=2, start="fork")
    found = sorted(path.name for path in run_dir.iterdir())
    assert found == ["closed-0", "closed-1", "opened-0-base-n", "opened-1-base-n"]


@pytest.mark.dist
@needs_megatron
def test_failing_rank_is_named_and_the_others_end(tmp_path, monkeypatch):
    child_script(tmp_path, monkeypatch, RECORDER)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    options = {"note": "n", "broken": "1"}
    settings = dataclasses.replace(TINY, steps=500, pp=2, run_dir=str(run_dir), record_options=options)
    before = children()
    with pytest.raises(LaunchError, match=r"rank 1 of 2 failed with exit status 1.*all ranks were ended") as error:
        launch(settings, world_size=2, start="fork")
    assert error.value.rank == 1
    assert "RuntimeError: no space left on this rank" in error.value.stderr
    assert "TE and Apex" not in error.value.stderr
    assert not children() - before


@pytest.mark.dist
@pytest.mark.slow
@needs_megatron
def test_a_job_that_takes_too_long_says_where_it_was():
    settings = dataclasses.replace(TINY, pp=2, steps=5000, slow_rank=0, slow_ms=200.0)
    before = children()
    with pytest.raises(LaunchError, match=r"ended after \d+ s; still running: rank 0, 1") as error:
        launch(settings, world_size=2, timeout_s=15.0)
    assert "_train_step" in str(error.value), "the stack of each rank"
    assert not children() - before


LAUNCHER = """
import sys
from mappnb.testing.gpt import TrainSettings
from mappnb.testing import launch, rank_processes
rank_processes.FORK_MAIN = (sys.argv[2],) if sys.argv[2] else rank_processes.FORK_MAIN
launch(TrainSettings.from_json(sys.argv[1]), world_size=2, start=sys.argv[3],
       on_line=lambda report: print(report.step, flush=True))
"""


def start_launcher(settings, *, script="", start="auto"):
    """Run launch() in a process of its own; return it and its descendants once the job is in its second step."""
    command = [sys.executable, "-c", LAUNCHER, settings.to_json(), str(script), start]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "0\n", process.stderr.read()
    return process, psutil.Process(process.pid).children(recursive=True)


def children():
    """Processes that this one has started and that are still there; other test files keep helpers of their own."""
    return set(psutil.Process().children(recursive=True))


def all_gone(processes, limit_s):
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.dist
@needs_megatron
def test_ctrl_c_ends_all_ranks_cleanly(tmp_path, monkeypatch):
    child_script(tmp_path, monkeypatch, RECORDER)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = dataclasses.replace(TINY, pp=2, steps=5000, run_dir=str(run_dir), record_options={"note": "n"})
    process, ranks = start_launcher(settings, script=tmp_path / "child.py", start="fork")
    assert len(ranks) == 3
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert all_gone(ranks, 5.0)
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert "closed-0" in os.listdir(run_dir), "each recorder was closed"
    assert "closed-1" in os.listdir(run_dir)


@pytest.mark.dist
@pytest.mark.slow
@needs_megatron
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_ranks_do_not_outlive_a_killed_launcher(start):
    process, ranks = start_launcher(dataclasses.replace(TINY, pp=2, steps=5000), start=start)
    process.kill()
    process.communicate(timeout=20)
    assert all_gone(ranks, 10.0)


@pytest.mark.dist
@pytest.mark.slow
@needs_megatron
def test_runs_under_torchrun_with_flags(reference, tmp_path):
    result_path = tmp_path / "result.json"
    flags = ["--pp", "2", "--hidden", "64", "--sequence-length", "32", "--steps", "6", "--lr", "3e-3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "mappnb.testing.gpt", *flags, "--result", str(result_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = TrainResult.from_json(result_path.read_text())
    assert difference(result, reference()) <= TOLERANCE
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert [line["loss"] for line in lines] == list(result.losses)


def test_a_taken_port_is_tried_again(monkeypatch):
    tries = []

    def start_ranks(settings, *, world_size, files, start):
        tries.append(files.folder)
        files.path("stdout").touch()
        code = 0 if len(tries) == 2 else 1
        files.path("stderr").write_text("DistNetworkError: EADDRINUSE, address already in use")
        files.path("result").write_text(TrainResult((1.0,), (1.0,), (1.0,), 1, 1, 1.0, False).to_json())

        class Ranks:
            exit_codes = staticmethod(lambda: [code])
            signal = kill = staticmethod(lambda *_: None)

        return Ranks()

    monkeypatch.setattr(launch_module, "start_ranks", start_ranks)
    monkeypatch.setattr(launch_module, "megatron_version", lambda: "0.16.1")
    assert launch_module.launch(TINY, world_size=1).losses == (1.0,)
    assert len(tries) == 2
    assert not tries[0].exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 cannot be divided by kv_heads=3"),
        ({"layers": 6, "pp": 4}, r"layers=6 cannot be divided by pp \* vpp=4"),
        ({"layers": 4, "pp": 2, "vpp": 4}, r"layers=4 cannot be divided by pp \* vpp=8"),
        ({"heads": 4, "tp": 8, "hidden": 64}, "heads=4 cannot be divided by tp=8"),
        ({"vpp": 2}, "vpp=2 needs a pipeline: set pp to 2 or more"),
        ({"sequence_parallel": True}, "sequence_parallel needs tp > 1"),
        ({"cp": 4, "sequence_length": 20}, r"sequence_length=20 cannot be divided by 2 \* cp=8"),
        ({"ep": 2}, "ep=2 needs experts: set experts to a multiple of 2"),
        ({"experts": 3, "ep": 2}, "experts=3 cannot be divided by ep=2"),
        ({"experts": 1}, "each token goes to 2 experts"),
        ({"experts": 4, "tp": 2}, "need sequence_parallel=True"),
        ({"hidden": 30, "heads": 4}, "hidden=30 cannot be divided by heads=4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(LayoutError, match=message):
        TrainSettings(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more; found 0"),
        ({"tp": 2.0}, r"tp must be int; found 2\.0"),
        ({"left_padding": 64}, "left_padding=64 leaves no token of sequence_length=64"),
        ({"vocab": 100}, "vocab must be 256 or more"),
        ({"dropout": 1.5}, "dropout is a probability"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"clip": -1.0}, "clip must not be negative"),
        ({"hidden": 60, "heads": 12}, "must be even"),
        ({"slow_rank": 1}, "slow_rank and slow_ms go together"),
        ({"slow_link": "0-1-5"}, "cannot read slow_link '0-1-5': write SRC,DST,MS"),
        ({"slow_link": "1,1,5"}, "two different ranks"),
        ({"dispatcher": "alltoal"}, "must be one of 'alltoall', 'allgather'; found 'alltoal'; did you mean 'alltoall'"),
    ],
)
def test_values_that_cannot_work_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        TrainSettings(**changes)


@pytest.mark.parametrize(
    ("changes", "world_size", "error", "message"),
    [
        ({"tp": 2, "pp": 2}, 6, LayoutError, r"world_size=6 is not a multiple of tp \* pp \* cp = 2 \* 2 \* 1 = 4"),
        ({}, 3, LayoutError, r"global_batch=8 cannot be divided by micro_batch \* dp \(dp = 3\)=3"),
        ({"experts": 4, "ep": 4}, 2, LayoutError, "world_size / pp=2 cannot be divided by ep=4"),
        ({"pp": 4, "vpp": 2, "layers": 8, "global_batch": 6}, 4, LayoutError, "a multiple of pp=4 microbatches"),
        ({"slow_rank": 2, "slow_ms": 5.0}, 2, SettingsError, "slow_rank=2 does not exist: ranks are 0 to 1"),
        ({"pp": 4, "slow_link": "0,2,40"}, 4, SettingsError, "no pipeline messages to rank 2.*0,1, 1,0, 1,2"),
        ({"slow_link": "0,1,40"}, 2, SettingsError, "links of this layout: none, because pp=1"),
    ],
)
def test_launch_refuses_before_any_process_starts(monkeypatch, changes, world_size, error, message):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(error, match=message):
        launch(TrainSettings(**changes), world_size=world_size)


def test_links_of_the_interleaved_pipeline_close_the_ring():
    TrainSettings(pp=4, vpp=2, layers=8, slow_link="3,0,40").check(4)
    TrainSettings(tp=2, pp=2, slow_link="1,3,40").check(4)
    with pytest.raises(SettingsError, match="rank 0 sends no pipeline messages to rank 1"):
        TrainSettings(tp=2, pp=2, slow_link="0,1,40").check(4)


def test_settings_survive_json_and_flags():
    settings = TrainSettings(tp=2, sequence_parallel=True, lr=0.1 + 0.2, record_options={"a": [1]}, slow_link="0,1,5")
    assert TrainSettings.from_json(settings.to_json()) == settings
    assert hash(settings) == hash(TrainSettings.from_json(settings.to_json()))
    parser = gpt.argument_parser()
    flags = ["--tp", "2", "--sp", "--lr", repr(0.1 + 0.2), "--record-options", '{"a": [1]}', "--slow-link", "0,1,5"]
    assert TrainSettings.from_flags(parser.parse_args(flags)) == settings
    assert TrainSettings.from_flags(parser.parse_args([])) == TrainSettings()
    with pytest.raises(SettingsError, match="unknown setting 'step'; did you mean 'steps'"):
        TrainSettings.from_json('{"step": 3}')


def test_result_survives_json_exactly():
    result = TrainResult((0.1 + 0.2, 1 / 3), (2.0, 3.0), (1.0, 0.5), 4, 512, 7.5, False)
    assert TrainResult.from_json(result.to_json()) == result
    assert result.median_step_s == 0.5
    assert result.tokens_per_s == 1024


def test_bad_settings_end_the_rank_with_one_line(capsys):
    assert gpt.main(["--tp", "3"]) == gpt.USAGE_ERROR
    assert capsys.readouterr().err == "mappnb: LayoutError: heads=4 cannot be divided by tp=3: change one of them\n"


def test_importing_the_launcher_imports_no_torch():
    code = "import sys, mappnb.testing.launcher, mappnb.testing.gpt; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
