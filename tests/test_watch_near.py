"""The run that a watcher looks into: of open streams only the end is read, and what is found is what the whole run gives."""

from __future__ import annotations

import pandas as pd
import pytest
from live_run import LiveRun

import mappnb
from mappnb import Layout
from mappnb._watch_feed import Feed
from mappnb._watch_near import APART, NOTED
from mappnb.analysis import find_stragglers, work
from mappnb.testing import SlowLink, SlowRank, generate_run

STEPS = 90


@pytest.fixture(autouse=True)
def _no_files_left_open():
    yield
    LiveRun.abandon_all()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("near") / "run"
    faults = [
        SlowRank(rank=6, factor=1.4, first_step=60),
        SlowLink(source=1, destination=5, extra_s=0.05, first_step=70),
    ]
    generate_run(path, layout=Layout(tp=2, dp=2, pp=2), num_steps=STEPS, num_microbatches=4, seed=3, faults=faults)
    return path


def followed(live, feed, last, *, every=3, begin=0):
    for step in range(begin, last + 1):
        live.write(step)
        if step % every == every - 1:
            feed.look()


def rows(run):
    return sum(p.rows for p in run._readers["events"].parts)


@pytest.mark.parametrize("closed_every", [10**9, 25], ids=["one stream", "closed segments too"])
def test_what_is_found_near_is_what_the_whole_run_gives(source, tmp_path, closed_every):
    live = LiveRun(source, tmp_path / "live", closed_every=closed_every)
    feed = Feed(mappnb.attach(live.path))
    for begin, last in ((0, 68), (69, 80)):
        followed(live, feed, last, begin=begin)
        for first in (last - 16, last - 40, 0):
            whole, near = mappnb.attach(live.path), feed.near(first)
            wanted = slice(first, last - 1)
            found = [find_stragglers(run, step=wanted) for run in (whole, near)]
            pd.testing.assert_frame_equal(*found)
            assert (found[0]["verdict"] == "culprit").any()
            assert work(whole, step=wanted).identical(work(near, step=wanted))


def test_only_the_end_of_a_stream_is_read(source, tmp_path):
    live = LiveRun(source, tmp_path / "live", closed_every=10**9)
    feed = Feed(mappnb.attach(live.path))
    followed(live, feed, STEPS - 2)
    whole = rows_of_all(live)
    assert rows(feed.near(STEPS - 10)) < whole * (10 + 2 * APART) / STEPS
    assert rows(feed.near(0)) == whole  # before the first place
    assert max(len(n) for n in feed._near._noted.values()) <= NOTED
    live.end()
    feed.look()
    assert not feed._near._noted and rows(feed.near(STEPS - 10)) >= whole  # all is closed: nothing to leave out


def rows_of_all(live):
    run = mappnb.attach(live.path)
    return run._reader("events").rows


def test_a_stream_cut_in_its_last_batch(source, tmp_path):
    live = LiveRun(source, tmp_path / "live", closed_every=10**9)
    feed = Feed(mappnb.attach(live.path))
    followed(live, feed, 80)
    for path in live.path.rglob("events/*/open-*.arrows"):
        with open(path, "ab") as file:
            file.write(b"\xff\xff\xff\xff\x10\x02\x00\x00half a message")
    feed.look()
    whole = mappnb.attach(live.path)
    found = [find_stragglers(run, step=slice(60, 79)) for run in (whole, feed.near(60))]
    pd.testing.assert_frame_equal(*found)
