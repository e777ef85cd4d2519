"""megatron_on_cpu: it lets megatron-core train, each patch is needed, and everything goes back."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mappnb.errors import DependencyError
from mappnb.testing import megatron_cpu
from mappnb.testing.megatron_cpu import PATCHES, PatchError, megatron_on_cpu, megatron_version

if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
    pytest.skip("needs torch and megatron-core", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[2]

# what a fresh interpreter finds in megatron.core: every global, every attribute of its classes, every code object
SNAPSHOT = """
import sys, types, json, torch

def snapshot():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("megatron.core") and isinstance(module, types.ModuleType):
            for owner_name, owner in [(name, module), *((f"{name}.{k}", v) for k, v in vars(module).items()
                                                        if isinstance(v, type) and v.__module__ == name)]:
                for key, value in vars(owner).items():
                    if key in ("__builtins__", "__warningregistry__", "__spec__", "__loader__", "__abstractmethods__",
                               "_abc_impl"):
                        continue
                    found[f"{owner_name}:{key}"] = value
                    inner = getattr(value, "__func__", value)
                    if isinstance(inner, types.FunctionType):
                        found[f"{owner_name}:{key}.__code__"] = inner.__code__
    found["Tensor.cuda"] = torch.Tensor.cuda, "cuda" in vars(torch.Tensor)
    found["meta_path"] = list(sys.meta_path)
    return found

def changed(before, after):
    return sorted(k for k in before if k in after and not (before[k] is after[k] or k in ("Tensor.cuda", "meta_path")
                                                           and before[k] == after[k]))
"""


def run_python(source, *, prelude=SNAPSHOT):
    """Run ``source`` in a fresh interpreter; give back the JSON of its last line."""
    code = prelude + textwrap.dedent(source)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.dist
def test_every_change_is_undone_when_megatron_was_imported_before():
    found = run_python("""
        from megatron.core.models.gpt import GPTModel
        import megatron.core.optimizer.distrib_optimizer, megatron.core.transformer.moe.token_dispatcher
        from mappnb.testing.megatron_cpu import megatron_on_cpu
        before = snapshot()
        with megatron_on_cpu(force=True) as handle:
            on, during = handle.enabled, changed(before, snapshot())
        print(json.dumps(dict(on=on, off=handle.enabled, during=during, after=changed(before, snapshot()))))
    """)
    assert found["on"]
    assert not found["off"]
    assert found["after"] == []
    during = set(found["during"])
    random = "megatron.core.tensor_parallel.random"
    assert {f"{random}:torch", f"{random}.CudaRNGStatesTracker:fork", f"{random}:_get_cuda_rng_state"} <= during
    assert {"megatron.core.jit:jit_fuser", "Tensor.cuda", "meta_path"} <= during
    assert "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32.__code__" in during
    assert "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu" in during
    assert any(name.endswith(":bias_gelu") for name in during), "compiled functions run eagerly"


@pytest.mark.dist
def test_every_change_is_undone_when_megatron_was_imported_meanwhile():
    found = run_python("""
        from mappnb.testing.gpt import TrainSettings, train
        from mappnb.testing.megatron_cpu import megatron_on_cpu
        handle = megatron_on_cpu(force=True)                 # plain call, before any import of megatron
        settings = TrainSettings(steps=2, layers=2, hidden=32, sequence_length=16, global_batch=2)
        first = train(settings).losses
        still_on = handle.enabled                            # train() found the patches on, so it leaves them on
        import megatron.core.jit, megatron.core.transformer.moe.moe_utils
        import megatron.core.transformer.moe.token_dispatcher
        handle.disable()
        left = []
        for key, value in snapshot().items():
            origin = getattr(value, "__module__", None) or type(value).__module__
            if "megatron_standins" in str(origin) or value is not torch and getattr(value, "__name__", "") == "torch":
                left.append(key)
            if hasattr(value, "co_consts") and "torch.FloatTensor" in value.co_consts:
                left.append(key)
        loaders = [type(m.__loader__).__name__ for n, m in sys.modules.items() if n.startswith("megatron.core")]
        again = train(settings).losses                       # and on again, now with megatron loaded
        fuser = megatron.core.jit.jit_fuser
        print(json.dumps(dict(first=first, again=again, left=left, still_on=still_on, compiles=fuser is torch.compile,
                              loaders=sorted(set(loaders)), own_cuda="cuda" in vars(torch.Tensor))))
    """)
    assert found["still_on"]
    assert found["left"] == []
    assert found["compiles"]
    assert not found["own_cuda"]
    assert not any("Patching" in name for name in found["loaders"])
    assert found["first"] == found["again"]


@pytest.mark.dist
@pytest.mark.slow
def test_each_patch_is_needed():
    """Ablation: without P1 to P3, P5 and P7 a single process fails where PATCHES says; P6 only saves time."""
    found = run_python(
        """
        import traceback
        from mappnb.testing.gpt import TrainSettings, train
        from mappnb.testing.megatron_cpu import PATCHES, megatron_on_cpu
        found = {}
        for name in ("", *PATCHES):
            with megatron_on_cpu(patches=set(PATCHES) - {name}, force=True):
                size = dict(steps=1, layers=2, hidden=32, sequence_length=16, global_batch=2)
                settings = TrainSettings(experts=4 if name.startswith("moe") else 0, **size)
                try:
                    train(settings)
                except Exception as err:
                    files = [frame.filename for frame in traceback.extract_tb(err.__traceback__)]
                    inside = [file for file in files if "/megatron/core/" in file]
                    found[name] = inside[-1].split("/megatron/core/")[1] if inside else files[-1]
        print(json.dumps(found))
        """
    )
    assert "" not in found, "with all patches it trains"
    for name in ("torch_proxy", "factories", "rng", "type_strings", "moe_router"):
        assert found[name] == PATCHES[name].first_failure.split(":")[0], (name, found)


def test_patches_are_documented():
    assert [patch.number for patch in PATCHES.values()] == [f"P{i}" for i in range(1, 9)]
    assert all(patch.what and patch.first_failure and patch.name == name for name, patch in PATCHES.items())


def test_nothing_happens_where_cuda_is_available(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    with megatron_on_cpu() as handle:
        assert not handle.enabled
        assert handle.patches == ()
        assert sys.meta_path == before
    assert "disabled" in repr(handle)


def test_nested_use_leaves_the_outer_one_on():
    with megatron_on_cpu(force=True) as outer:
        with megatron_on_cpu() as inner:
            assert inner.enabled
        assert outer.enabled
        with pytest.raises(PatchError, match=r"call disable\(\) on the first handle"):
            megatron_on_cpu(patches=["rng"])
    assert not outer.enabled
    outer.disable()  # a second time: no effect


def test_unknown_patch_is_named_with_a_suggestion():
    with pytest.raises(PatchError, match=r"unknown patch 'rgn'; known: torch_proxy, .*; did you mean 'rng'\?"):
        megatron_on_cpu(patches=["rgn"])


def test_missing_megatron_names_the_cure(monkeypatch):
    monkeypatch.setattr(megatron_cpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install mappnb\[megatron\]"):
        megatron_on_cpu()


def test_untested_version_warns(monkeypatch):
    monkeypatch.setattr(megatron_cpu, "megatron_version", lambda: "0.99.0")
    with pytest.warns(
        UserWarning, match=r"megatron-core 0\.99\.0 was not tested .*pip install megatron-core==0\.16\.1"
    ):
        megatron_on_cpu(force=True).disable()


def test_version_is_read_without_importing_megatron():
    source = """
        import json, sys
        from mappnb.testing.megatron_cpu import megatron_version
        version = megatron_version()
        print(json.dumps([version, "megatron.core" in sys.modules]))
    """
    found = run_python(source, prelude="")
    assert found == [megatron_version(), False]


def test_random_states_fork_and_come_back():
    torch = pytest.importorskip("torch")
    with megatron_on_cpu(force=True):
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        tracker.add("a", 1)
        tracker.add("b", 2)
        with pytest.raises(ValueError, match="in use already"):
            tracker.add("c", 2)
        outside = torch.get_rng_state()
        with tracker.fork("a"):
            first = torch.rand(3)
            with tracker.fork("b"):
                torch.rand(5)
            second = torch.rand(3)
        assert torch.equal(outside, torch.get_rng_state())
        torch.manual_seed(1)
        assert torch.equal(torch.cat([first, second]), torch.rand(6)), "b did not disturb a"
        with tracker.fork("a"):
            assert not torch.equal(first, torch.rand(3)), "a goes on where it was"
        with pytest.raises(ValueError, match="never added"), tracker.fork("zzz"):
            pass
        torch.set_rng_state(outside)
