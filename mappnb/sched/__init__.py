"""Pipeline schedules as data, their simulation and their planning."""

from __future__ import annotations

from mappnb.sched.action import Action, Transfer, TransferKind
from mappnb.sched.compare import Predictability, changed_costs, predictable
from mappnb.sched.costs import Costs, Empirical
from mappnb.sched.edges import edge_tolerance
from mappnb.sched.exact import Optimum, optimal_schedule
from mappnb.sched.fit import FittedCosts, fit_costs
from mappnb.sched.measure import cost_table
from mappnb.sched.placement import Placement
from mappnb.sched.plan import plan
from mappnb.sched.policies import Policy, hint, policy, simulate_policy
from mappnb.sched.registry import register, schedule, schedules
from mappnb.sched.replays import FittedLink, fit_link, recorded_schedule, replay_steps
from mappnb.sched.schedule import Schedule
from mappnb.sched.simulate import memory_over_time, monte_carlo, simulate
from mappnb.sched.stragglers import Straggler
from mappnb.sched.transformer import Device, Transformer

__all__ = [
    "Action",
    "Costs",
    "Device",
    "Empirical",
    "FittedCosts",
    "FittedLink",
    "Optimum",
    "Placement",
    "Policy",
    "Predictability",
    "Schedule",
    "Straggler",
    "Transfer",
    "TransferKind",
    "Transformer",
    "changed_costs",
    "cost_table",
    "edge_tolerance",
    "fit_costs",
    "fit_link",
    "hint",
    "memory_over_time",
    "monte_carlo",
    "optimal_schedule",
    "plan",
    "policy",
    "predictable",
    "recorded_schedule",
    "register",
    "replay_steps",
    "schedule",
    "schedules",
    "simulate",
    "simulate_policy",
]
