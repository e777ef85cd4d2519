"""Links of which little is known, and transfers that are long for everybody."""

from __future__ import annotations

import numpy as np
import pandas as pd

import mappnb
from mappnb import analysis
from mappnb.analysis._straggler_links import _bounded
from mappnb.layout import Layout
from mappnb.testing import SlowNic, generate_run


def test_what_a_late_receiver_was_still_held_counts_where_nothing_else_is_known():
    lanes = np.repeat([0, 1, 2, 3], 4)
    seconds = np.where(lanes < 2, 1e-3, np.nan)
    least = np.select([lanes == 2, lanes == 3], [2e-6, 60e-3], np.nan)
    calls = pd.DataFrame(
        {"lane": lanes, "op": "send_recv", "bytes": 2048, "reach": "intra", "seconds": seconds, "least_s": least}
    )
    calls.loc[0, ["seconds", "least_s"]] = np.nan, 0.5  # of a link that is known, a bound adds nothing
    out = _bounded(calls)["seconds"].to_numpy()
    assert np.isnan(out[0])
    np.testing.assert_array_equal(out[1:8], 1e-3)
    np.testing.assert_array_equal(out[8:12], 1e-3)  # a bound below what is usual: as usual
    np.testing.assert_array_equal(out[12:], 60e-3)


def test_bounds_without_any_known_link_are_held_against_one_another():
    lanes = np.repeat([0, 1, 2], 3)
    calls = pd.DataFrame(
        {
            "lane": lanes,
            "op": "send_recv",
            "bytes": 64,
            "reach": "intra",
            "seconds": np.nan,
            "least_s": [1e-6] * 6 + [5e-3] * 3,
        }
    )
    assert _bounded(calls)["seconds"].tolist() == [1e-6] * 6 + [5e-3] * 3


def test_a_card_that_every_group_reaches_is_said_of_the_job(tmp_path):
    fault = SlowNic(host=1, factor=15.0, first_step=5)
    truth = generate_run(tmp_path / "run", layout=Layout(dp=8, tp=4), faults=[fault], num_steps=14, seed=3)
    assert np.median(truth.step_s[5:]) > 1.2 * np.median(truth.step_s[:5])
    found = analysis.find_stragglers(mappnb.attach(tmp_path / "run"))
    judged = found[found.verdict != "clear"]
    assert judged[["subject_kind", "verdict", "cause", "first_step", "last_step"]].to_numpy().tolist() == [
        ["job", "undecided", "link", 5, 13]
    ]
    cost = np.median(truth.faults[0].effect_s[5:])
    np.testing.assert_allclose(judged.effect_s, cost, rtol=0.3)
