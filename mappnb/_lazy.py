"""Where the public names live. Nothing is imported before it is used: ``import mappnb`` is cheap, and torch-free."""

from __future__ import annotations

__all__ = ["LAZY"]

LAZY: dict[str, tuple[str, str]] = {
    "attach": ("mappnb.run", "attach"),
    "Run": ("mappnb.run", "Run"),
    "record": ("mappnb.capture.session", "record"),
    "step": ("mappnb.capture.marks", "step"),
    "span": ("mappnb.capture.marks", "span"),
    "import_trace": ("mappnb.capture.importers", "import_trace"),
    "schedule": ("mappnb.sched.registry", "schedule"),
    "Schedule": ("mappnb.sched.schedule", "Schedule"),
    "Costs": ("mappnb.sched.costs", "Costs"),
    "simulate": ("mappnb.sched.simulate", "simulate"),
    "fit_costs": ("mappnb.sched.fit", "fit_costs"),
    "plan": ("mappnb.sched.plan", "plan"),
    "sched": ("mappnb.sched", ""),
    "interp": ("mappnb.interp", ""),
    "CapturePlan": ("mappnb.capture.activations.plan", "CapturePlan"),
    "Capture": ("mappnb.capture.activations.plan", "Capture"),
    "TokenSample": ("mappnb.capture.activations.plan", "TokenSample"),
    "metric": ("mappnb.capture.activations.metrics", "metric"),
    "Layout": ("mappnb.layout", "Layout"),
    "MappnbError": ("mappnb.errors", "MappnbError"),
    "analysis": ("mappnb.analysis", ""),
    "testing": ("mappnb.testing", ""),
    "link": ("mappnb.widgets.linking", "link"),
    "widgets": ("mappnb.widgets", ""),
}
"""Public name -> (module, attribute); an empty attribute stands for the module itself."""
