"""Pipeline schedules as data, their simulation and their planning."""

from __future__ import annotations

from mappnb.sched.action import Action, Transfer, TransferKind
from mappnb.sched.compare import Predictability, changed_costs, predictable
from mappnb.sched.costs import Costs, Empirical
from mappnb.sched.fit import FittedCosts, fit_costs
from mappnb.sched.measure import cost_table
from mappnb.sched.placement import Placement
from mappnb.sched.registry import register, schedule, schedules
from mappnb.sched.replays import FittedLink, fit_link, recorded_schedule, replay_steps
from mappnb.sched.schedule import Schedule
from mappnb.sched.simulate import monte_carlo, simulate
from mappnb.sched.stragglers import Straggler

__all__ = [
    "Action",
    "Costs",
    "Empirical",
    "FittedCosts",
    "FittedLink",
    "Placement",
    "Predictability",
    "Schedule",
    "Straggler",
    "Transfer",
    "TransferKind",
    "changed_costs",
    "cost_table",
    "fit_costs",
    "fit_link",
    "monte_carlo",
    "predictable",
    "recorded_schedule",
    "register",
    "replay_steps",
    "schedule",
    "schedules",
    "simulate",
]
