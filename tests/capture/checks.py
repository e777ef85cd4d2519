"""Checks of recorded events that the tests of all probes share; none of them asks the recorder what should be there."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from typing import Any

from mappnb.terms import COLLECTIVE_OPS, P2P_OPS, Flag

__all__ = ["assert_collectives_match", "assert_nested", "assert_p2p_match", "patched_attributes"]

Events = list[dict[str, Any]]


def assert_collectives_match(by_rank: dict[int, Events], groups: dict[int, dict[str, Any]]) -> int:
    """Every (group, seq) is there once on every member, with equal op, and equal bytes but for all_to_all."""
    calls: dict[tuple[int, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank, events in by_rank.items():
        for event in events:
            if event["op"] in COLLECTIVE_OPS:
                key = (event["group"], event["seq"])
                assert rank not in calls[key], f"rank {rank} has {event['op']} {key} twice"
                calls[key][rank] = event
    last = defaultdict(int)
    for (group, seq), members in calls.items():
        last[group] = max(last[group], seq)
        assert sorted(members) == sorted(groups[group]["ranks"]), (group, seq, sorted(members))
        assert len({event["op"] for event in members.values()}) == 1
        if next(iter(members.values()))["op"] != "all_to_all":
            assert len({event["bytes"] for event in members.values()}) == 1, members
            assert len({event["peer"] for event in members.values()}) == 1, members
    assert len(calls) == sum(seq + 1 for seq in last.values()), "sequence numbers have gaps"
    return len(calls)


def assert_p2p_match(by_rank: dict[int, Events]) -> int:
    """Each send has its receive, with equal bytes and dtype, and each pair counts from 0."""
    sides: dict[str, dict[tuple[int, int, int, int], dict[str, Any]]] = {"send": {}, "recv": {}}
    for rank, events in by_rank.items():
        for event in events:
            if event["op"] in P2P_OPS:
                ends = (rank, event["peer"]) if event["op"] == "send" else (event["peer"], rank)
                key = (event["group"], *ends, event["seq"])
                assert key not in sides[event["op"]]
                sides[event["op"]][key] = event
    assert sides["send"].keys() == sides["recv"].keys()
    for key, sent in sides["send"].items():
        received = sides["recv"][key]
        assert (sent["bytes"], sent["dtype"]) == (received["bytes"], received["dtype"])
    return len(sides["send"])


def assert_nested(events: Events) -> None:
    """Within a thread, no two synchronous events overlap in part; none was left open."""
    for thread in {event["thread"] for event in events}:
        stack: list[int] = []
        for event in events:
            if event["thread"] != thread or event["flags"] & Flag.ASYNC:
                continue
            assert not event["flags"] & (Flag.REPAIRED | Flag.OPEN | Flag.FAILED), event
            while stack and stack[-1] <= event["start_ns"]:
                stack.pop()
            end_ns = event["start_ns"] + event["duration_ns"]
            assert not stack or end_ns <= stack[-1], f"{event} reaches out of the event around it"
            stack.append(end_ns)


def patched_attributes() -> dict[str, Any]:
    """Every attribute that a probe may replace, by name, as an identity that a second call can be compared with."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup, Work

    owners: list[Any] = [ProcessGroup, Work, dist, dist.distributed_c10d, dist.Reducer, torch, torch.serialization]
    owners += [torch.autograd, torch.nn.parallel.DistributedDataParallel]
    names = ["torch.distributed._functional_collectives", "torch.distributed.checkpoint"]
    names += ["megatron.core.pipeline_parallel.schedules", "megatron.core.dist_checkpointing"]
    names += ["torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"]
    owners += [sys.modules[name] for name in names if name in sys.modules]
    for module_name, class_names in {
        "megatron.core.optimizer.optimizer": ["MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"],
        "megatron.core.distributed.param_and_grad_buffer": ["_ParamAndGradBucketGroup"],
        "megatron.core.models.common.language_module.language_module": ["LanguageModule"],
        "megatron.core.transformer.moe.router": ["TopKRouter"],
        "torch.distributed.pipelining.stage": ["_PipelineStageBase"],
        "torch.distributed.pipelining.schedules": ["PipelineScheduleSingle", "PipelineScheduleMulti"],
        "torch.utils.data.dataloader": ["_BaseDataLoaderIter"],
    }.items():
        if module_name in sys.modules:
            owners += [getattr(sys.modules[module_name], name) for name in class_names]
    found = {
        f"{owner.__module__ if isinstance(owner, type) else ''}.{owner.__name__}.{name}": id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value) or type(value).__name__ == "instancemethod"
    }
    module, optimizers = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    found["hooks"] = (
        len(module._global_forward_pre_hooks),
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
        len(gc.callbacks),
        [type(finder).__name__ for finder in sys.meta_path],
    )
    return found
