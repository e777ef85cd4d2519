"""Numbers about events, recorded, imported or simulated: dataset in, labelled data out. Views are elsewhere."""

from __future__ import annotations

from mappnb.analysis.actions import actions
from mappnb.analysis.align import align, align_run, aligned, clock_model, ping_pong
from mappnb.analysis.arrivals import last_arrivals
from mappnb.analysis.breakdown import breakdown
from mappnb.analysis.bubbles import bubble_fraction, bubble_seconds
from mappnb.analysis.critical import critical_path, event_slack
from mappnb.analysis.diff import diff
from mappnb.analysis.export import export, export_chrome, export_parquet
from mappnb.analysis.hta import hta_breakdown
from mappnb.analysis.idle import idle_blocks
from mappnb.analysis.links import link_suspects, links
from mappnb.analysis.match_report import match_report
from mappnb.analysis.matching import match
from mappnb.analysis.skew import length_model, length_signature, skew_cures
from mappnb.analysis.stepstats import op_statistics, step_statistics
from mappnb.analysis.stragglers import find_stragglers
from mappnb.analysis.whatif import attribute, price_fixes, what_if
from mappnb.analysis.work import work

__all__ = [
    "actions",
    "align",
    "align_run",
    "aligned",
    "attribute",
    "breakdown",
    "bubble_fraction",
    "bubble_seconds",
    "clock_model",
    "critical_path",
    "diff",
    "event_slack",
    "export",
    "export_chrome",
    "export_parquet",
    "find_stragglers",
    "hta_breakdown",
    "idle_blocks",
    "last_arrivals",
    "length_model",
    "length_signature",
    "link_suspects",
    "links",
    "match",
    "match_report",
    "op_statistics",
    "ping_pong",
    "price_fixes",
    "skew_cures",
    "step_statistics",
    "what_if",
    "work",
]
