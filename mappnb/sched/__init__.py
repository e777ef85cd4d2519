"""Pipeline schedules as data, their simulation and their planning."""

from __future__ import annotations

from mappnb.sched.action import Action, Transfer, TransferKind
from mappnb.sched.costs import Costs, Empirical
from mappnb.sched.placement import Placement
from mappnb.sched.registry import register, schedule, schedules
from mappnb.sched.schedule import Schedule
from mappnb.sched.simulate import monte_carlo, simulate
from mappnb.sched.stragglers import Straggler

__all__ = [
    "Action",
    "Costs",
    "Empirical",
    "Placement",
    "Schedule",
    "Straggler",
    "Transfer",
    "TransferKind",
    "monte_carlo",
    "register",
    "schedule",
    "schedules",
    "simulate",
]
