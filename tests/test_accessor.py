"""ds.mapp: every verb hands the dataset and its options to the function of mappnb.analysis of the same name."""

from __future__ import annotations

import inspect

import pandas as pd
import pytest
import xarray as xr

from mappnb import analysis
from mappnb.accessor import MappAccessor
from mappnb.layout import Layout

VERBS = [
    n for n, _ in inspect.getmembers(MappAccessor, inspect.isfunction) if not n.startswith("_") and n != "timeline"
]
REAL = {
    "align": {"seed": 1}, "breakdown": {"step": 1}, "bubble_fraction": {"step": 1}, "critical_path": {"step": 1},
    "event_slack": {"step": 1}, "hta_breakdown": {}, "idle_blocks": {"step": 1}, "last_arrivals": {"step": 1}, "links": {},
    "match": {"step": 1}, "op_statistics": {"step": slice(0, 1)},
}  # fmt: skip


@pytest.fixture
def ds(make):
    return make(layout=Layout(pp=2, dp=2), num_steps=2).sel()


@pytest.mark.parametrize("name", VERBS)
def test_verb_forwards(ds, name, monkeypatch):
    seen = []
    monkeypatch.setattr(analysis, name, lambda *args, **options: (seen.append((args, options)), "the answer")[1])
    positional, options = [], {}
    for parameter in list(inspect.signature(getattr(MappAccessor, name)).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            options["some_option"] = object()
        elif parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = object()
        else:
            positional.append(object())
    assert getattr(ds.mapp, name)(*positional, **options) == "the answer"
    ((args, kwargs),) = seen
    assert args[0] is ds and list(args[1:]) == positional and kwargs == options


@pytest.mark.parametrize("name", REAL)
def test_verb_gives_what_the_function_gives(ds, name):
    found, want = getattr(ds.mapp, name)(**REAL[name]), getattr(analysis, name)(ds, **REAL[name])
    if isinstance(want, pd.DataFrame):
        pd.testing.assert_frame_equal(found, want)
    else:
        xr.testing.assert_identical(found, want)


def test_layout(ds):
    assert ds.mapp.layout == Layout(pp=2, dp=2)
