"""The collective probe on gloo ranks: complete, alike on all members, transparent, bit-equal, and gone afterwards."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
from capture.checks import assert_collectives_match, assert_nested, assert_p2p_match, patched_attributes
from capture.fake_session import FakeSession
from capture.ranks import run_ranks

from mappnb.capture._groups import group_id
from mappnb.capture.collectives import CollectiveProbe
from mappnb.terms import COLLECTIVE_OPS, Flag

dist_test = pytest.mark.dist


def test_group_ids():
    ids = {group_id(ranks, backend, ordinal) for ranks in ((0, 1), (0, 2)) for backend in "ab" for ordinal in (0, 1)}
    assert len(ids) == 8 and all(0 <= ident < 2**63 for ident in ids)
    assert group_id((1, 0), "gloo", 0) == group_id((0, 1), "gloo", 0)


def test_install_before_torch_distributed_is_imported_is_harmless():
    session = FakeSession().start(CollectiveProbe())
    session.stop()
    assert not session.failures


# ---------------------------------------------------------------------------------------------------- all operations
def all_operations() -> dict[str, Any]:
    """One of each, with a count of method calls that does not come from the probe."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup

    from mappnb.capture._collective_calls import METHODS

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    before_group = dist.new_group()
    counted: Counter[str] = Counter()

    def counting(name: str, original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        return method

    originals = {name: vars(ProcessGroup)[name] for name in [*METHODS, "send", "recv"] if name in vars(ProcessGroup)}
    for name, original in originals.items():
        setattr(ProcessGroup, name, counting(name, original))
    before = patched_attributes()
    session = FakeSession().start(CollectiveProbe())
    groups = [before_group, dist.new_group(), dist.new_group(), dist.new_group([0, 1])]

    t = torch.arange(6, dtype=torch.float32)
    dist.all_reduce(t.clone())
    for group in groups[:3]:
        dist.all_reduce(t.clone(), group=group)
    if rank < 2:
        dist.all_reduce(t.to(torch.int64), group=groups[3])
    dist.broadcast(t, src=2)
    dist.reduce(t, dst=1)
    dist.all_gather([torch.empty(6) for _ in range(size)], t)
    dist.all_gather_into_tensor(torch.empty(6 * size), t)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * size))
    dist.all_to_all_single(torch.empty(size), torch.ones(size))
    dist.gather(t, [torch.empty(6) for _ in range(size)] if rank == 1 else None, dst=1)
    dist.scatter(torch.empty(6), [t for _ in range(size)] if rank == 0 else None, src=0)
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    work = dist.all_reduce(t.clone(), async_op=True)
    work.wait()
    with dist._coalescing_manager(async_ops=True) as coalesced:
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
    coalesced.wait()
    lost = dist.all_reduce(torch.ones(5), async_op=True)
    right, left = (rank + 1) % size, (rank - 1) % size
    for _ in range(2):
        requests = [dist.isend(t, right), dist.irecv(torch.empty(6), left)]
        for request in requests:
            request.wait()
    if rank == 0:
        dist.send(t, 1)
    elif rank == 1:
        dist.recv(torch.empty(6))  # from any source
    issued = dict(counted)
    dist.barrier()
    del lost
    session.stop()
    gone = patched_attributes() == before
    events = session.events()
    dist.destroy_process_group()
    return {
        "events": events,
        "issued": issued,
        "groups": session.groups,
        "failures": [repr(err) for _, err in session.failures],
        "gone": gone,
    }


@dist_test
def test_every_operation_once_on_every_member():
    ranks = run_ranks(all_operations, 3)
    groups: dict[int, Any] = {}
    for result in ranks:
        assert not result["failures"] and result["gone"]
        for ident, group in result["groups"].items():
            assert groups.setdefault(ident, group)["ranks"] == group["ranks"]
    everyone = [group["ordinal"] for group in groups.values() if group["ranks"] == [0, 1, 2]]
    assert sorted(everyone) == [0, 1, 2, 3] and len(groups) == 5
    by_rank = {rank: result["events"] for rank, result in enumerate(ranks)}
    num_calls = assert_collectives_match(by_rank, groups)
    assert assert_p2p_match(by_rank) == 3 * 2 + 1
    for result in ranks:
        assert_nested(result["events"])
        recorded = sum(event["op"] in COLLECTIVE_OPS for event in result["events"])
        p2p = sum(event["op"] in ("send", "recv") for event in result["events"])
        num_p2p = result["issued"].get("send", 0) + result["issued"].get("recv", 0)
        assert recorded == sum(result["issued"].values()) - num_p2p + 1  # and the barrier after the count
        assert p2p == num_p2p + (1 if result is ranks[1] else 0)  # recv_anysource is a method of its own
    assert num_calls == 20


@dist_test
def test_what_is_recorded_of_an_operation():
    events = run_ranks(all_operations, 3)[1]["events"]
    first = {op: next(e for e in events if e["op"] == op) for op in COLLECTIVE_OPS}
    sizes = {op: first[op]["bytes"] for op in first}
    assert sizes == {
        "all_reduce": 24, "broadcast": 24, "reduce": 24, "all_gather": 72, "reduce_scatter": 24, "all_to_all": 12,
        "gather": 72, "scatter": 72, "barrier": 0,
    }  # fmt: skip
    assert [first[op]["peer"] for op in ("broadcast", "reduce", "gather", "scatter", "all_reduce")] == [2, 1, 1, 0, -1]
    assert "int64" in {e["dtype"] for e in events if e["op"] == "all_reduce"}
    asynchronous = [e for e in events if e["op"] == "all_reduce" and e["flags"] & Flag.ASYNC]
    waits = [e for e in events if e["op"] == "wait"]
    assert [bool(e["flags"] & Flag.CLIPPED) for e in asynchronous] == [False, False, True]
    for event in asynchronous[:2]:
        (wait,) = [
            w for w in waits if (w["group"], w["seq"], w["name"]) == (event["group"], event["seq"], "all_reduce")
        ]
        assert event["start_ns"] <= wait["start_ns"]
        assert event["start_ns"] + event["duration_ns"] == wait["start_ns"] + wait["duration_ns"]
    any_source = [e for e in events if e["op"] == "recv" and not e["flags"] & Flag.ASYNC]
    assert [(e["peer"], e["seq"]) for e in any_source] == [(0, 2)]


# ------------------------------------------------------------------------------------------------------ flight recorder
def against_flight_recorder() -> tuple[int, int]:
    """Count collectives by torch's own flight recorder."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "1000"
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace_json

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):  # the reducer broadcasts its bucket order once, in C++
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    first = len(json.loads(_dump_fr_trace_json()).get("entries", []))
    session = FakeSession().start(CollectiveProbe())
    import torch.distributed._functional_collectives as functional

    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(3))
        (functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1).sum()
        functional.all_gather_single(torch.ones(2, 3), 1, dist.group.WORLD).sum()
    session.stop()
    assert not session.failures, session.failures
    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    return len(entries) - first, sum(event["op"] in COLLECTIVE_OPS for event in session.events())


@dist_test
def test_count_equals_the_flight_recorders():
    for seen, recorded in run_ranks(against_flight_recorder, 2):
        assert recorded == 12
        assert seen in (0, recorded)  # 0: this build's flight recorder does not keep gloo's collectives


# ------------------------------------------------------------------------------------------------------- transparency
def faults() -> dict[str, Any]:
    """Errors of the program, and errors of ours."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    session = FakeSession().start(CollectiveProbe())
    outcome: dict[str, Any] = {}
    try:
        dist.group.WORLD.allreduce("no tensor")
    except TypeError:
        outcome["theirs"] = "passed through"
    outcome["still on"] = session.recorder.enabled
    failed = [event["flags"] for event in session.events()]
    probe = session._probes[0]
    probe._operations.make = None  # our code breaks now
    t = torch.ones(2)
    dist.all_reduce(t)
    dist.all_reduce(t)
    outcome.update(value=t.tolist(), failures=len(session.failures), off=not session.recorder.enabled, failed=failed)
    session.stop()
    return outcome


@dist_test
def test_errors_pass_through_and_ours_switch_recording_off():
    for outcome in run_ranks(faults, 2):
        assert outcome["theirs"] == "passed through" and outcome["still on"]
        assert outcome["failed"] == [Flag.FAILED]
        assert outcome["value"] == [4.0, 4.0]  # each call was made exactly once
        assert outcome["failures"] == 1 and outcome["off"]


# ---------------------------------------------------------------------------------------------------------------- DDP
def ddp_gradients(dtype_name: str, record: bool, as_view: bool) -> dict[str, Any]:
    """Three steps of a small model; gradients and weights, bit for bit."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.GELU(), torch.nn.Linear(13, 3))
    model = model.to(getattr(torch, dtype_name))
    session = FakeSession()
    if record:
        session.start(CollectiveProbe())
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    gradients = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        ddp(torch.randn(4, 7, dtype=getattr(torch, dtype_name))).float().pow(2).mean().backward()
        optimizer.step()
        gradients.append([p.grad.double().tolist() for p in ddp.parameters()])
    session.stop()
    after = ddp(torch.randn(4, 7, dtype=getattr(torch, dtype_name))).float().mean()
    after.backward()  # the hook stays, without recording
    gradients.append([p.grad.double().tolist() for p in ddp.parameters()])
    return {
        "gradients": gradients,
        "events": session.events(),
        "groups": session.groups,
        "meta": session.meta,
        "failures": [repr(err) for _, err in session.failures],
    }


def both_ways(dtype_name: str, as_view: bool) -> list[dict[str, Any]]:
    """Without and with recording, in one job."""
    return [ddp_gradients(dtype_name, record, as_view) for record in (False, True)]


@dist_test
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("dtype_name", "as_view"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_ddp_hook_changes_no_bit(world_size, dtype_name, as_view):
    ranks = run_ranks(both_ways, world_size, dtype_name, as_view)
    for plain, recorded in ranks:
        assert not recorded["failures"]
        assert recorded["gradients"] == plain["gradients"]
    reductions = [sum(e["op"] == "all_reduce" for e in recorded["events"]) for _, recorded in ranks]
    if as_view and world_size == 3:
        assert "not bit-equal" in ranks[0][1]["meta"]["ddp_not_recorded"][0]
    else:
        assert min(reductions) >= 3 and len(set(reductions)) == 1  # one per bucket and step
        assert_collectives_match({r: rec["events"] for r, (_, rec) in enumerate(ranks)}, ranks[0][1]["groups"])


def user_hook() -> dict[str, Any]:
    """A hook of the user's, registered before or after ours."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    dist.init_process_group("gloo")
    session = FakeSession().start(CollectiveProbe())
    outcome: dict[str, Any] = {}
    calls: list[str] = []

    def hook(state, bucket):  # DDP reads annotations, and refuses strings
        calls.append("user")
        return default_hooks.allreduce_hook(None, bucket)

    for late in (False, True):
        torch.manual_seed(0)
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        if late:
            ddp(torch.ones(1, 3)).sum().backward()
            ddp.zero_grad()
        ddp.register_comm_hook(None, hook)
        ddp(torch.ones(1, 3) * (1 + dist.get_rank())).sum().backward()
        outcome[f"late={late}"] = (len(calls), ddp.module.bias.grad.tolist())
    session.stop()
    outcome["reductions"] = sum(e["op"] == "all_reduce" and not e["flags"] & Flag.CLIPPED for e in session.events())
    outcome["failures"] = [repr(err) for _, err in session.failures]
    return outcome


@dist_test
def test_hooks_of_the_user_are_called_and_recorded():
    for outcome in run_ranks(user_hook, 2):
        assert outcome == {
            "late=False": (1, [1.0, 1.0]),
            "late=True": (2, [1.0, 1.0]),
            "reductions": 3,
            "failures": [],
        }
