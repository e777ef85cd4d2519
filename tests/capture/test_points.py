"""Plans, the probe protocol, the table of capture points, and the patches that probes make."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from capture.fake_session import FakeSession

from mappnb.capture._patches import ImportWatch, Patches
from mappnb.capture.points import CAPTURE_POINTS, PLANS, Plan, Probe, build_probes, parse_plan, state_of
from mappnb.errors import CaptureError
from mappnb.terms import Op


def test_plans_by_name_and_by_value():
    assert parse_plan("base") is PLANS["base"]
    assert not PLANS["base"].modules and PLANS["default"].backward_modules
    own = replace(PLANS["default"], gc=False)
    assert parse_plan(own) is own


@pytest.mark.parametrize("plan", ["defualt", 3])
def test_unknown_plan_is_refused(plan):
    with pytest.raises(CaptureError, match="unknown plan"):
        parse_plan(plan)


def test_unknown_plan_message_helps():
    with pytest.raises(CaptureError, match="did you mean 'default'"):
        parse_plan("defualt")


def test_plans_that_cannot_work():
    with pytest.raises(CaptureError, match="telemetry_s"):
        Plan("x", telemetry_s=-1.0)
    with pytest.raises(CaptureError, match="needs modules=True"):
        Plan("x", modules=False)


def test_probes_follow_the_protocol():
    probes = build_probes(PLANS["default"])
    assert all(isinstance(probe, Probe) for probe in probes)
    assert [probe.name for probe in probes] == ["device", "collectives", "megatron", "torch", "gc"]
    assert "gc" not in [probe.name for probe in build_probes(replace(PLANS["default"], gc=False))]


def test_capture_points_name_every_operation():
    text = " ".join(point.name for point in CAPTURE_POINTS)
    ours = set(Op) - {Op.SPAN, Op.MODULE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BROADCAST, Op.REDUCE}
    missing = [op for op in ours - {Op.GATHER, Op.SCATTER} if op.value not in text]
    assert not missing
    assert all(point.what and point.when and point.source for point in CAPTURE_POINTS)


def test_state_is_shared_by_the_probes_of_a_session():
    one, two = FakeSession(), FakeSession()
    assert state_of(one) is state_of(one) is not state_of(two)


def test_patches_are_taken_back():
    class Base:
        def method(self):
            return 1

    class Child(Base):
        pass

    before = dict(vars(Child)), dict(vars(Base))
    patches = Patches()
    assert patches.wrap(Child, "method", lambda original: lambda self: original(self) + 1)
    assert patches.wrap(Base, "method", lambda original: lambda self: 10 * original(self))
    assert not patches.wrap(Base, "absent", lambda original: original)
    assert Child().method() == 2 and Base().method() == 10
    assert patches.undo() == []
    assert (dict(vars(Child)), dict(vars(Base))) == before


def test_somebody_elses_patch_is_left_alone():
    class Owner:
        def method(self):
            return 1

    patches = Patches()
    patches.wrap(Owner, "method", lambda original: lambda self: original(self) + 1)
    Owner.method = theirs = lambda self: 5
    assert patches.undo() == ["Owner.method"]
    assert Owner.method is theirs


def test_import_watch_sees_later_imports(tmp_path: Path, monkeypatch):
    (tmp_path / "watched_module.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[types.ModuleType] = []
    failures: list[str] = []
    watch = ImportWatch(lambda name, err: failures.append(name))
    finders = list(sys.meta_path)
    watch.when("watched_module", seen.append)
    watch.when("watched_module", lambda module: module.absent)
    watch.when("json", seen.append)
    import watched_module

    assert [module.__name__ for module in seen] == ["json", "watched_module"]
    assert watched_module.value == 3 and type(watched_module.__loader__).__name__ == "SourceFileLoader"
    assert failures == ["watched_module"]
    assert sys.meta_path == finders
    watch.when("never_imported", seen.append)
    assert len(sys.meta_path) == len(finders) + 1
    watch.stop()
    assert sys.meta_path == finders
    del sys.modules["watched_module"]
