"""mappnb: see and explain what a distributed LLM training run does, from a JupyterLab notebook.

``with mappnb.record(run_dir): train()`` records in the job; ``run = mappnb.attach(run_dir)`` opens the run, live or afterwards.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mappnb._lazy import LAZY

if TYPE_CHECKING:
    from mappnb import analysis as analysis
    from mappnb import interp as interp
    from mappnb import sched as sched
    from mappnb import testing as testing
    from mappnb import widgets as widgets
    from mappnb.capture.activations.metrics import metric as metric
    from mappnb.capture.activations.plan import Capture as Capture
    from mappnb.capture.activations.plan import CapturePlan as CapturePlan
    from mappnb.capture.activations.plan import TokenSample as TokenSample
    from mappnb.capture.importers import import_trace as import_trace
    from mappnb.capture.marks import span as span
    from mappnb.capture.marks import step as step
    from mappnb.capture.session import record as record
    from mappnb.errors import MappnbError as MappnbError
    from mappnb.layout import Layout as Layout
    from mappnb.run import Run as Run
    from mappnb.run import attach as attach
    from mappnb.sched.costs import Costs as Costs
    from mappnb.sched.fit import fit_costs as fit_costs
    from mappnb.sched.plan import plan as plan
    from mappnb.sched.registry import schedule as schedule
    from mappnb.sched.schedule import Schedule as Schedule
    from mappnb.sched.simulate import simulate as simulate
    from mappnb.widgets.linking import link as link

__version__ = "0.1.0.dev0"
__all__ = [
    "attach",
    "record",
    "Capture",
    "CapturePlan",
    "TokenSample",
    "metric",
    "import_trace",
    "step",
    "span",
    "schedule",
    "Schedule",
    "Costs",
    "simulate",
    "plan",
    "fit_costs",
    "sched",
    "interp",
    "analysis",
    "testing",
    "link",
    "widgets",
    "Layout",
    "MappnbError",
    "Run",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'mappnb' has no attribute {name!r}")
    module, attribute = LAZY[name]
    if name in ("attach", "Run", "analysis", "widgets", "simulate"):
        importlib.import_module("mappnb.accessor")  # makes ds.mapp known to xarray
        importlib.import_module("mappnb.array_accessor")  # and da.mapp
    found = importlib.import_module(module)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
