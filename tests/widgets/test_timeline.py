"""The kernel's half of the timeline, with a stand-in for the browser."""

from __future__ import annotations

import gc
import time

import ipywidgets
import numpy as np
import pytest
import xarray as xr
from widgets.front import Front

import mappnb
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.schema import EVENTS, empty
from mappnb.testing.runs import make_run
from mappnb.widgets.classes import CLASSES
from mappnb.widgets.timeline import Timeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = make_run(
        tmp_path_factory.mktemp("run") / "run", layout=Layout(pp=4, dp=2), num_steps=6, num_microbatches=8
    )
    return mappnb.attach(folder)


@pytest.fixture
def view(run):
    made = Timeline(run)
    yield made
    made.close()


def dataset(rows: list[dict], **attrs) -> xr.Dataset:
    """Events out of a few fields each."""
    data = empty(EVENTS, {"event": len(rows)})
    for i, row in enumerate(rows):
        for name, value in {
            "thread": 0,
            "depth": 0,
            "category": "compute",
            "op": "span",
            "phase": "none",
            **row,
        }.items():
            data[name][i] = value
    return xr.Dataset({k: (v.dims, data[k]) for k, v in EVENTS.items()}, attrs=attrs)


def test_opens_on_the_last_whole_step(run, view):
    last = run.steps.isel(step=-1)
    start, end = int(last.start_ns.min()), int(last.end_ns.max())
    assert start / 1e9 >= view.window.start and end / 1e9 <= view.window.stop
    assert view.window.stop - view.window.start < 1.1 * (end - start) / 1e9


def test_window_holds_the_events_of_the_run(run, view):
    front = Front(view)
    content, arrays = front.window()
    told = content["num_events"]
    assert told == run.events.sizes["event"]
    meta = front.last("meta")[0]
    assert len(meta["blocks"]) == 8 and sum(b["rows"] for b in meta["blocks"]) == len(meta["rows"])
    assert len(arrays["x"]) == len(arrays["event"]) and (arrays["row"] < len(meta["rows"])).all()
    last = meta["steps"]["start"][-1], meta["steps"]["end"][-1]
    content, arrays = front.window(*last)
    events = run.sel(time=slice((view._scene.ns(content["t0"])) / 1e9, (view._scene.ns(content["t1"])) / 1e9))
    pixel = (content["t1"] - content["t0"]) / content["pixels"]
    assert len(arrays["x"]) == int((events.duration_ns.values >= content["threshold_px"] * pixel).sum())
    content, arrays = front.window(last[0], last[0] + (last[1] - last[0]) / 2)
    labels = content["labels"]
    assert {"F0", "B0"} <= {labels[i] for i in arrays["label"] if i < len(labels)}


def test_spans_lie_where_the_events_are(run, view):
    front = Front(view)
    meta = front.last("meta")[0]
    content, arrays = front.window(meta["steps"]["start"][2], meta["steps"]["end"][2])
    for i in np.random.default_rng(0).choice(len(arrays["x"]), 40, replace=False):
        one, _ = front.ask("describe", event=int(arrays["event"][i]))
        assert abs(one["start"] - (content["t0"] + float(arrays["x"][i]))) < 1e-6 * (content["t1"] - content["t0"]) + 1
        assert one["row"] == int(arrays["row"][i]) + content["row0"]
        block = next(b for b in meta["blocks"] if b["row0"] <= one["row"] < b["row0"] + b["rows"])
        assert block["label"].startswith(f"rank {one['rank']} ")


def test_click_and_box_reach_the_kernel(run, view):
    front = Front(view)
    meta = front.last("meta")[0]
    _, arrays = front.window(meta["steps"]["start"][1], meta["steps"]["end"][1])
    widest = int(arrays["event"][arrays["w"].argmax()])
    front.say("select", events=[widest])
    frame = view.selection.to_dataframe()
    assert len(frame) == 1 and frame.duration_ns[0] == int(arrays["w"].max())
    start, end = meta["steps"]["start"][1], meta["steps"]["end"][1]
    rows = meta["blocks"][2]
    front.say("select", box=[start, end, rows["row0"], rows["row0"] + rows["rows"]])
    chosen = view.selection
    rank = view._scene.shown_ranks()[2]
    expected = run.sel(rank=rank, step=int(run.steps.step[1]))
    inside = expected.start_ns.values < view._scene.ns(end)
    assert set(chosen.events["rank"].values.tolist()) == {rank}
    assert len(chosen) >= int(inside.sum()) - 1 and chosen.time is not None
    assert front.last("selection")[0]["count"] == len(chosen)
    front.say("select")
    assert not view.selection


def test_busy_time_counts_overlaps_once():
    events = dataset([
        {"start_ns": 0, "duration_ns": 100, "depth": 0},
        {"start_ns": 10, "duration_ns": 20, "depth": 1},
        {"start_ns": 150, "duration_ns": 50, "depth": 0},
        {"rank": 1, "start_ns": 0, "duration_ns": 10, "depth": 0},
    ])  # fmt: skip
    view = Timeline(events)
    view.select(slice(None, None))
    assert view.selection.busy_s == pytest.approx(160e-9) and view.selection.wall_s == pytest.approx(200e-9)
    view.close()


def test_code_round_trip(run, view):
    front = Front(view)
    meta = front.last("meta")[0]
    front.ask("options", group_by="pp", hidden=["host", "wait"])
    _, arrays = front.window(meta["steps"]["start"][1] + 12345.0, meta["steps"]["end"][2], pixels=700)
    front.say("select", events=[int(e) for e in arrays["event"][:3]])
    front.ask("search", text="layer:1", go="first", at=0.0)
    view.flows = False
    again = eval(view.code, {"run": run})
    assert again.code == view.code
    assert again.window == view.window and again._scene.hidden == view._scene.hidden
    xr.testing.assert_identical(again.selection.events, view.selection.events)
    again.close()
    view.select(slice(view.window.start, view.window.stop))
    again = eval(view.code, {"run": run})
    xr.testing.assert_identical(again.selection.events, view.selection.events)
    again.close()


def test_code_of_a_dataset(run):
    events = run.sel(step=int(run.steps.step[2]), rank=[1, 3])
    view = events.mapp.timeline(rank=3)
    assert view.code.startswith("events.mapp.timeline(")
    again = eval(view.code, {"events": events})
    assert again.code == view.code and again._scene.shown_ranks() == [3]
    view.close()
    again.close()


def test_search_counts_and_goes_round(run, view):
    front = Front(view)
    expected = int((run.events.op.values == "forward_step").sum())
    first, _ = front.ask("search", text="forward_step", go="first", at=0.0)
    assert (first["hits"], first["position"]) == (expected, 1)
    back, _ = front.ask("search", text="forward_step", go="previous", at=0.0)
    assert back["position"] == expected
    again, _ = front.ask("search", text="forward_step", go="next", at=0.0)
    assert again["event"] == first["event"]
    wrong, _ = front.ask("search", text="/(/", go="first", at=0.0)
    assert "no regular expression" in wrong["error"] and view._search == "forward_step"
    both, _ = front.ask("search", text="forward_step rank:2", go="first", at=0.0)
    assert both["hits"] == expected // 8
    content, arrays = front.window()
    del content
    assert (arrays["flag"] & 1).any() and not (arrays["flag"] & 1).all()


def test_steps(run, view):
    front = Front(view)
    numbers = run.steps.step.values
    at = front.last("meta")[0]["steps"]["start"]
    said, _ = front.ask("step", go="next", at=at[2] + 1)
    assert said["kind"] == "goto" and said["text"] == f"step {numbers[3]}" and said["t0"] <= at[3] <= said["t1"]
    assert front.ask("step", go="previous", at=at[2] + 1)[0]["text"] == f"step {numbers[1]}"
    length = (run.steps.end_ns.max("rank") - run.steps.start_ns.min("rank")).values
    assert front.ask("step", go="worst", at=0.0)[0]["text"].startswith(f"step {numbers[length.argmax()]}, the longest")
    with pytest.raises(MappnbError, match=r"no step 999 .* steps: 0 to 5"):
        Timeline(run, step=999)


def test_grouping_orders_the_ranks(run, view):
    front = Front(view)
    for axis in ("pp", "dp"):
        meta, _ = front.ask("options", group_by=axis)
        places = [run.layout.coords(r)[axis] for r in view._scene.shown_ranks()]
        assert places == sorted(places) and [g["label"] for g in meta["groups"]] == [
            f"{axis} {i}" for i in sorted(set(places))
        ]
        content, arrays = front.window()
        for event, row in list(zip(arrays["event"].tolist(), arrays["row"].tolist(), strict=True))[::97]:
            one, _ = front.ask("describe", event=event)
            assert one["row"] == row + content["row0"]


def test_hidden_classes_are_not_drawn(run, view):
    front = Front(view)
    everything = front.window()[0]["num_events"]
    front.ask("options", hidden=["forward", "p2p"])
    content, arrays = front.window()
    gone = {i for i, c in enumerate(CLASSES) if c.name in ("forward", "p2p")}
    assert not gone & set(arrays["cat"].tolist()) and content["num_events"] < everything
    if "cats" in arrays:
        assert not gone & set(np.unique(arrays["cats"]).tolist())
    event = int(arrays["event"][3])
    assert front.ask("describe", event=event)[0]["event"] == event
    with pytest.raises(MappnbError, match=r"no class 'forwrd'.*did you mean 'forward'"):
        Timeline(run, hidden=["forwrd"])


def test_flow_lines_join_matched_calls(run, view):
    front = Front(view)
    front.window()
    scene = view._scene
    loaded = scene.loaded(*view._visible)
    op = loaded.events.op.values
    send = int(np.flatnonzero(op == "send")[5])
    _, lines = front.ask("flows", event=send + loaded.base)
    assert len(lines["x0"]) == 1 and lines["kind"][0] == 1
    assert lines["x0"][0] == scene.t(int(loaded.events.start_ns[send]))
    calls = mappnb.analysis.match(run)
    everyone = calls.isel(call=np.flatnonzero((calls.op.values == "all_reduce") & calls.complete.values)[0])
    member = int(
        np.flatnonzero(
            (op == "all_reduce")
            & (loaded.events.seq.values == int(everyone.seq))
            & (loaded.events.group.values == int(everyone.group))
        )[0]
    )
    _, lines = front.ask("flows", event=member + loaded.base)
    members = int((everyone["rank"].values >= 0).sum())
    assert len(lines["x0"]) == members - 1 and set(lines["kind"].tolist()) == {0}


def test_linked_views_follow(run):
    a, b = Timeline(run), Timeline(run)
    fronts = Front(a), Front(b)
    joined = mappnb.link(a, b)
    meta = fronts[0].last("meta")[0]
    fronts[0].window(meta["steps"]["start"][0], meta["steps"]["end"][0])
    assert b.window == a.window
    a.select(slice(a.window.start, a.window.stop))
    mark = fronts[1].last("mark")[0]
    assert mark["t0"] == pytest.approx(meta["steps"]["start"][0], abs=2)
    joined.unlink()
    fronts[0].window(meta["steps"]["start"][3], meta["steps"]["end"][3])
    assert b.window != a.window
    for v in (a, b):
        v.close()
    with pytest.raises(MappnbError, match="is closed"):
        mappnb.link(a, b)


# ------------------------------------------------------------------------------------------------------- bad input
def test_no_events_says_so():
    view = Timeline(dataset([]))
    meta = Front(view).last("meta")[0]
    assert "nothing to show" in meta["empty"] and meta["rows"] == []
    assert repr(view) == "Timeline(0 ranks, 0 steps, 0 events)" and view.snapshot()._repr_html_() and view.to_html()
    view.close()


def test_hours_beside_microseconds():
    hour = 3600 * 10**9
    rows = [{"start_ns": 0, "duration_ns": 10 * hour}] + [
        {"start_ns": hour + i * 2000, "duration_ns": 1000, "depth": 1, "op": "mlp"} for i in range(500)
    ]
    view = Timeline(dataset(rows))
    front = Front(view)
    _, arrays = front.window()
    assert len(arrays["x"]) == 1 and (arrays["busy"] > 0).sum() >= 1
    content, arrays = front.window(hour, hour + 20_000)
    found = {round(content["t0"] + float(x)) for x in arrays["x"][1:]}
    assert {hour + i * 2000 for i in range(10)} <= found
    view.close()


def test_times_near_the_end_of_int64():
    far = 2**62 - 10**7
    view = Timeline(dataset([{"start_ns": far + i * 1000, "duration_ns": 600} for i in range(100)]))
    front = Front(view)
    content, arrays = front.window()
    assert len(arrays["x"]) == 100 and content["t0"] >= -(2**62)
    one, _ = front.ask("describe", event=int(arrays["event"][7]))
    assert one["duration"] == 600 and view._scene.ns(one["start"]) == far + 7000
    assert eval(view.code, {"events": _named(view)}).window == view.window
    view.close()


class _named:
    def __init__(self, view):
        self.mapp, self._events = self, view._scene.loaded(*view._visible).events

    def timeline(self, **options):
        return Timeline(self._events, **options)


@pytest.mark.parametrize(
    "name", ["</script><img src=x onerror=alert(1)>", "مرحبا بالعالم", "🚀 \u202eevil\u202c", "'\"`${x}"]
)
def test_hostile_names_are_data(name):
    view = Timeline(dataset([{"start_ns": 0, "duration_ns": 1000, "name": name}]))
    front = Front(view)
    content, arrays = front.window()
    assert content["labels"] == [name] and len(arrays["x"]) == 1
    page = view.to_html()
    assert "<img src=x" not in page and "onerror=alert" not in page.replace(
        "\\u003cimg src=x onerror=alert(1)\\u003e", ""
    )
    assert "<img src=x" not in view.snapshot()._repr_html_() and "<img src=x" not in view.twin_html()
    view.close()


def test_overlapping_spans_get_rows_of_their_own():
    view = Timeline(dataset([{"start_ns": i * 10, "duration_ns": 35} for i in range(20)]))
    front = Front(view)
    _, arrays = front.window()
    assert len(arrays["x"]) == 20
    for row in set(arrays["row"].tolist()):
        mine = np.sort(arrays["x"][arrays["row"] == row])
        assert (np.diff(mine) >= 35).all()
    view.close()


def test_many_ranks_are_exported_too():
    view = Timeline(dataset([{"rank": r, "start_ns": 10 * r, "duration_ns": 1000} for r in range(700)]))
    assert len(view.to_html()) < 1_000_000 and view.twin_html() and not view.errors
    view.close()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "window", "t0": 5, "t1": 5, "pixels": 100, "row0": 0, "row1": 1},
        {"kind": "window", "t0": "a", "t1": 5, "pixels": 100, "row0": 0, "row1": 1},
        {"kind": "window", "t0": 0, "t1": 5},
        {"kind": "describe", "event": 10**9},
        {"kind": "describe", "event": None},
        {"kind": "select", "box": [1, 2]},
        {"kind": "select", "events": ["x"]},
        {"kind": "search", "text": "x" * 5000, "go": "first", "at": 0},
        {"kind": "step", "go": "sideways", "at": 0},
        {"kind": "options", "group_by": "color"},
        {"kind": "options", "hidden": ["nothing"]},
        {"kind": "__init__"},
        {"kind": "change"},
    ],
)
def test_bad_messages_are_answered_with_an_error(run, view, message):
    front = Front(view)
    before = len(view.errors)
    front.say(**message)
    said = front.last("error")[0]
    assert said["of"] == message["kind"] and said["text"] and len(view.errors) == before + 1
    assert front.window()[0]["kind"] == "window", "the view goes on"


def test_wrong_arguments_name_the_cure(run):
    for options, words in (
        ({"group_by": "pipeline"}, "expected one of rank, dp, pp"),
        ({"rank": [99]}, "no rank 99 in the events; there are 0, 1, 2"),
        ({"time": slice(2.0, 1.0)}, "the window is empty"),
        ({"time": slice(0, 1), "step": 1}, "time or step, not both"),
        ({"search": "/(/"}, "no regular expression"),
    ):
        with pytest.raises(MappnbError, match=words.replace("(", r"\(")):
            Timeline(run, **options)
    with pytest.raises(MappnbError, match="needs a Run or an events Dataset"):
        Timeline([1, 2])


# --------------------------------------------------------------------------------------------------------- budgets
def test_every_message_is_small(tmp_path):
    folder = make_run(tmp_path / "run", layout=Layout(pp=8, dp=8), num_steps=8, num_microbatches=16)
    view = Timeline(mappnb.attach(folder))
    for binary in (True, False):
        front = Front(view, binary=binary)
        meta = front.last("meta")[0]
        rows = len(meta["rows"])
        for part in (1.0, 0.3, 0.05, 0.004):
            for pixels, shown in ((1200, rows), (3840, 150), (3840, rows), (500, 20)):
                front.window(0.0, meta["extent"][1] * part, pixels=pixels, rows=(0, min(rows, shown)))
        assert front.largest <= 500_000 and not view.errors
    view.close()


def test_without_binary_buffers_the_same_arrays_come_as_text(run, view):
    import base64

    one, other = Front(view), None
    content, arrays = one.window(pixels=300)
    other = Front(view, binary=False)
    other.window(pixels=300)
    parts = [c for c, _ in other.sent if c["kind"] == "window"]
    names = [s["name"] for c in parts for s in c["arrays"]]
    texts = [t for c in parts for t in c["base64"]]
    assert names == [s["name"] for s in content["arrays"]]
    for name, text in zip(names, texts, strict=True):
        assert base64.b64decode(text) == arrays[name].tobytes()
    assert any("binary buffers" in c.get("text", "") for c, _ in other.sent if c["kind"] == "note")


def test_snapshot_tells_the_longest_span_of_each_class(run, view):
    rows = view.snapshot().table
    events = view._scene.loaded(*view._visible).events
    window = view.window
    start, end = events.start_ns.values / 1e9, (events.start_ns.values + events.duration_ns.values) / 1e9
    inside = (start < window.stop) & (end > window.start)
    sends = events.duration_ns.values[inside & (events.category.values == "p2p")]
    from mappnb.widgets._text import duration_text

    assert [r[2] for r in rows if r[3] == "p2p"] == [duration_text(int(sends.max()))]
    assert len({(r[3], r[4]) for r in rows}) == len(rows)


def test_closed_views_leave_nothing(run):
    gc.collect()
    before = len(
        ipywidgets.Widget.widgets if hasattr(ipywidgets.Widget, "widgets") else ipywidgets.widgets.widget._instances
    )
    for _ in range(200):
        Timeline(run).close()
    gc.collect()
    after = len(
        ipywidgets.Widget.widgets if hasattr(ipywidgets.Widget, "widgets") else ipywidgets.widgets.widget._instances
    )
    assert after == before
    assert not [o for o in gc.get_objects() if type(o) is Timeline and o._scene._kept]


def test_a_cell_that_runs_again_closes_its_views(run, monkeypatch):
    from mappnb.widgets import _cells

    place = ["cell-1", "run-1"]
    monkeypatch.setattr(_cells, "running_cell", lambda: tuple(place))
    first, second = Timeline(run), Timeline(run)
    assert not first.closed and not second.closed
    place[1] = "run-2"
    third = Timeline(run)
    assert first.closed and second.closed and not third.closed
    place[:] = ["cell-2", "run-3"]
    fourth = Timeline(run)
    assert not third.closed
    third.close()
    fourth.close()


def test_stable_texts_and_no_state(run, view):
    assert repr(view) == f"Timeline(8 ranks, 6 steps, {run.events.sizes['event']:,} events)"
    data, _ = view._repr_mimebundle_()
    assert data["text/plain"] == repr(view) and "application/vnd.jupyter.widget-view+json" in data
    state = {k: v for k, v in view.get_state().items() if not k.startswith("_")}
    assert set(state) <= {"layout", "tabbable", "tooltip", "twin_id"}
    assert len(view.twin_html()) < 150_000


def test_a_growing_run_is_followed(tmp_path):
    from mappnb.testing.runs import make_run

    folder = make_run(tmp_path / "run", layout=Layout(pp=2), num_steps=2, num_microbatches=4)
    view = Timeline(mappnb.attach(folder))
    front = Front(view)
    before = front.window()[0]["num_events"]
    with mappnb.record(folder, resume=True, rank=0, world_size=2, probes=[]) as session:
        for _ in range(3):
            session.begin_step()
            token = session.recorder.begin(session.recorder.site(category="compute", op="layer", layer=0))
            time.sleep(0.002)
            session.recorder.end(token)
            session.end_step()
        session.flush()
        view.refresh()
        assert front.last("stale")
        meta = front.last("meta")[0]
        content, _ = front.window(*meta["extent"])
        assert content["num_events"] == before + 6 and not view.errors
    view.close()
