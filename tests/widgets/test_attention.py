"""The attention view without a browser: what it draws against numpy, its tables, messages, sizes and static twins."""

from __future__ import annotations

import base64
import itertools
import json
import re
import zlib

import activation_runs
import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from widgets.attention_data import WORDS, activations, kind_of
from widgets.front import Front

import mappnb
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.widgets import Attention, _attn_page
from mappnb.widgets._attn_answers import columns, frames, overview, row, thumb_size
from mappnb.widgets._attn_codes import (
    MISSING,
    bins,
    decode,
    difference_codes,
    difference_values,
    encode,
    pooled,
    strongest,
)
from mappnb.widgets._attn_source import Cache, source_of
from mappnb.widgets._attn_tokens import shown

LAYERS, HEADS, KV, TOKENS = 3, 6, 2, 40


@pytest.fixture(scope="module")
def data():
    return activations(layers=range(LAYERS), heads=HEADS, kv_heads=KV, tokens=TOKENS, pad=7, steps=(10, 20))


@pytest.fixture
def view(data):
    made = Attention(data)
    yield made
    made.close()


def softmax_pattern(data: xr.Dataset, sample: int, layer: int, head: int) -> np.ndarray:
    """Causal attention of one head, in float64, padding left out: independent of mappnb."""
    mask = data["mask"].values[sample]
    q = data["q_rot"].values[sample, layer, :, head].astype(np.float64)[mask]
    k = data["k_rot"].values[sample, layer, :, head // (HEADS // KV)].astype(np.float64)[mask]
    scores = q @ k.T / np.sqrt(q.shape[1])
    scores[np.triu_indices(len(q), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


# ------------------------------------------------------------------------------------------------------------- codes
@given(arrays(np.float64, (5, 5), elements=st.floats(0, 1)))
def test_codes_keep_weights(weights):
    step = 0.5 / 254
    error = np.abs(decode(encode(weights)) - weights)
    assert (error <= 2 * step * np.sqrt(weights) + step**2 + 1e-7).all(), "small weights keep their digits"


@given(arrays(np.float64, (4, 4), elements=st.floats(-1, 1)))
def test_codes_keep_differences_and_their_signs(values):
    told = difference_values(difference_codes(values))
    step = 0.5 / 127
    assert (np.abs(told - values) <= 2 * step * np.sqrt(np.abs(values)) + step**2 + 1e-7).all()
    assert (np.sign(told) * np.sign(values) >= 0).all()


def test_nan_has_a_code_of_its_own():
    assert encode(np.array([np.nan, 1.0])).tolist() == [MISSING, 254]
    assert difference_codes(np.array([np.nan, 1.0, -1.0, 0.0])).tolist() == [MISSING, 254, 0, 127]
    assert np.isnan(decode(np.array([MISSING], np.uint8)))[0]
    assert not np.isnan(difference_values(np.array([254], np.uint8)))[0]


@given(st.integers(1, 300), st.integers(1, 300))
def test_bins_hold_every_token_once(size, cells):
    edges = bins(size, cells)
    assert edges[0] == 0 and edges[-1] == size and len(edges) == min(size, cells) + 1
    assert (np.diff(edges) >= 1).all() and np.ptp(np.diff(edges)) <= 1


@given(
    arrays(np.float32, (9, 11), elements=st.floats(0, 1, width=32) | st.just(np.nan)),
    st.integers(1, 9),
    st.integers(1, 11),
)
def test_cells_are_what_brute_force_says(values, rows, cols):
    r, c = bins(9, rows), bins(11, cols)
    for pool, numpys in (("max", np.nanmax), ("mean", np.nanmean)):
        got = pooled(values, r, c, pool)
        for i in range(rows):
            for j in range(cols):
                cell = values[r[i] : r[i + 1], c[j] : c[j + 1]]
                expected = np.nan if np.isnan(cell).all() else numpys(cell)
                np.testing.assert_allclose(got[i, j], expected, rtol=1e-5)
    signed = values - np.float32(0.5)
    got = strongest(signed, r, c)
    for i in range(rows):
        for j in range(cols):
            cell = signed[r[i] : r[i + 1], c[j] : c[j + 1]]
            cell = cell[~np.isnan(cell)]
            assert np.isnan(got[i, j]) if not cell.size else abs(got[i, j]) == np.abs(cell).max() and got[i, j] in cell


# ------------------------------------------------------------------------------------------------------- what is drawn
@pytest.mark.parametrize("sample", [0, 1, 3])
def test_patterns_are_those_of_numpy(view, data, sample):
    for layer, head in ((0, 0), (1, 4), (2, 5)):
        got = view.pattern(layer=layer, head=head, sample=sample)
        np.testing.assert_allclose(got.values, softmax_pattern(data, sample, layer, head), atol=1e-6)
        assert got["query"].values.tolist() == list(range(7 if sample % 2 else 0, TOKENS)), "padding is cut off"


def test_planted_heads_do_what_they_were_made_for(view):
    at = np.arange(TOKENS)
    for head in range(HEADS):
        top = view.pattern(layer=0, head=head).values.argmax(axis=1)
        kind = kind_of(0, head)
        if kind == "previous":
            assert (top[1:] == at[:-1]).all()
        elif kind == "first":
            assert (top == 0).all()
        elif kind == "diagonal":
            assert (top == at).all()
        elif kind == "induction":
            half = TOKENS // 2
            assert (top[half:] == at[half:] - half + 1).mean() > 0.9


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_thumbnails_are_pooled_patterns(view, data, pool):
    view.set(pool=pool)
    drawn = view.overview()
    size = thumb_size(TOKENS, LAYERS, HEADS)
    assert drawn.codes.shape == (LAYERS, HEADS, size, size) and drawn.every == 1 and size == 32
    edges = np.arange(size + 1) * TOKENS // size
    for layer in range(LAYERS):
        for head in range(HEADS):
            pattern = softmax_pattern(data, 0, layer, head)
            reduce = np.max if pool == "max" else np.mean
            expected = [
                [reduce(pattern[a:b, c:d]) for c, d in itertools.pairwise(edges)] for a, b in itertools.pairwise(edges)
            ]
            np.testing.assert_allclose(decode(drawn.codes[layer, head]), expected, atol=0.0041)


def test_a_head_in_full_and_in_a_window(data):
    source = source_of(data)
    whole = columns(source, 0, 2, 3)
    np.testing.assert_allclose(decode(whole.codes), softmax_pattern(data, 0, 2, 3), atol=0.0041)
    assert whole.largest == pytest.approx(softmax_pattern(data, 0, 2, 3).max(), abs=1e-6)
    part = columns(source, 0, 2, 3, window=(10, 30, 5, 15), most=8)
    assert (
        part.codes.shape == (8, 8)
        and part.queries[[0, -1]].tolist() == [10, 30]
        and part.keys[[0, -1]].tolist() == [5, 15]
    )
    pattern = softmax_pattern(data, 0, 2, 3)
    assert decode(part.codes)[0, 0] == pytest.approx(pattern[10 : part.queries[1], 5 : part.keys[1]].max(), abs=0.0041)


def test_a_difference_is_that_of_the_patterns(data):
    source = source_of(data)
    drawn = columns(source, 0, 1, 4, compare=2)
    expected = softmax_pattern(data, 0, 1, 4) - softmax_pattern(data, 2, 1, 4)
    np.testing.assert_allclose(difference_values(drawn.codes), expected, atol=0.008)
    thumbs = overview(source, 0, compare=2)
    same = columns(source, 0, 1, 4, compare=2, most=32)
    np.testing.assert_array_equal(thumbs.codes[1, 4], same.codes)


def test_unequal_lengths_have_no_difference(data):
    with pytest.raises(MappnbError, match="samples 0 and 1 have 40 and 33 tokens"):
        columns(source_of(data), 0, 0, 0, compare=1)


def test_long_sequences_look_at_every_nth_query():
    pattern = np.zeros((1, 2, 1200, 1200), np.float32)
    pattern[0, 0, :, 0] = 1
    pattern[0, 1] = np.eye(1200)
    source = source_of(pattern)
    drawn = overview(source, 0)
    assert drawn.every == 5 and drawn.codes.shape == (1, 2, 32, 32)
    first, diagonal = decode(drawn.codes[0])
    assert (first[:, 0] == 1).all() and (first[:, 1:] == 0).all()
    np.testing.assert_array_equal(diagonal, np.eye(32))
    detail = columns(source, 0, 0, 1)
    assert detail.every == 1
    np.testing.assert_array_equal(decode(detail.codes), np.eye(180))
    asked = []

    class Counting:
        layers, heads, samples, facts = (0,), (0,), source.samples, {}
        tokens = staticmethod(lambda sample: source_of(np.zeros((1, 1, 5000, 5000), np.float16)).tokens(sample))
        scores = staticmethod(lambda sample: [])

        def pattern(self, sample, layer, head, query=None):
            asked.append(len(query))
            return (np.arange(5000) <= query[:, None]).astype(np.float32) / (query[:, None] + 1)

    long = columns(Counting(), 0, 0, 0)
    assert asked[0] <= 2048 and long.every == 3
    np.testing.assert_allclose(decode(long.codes)[:, 0], 1 / (long.queries[:-1] + 1), rtol=0.15, atol=1e-4)


def test_rows_are_exact(data):
    source = source_of(data)
    pattern = softmax_pattern(data, 1, 2, 5)
    np.testing.assert_allclose(row(source, 1, 2, 5, 20), pattern[20], atol=1e-6)
    np.testing.assert_allclose(row(source, 1, 2, 5, 3, axis="key"), pattern[:, 3], atol=1e-6)
    with pytest.raises(MappnbError, match="query 33 is not there; the sample has 33 tokens"):
        row(source, 1, 2, 5, 33)


def test_what_was_not_recorded_is_missing_not_zero(data):
    there = np.ones((4, LAYERS, TOKENS, HEADS), bool)
    there[0, 1, :, 2:4] = False
    keys = np.ones((4, LAYERS, TOKENS, KV), bool)
    keys[0, 2, 30, 1] = False
    dims = ("sample", "layer", "token")
    lost = data.assign_coords(q_rot_present=((*dims, "head"), there), k_rot_present=((*dims, "kv_head"), keys))
    view = Attention(lost)
    codes = view.overview().codes
    assert (codes[1, 2:4] == MISSING).all() and not (codes[1, [0, 1, 4, 5]] == MISSING).any()
    pattern = view.pattern(layer=2, head=5).values
    assert np.isnan(pattern[30:]).all() and not np.isnan(pattern[:30]).any(), "queries before the lost key are whole"
    assert not np.isnan(view.pattern(layer=2, head=0).values).any(), "another key head"
    view.close()


# ----------------------------------------------------------------------------------------------------------------- API
def test_scores_are_those_of_the_library(view, data):
    from mappnb.interp.heads import head_statistics

    frame = view.scores
    expected = head_statistics(data.isel(sample=[0]))
    assert {"entropy", "previous_token", "induction"} <= set(frame.columns) and len(frame) == LAYERS * HEADS
    got = frame.pivot(index="layer", columns="head", values="induction").values
    np.testing.assert_allclose(got, expected["induction"].isel(sample=0).values, atol=1e-6)
    best = frame.loc[frame["previous_token"].idxmax()]
    assert kind_of(int(best["layer"]), int(best["head"])) == "previous"


def test_selected_is_a_table(view, data):
    assert len(view.selected) == LAYERS * HEADS
    view.goto(layer=1, head=4, query=12)
    frame = view.selected
    assert frame["attention"].is_monotonic_decreasing and frame["attention"].sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(
        frame.set_index("key")["attention"].sort_index(), softmax_pattern(data, 0, 1, 4)[12], atol=1e-6
    )
    assert set(frame["query_token"]) == {shown(data["token_text"].values[0, 12])}
    view.goto(layer=1, head=4)
    view.set(threshold=0.3)
    pattern = softmax_pattern(data, 0, 1, 4)
    assert len(view.selected) == (pattern >= 0.3).sum()
    view.compare(2)
    frame = view.selected
    np.testing.assert_allclose(frame["difference"], frame["attention"] - frame["attention_b"])


def test_samples_are_found_by_step_and_prompt():
    data = activations(layers=[0], heads=2, kv_heads=1, tokens=8, samples=2, steps=(1, 5, 9), prompts=("one", "two"))
    view = Attention(data, sample="two", step=5, compare_step=9)
    assert (view._where.sample, view._where.compare) == (3, 5)
    assert frames(view.samples, 3) == [1, 3, 5]
    view.compare("one", step=1)
    assert view._where.compare == 0
    view.compare()
    assert view._where.compare is None
    for call, said in (
        (lambda: Attention(data, sample="tow"), "no prompt 'tow'.*did you mean 'two'"),
        (lambda: Attention(data, step=2), "no sample of step 2; there are steps 1, 5, 9"),
        (lambda: Attention(data, sample=6), "sample is 6; there are 6 samples, from 0"),
        (lambda: Attention(data, compare_step=3), "no counterpart at step 3; it has at 1, 5, 9"),
    ):
        with pytest.raises(MappnbError, match=said):
            call()


def test_frames_without_prompts_go_by_place(data):
    assert frames(source_of(data).samples, 1) == [1, 3]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda v: v.goto(layer=9, head=0), "no layer 9; q_rot and k_rot were captured of layers 0 to 2"),
        (lambda v: v.goto(layer=0, head=6), "no head 6; q_rot was captured of heads 0 to 5"),
        (lambda v: v.goto(layer=0), "head= is missing"),
        (lambda v: v.goto(layer=0, head=0, query=40), "no token 40; the sample has slots 0 to 39"),
        (lambda v: v.set(scale="srt"), "scale is 'srt'; expected one of sqrt, linear, log; did you mean 'sqrt'"),
        (lambda v: v.set(treshold=0.1), "set\\(\\) has no 'treshold'.*did you mean 'threshold'"),
        (lambda v: v.set(order="inducton"), "order is 'inducton'; expected layer, .*did you mean 'induction'"),
        (lambda v: v.set(threshold=2.0), "threshold is 2.0; expected 0 to 1"),
        (lambda v: v.set(window=(5, 5, 0, 9)), "window is \\(5, 5, 0, 9\\); the sample has slots 0 to 39"),
        (lambda v: v.pattern(), "which head"),
        (lambda v: v.compare(99), "99; there are 4 samples"),
    ],
)
def test_errors_say_what_there_is(view, call, said):
    with pytest.raises(MappnbError, match=said):
        call(view)
    assert view._where.layer is None, "the view stays where it was"


def test_without_queries_and_keys_the_cure_is_named(data):
    with pytest.raises(MappnbError, match=r"no k_rot.*mappnb\.Capture\(\['q_rot', 'k_rot'\]\)"):
        Attention(data.drop_vars("k_rot"))
    with pytest.raises(MappnbError, match="no sample yet"):
        Attention(data.isel(sample=slice(0)))
    with pytest.raises(MappnbError, match="tokens= belongs to an array"):
        Attention(data, tokens=["a"])


def test_code_makes_the_view_again(data):
    view = Attention(
        data, layer=2, head=3, query=5, scale="log", threshold=0.05, compare=2, order="entropy", window=(4, 20, 0, 16)
    )
    view.set(fit=True, mode="lines")
    again = eval(view.code, {"mappnb": mappnb, "activations": data})
    assert again._where == view._where and again.code == view.code
    assert repr(view) == "Attention(3 layers, 6 heads, 4 samples, 40 tokens)"


def test_views_follow_each_other(data):
    a, b = Attention(data), Attention(data, sample=2)
    tie = mappnb.widgets.link(a, b, share=("selection",))
    a.goto(layer=2, head=1, query=9)
    assert (b._where.layer, b._where.head, b._where.query, b._where.sample) == (2, 1, 9, 2)
    tie.unlink()


def test_a_tree_and_a_run_are_taken(data, tmp_path, monkeypatch):
    tree = xr.DataTree.from_dict({"full": data.assign_attrs({}), "other": xr.Dataset()})
    tree.attrs["model"] = data.attrs["model"]
    view = Attention(tree)
    np.testing.assert_allclose(view.pattern(layer=1, head=2).values, softmax_pattern(data, 0, 1, 2), atol=1e-6)
    facts = {
        "causal": True,
        "softmax_scale": activation_runs.HEAD_DIM**-0.5,
        "window": None,
        "softcap": None,
        "alibi": False,
        "sinks": None,
    }
    monkeypatch.setattr(activation_runs, "FACTS", {**activation_runs.FACTS, **facts})
    run = mappnb.attach(activation_runs.write_run(tmp_path / "run", Layout(tp=2, pp=2), points=("q_rot", "k_rot")))
    view = run.attention(layer=3, head=2, step=1)
    assert view.code == "run.attention(sample=4, layer=3, head=2)"
    q = activation_runs.whole("q_rot", 1, 0, 0)[0, 3, :, 2].astype(np.float64)
    k = activation_runs.whole("k_rot", 1, 0, 0)[0, 3, :, 1].astype(np.float64)
    scores = q @ k.T * activation_runs.HEAD_DIM**-0.5
    scores[np.triu_indices(len(q), 1)] = -np.inf
    expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    np.testing.assert_allclose(view.pattern().values, expected, atol=1e-6)
    assert frames(view.samples, 4) == [0, 4]


# --------------------------------------------------------------------------------------------------------- ready arrays
def test_a_ready_array(rng):
    pattern = np.tril(rng.random((2, 3, 5, 5)))
    view = Attention(pattern, tokens=["a", " b", b"\xff", 7, "e"])
    np.testing.assert_allclose(view.pattern(layer=1, head=2).values, pattern[1, 2], rtol=1e-6)
    assert view.pattern(layer=0, head=0)["key_token"].values.tolist() == ["a", "·b", "⟨FF⟩", "7", "e"]
    assert list(view.scores.columns) == ["layer", "head"]
    steps = xr.DataArray(
        rng.random((3, 2, 3, 5, 5)),
        dims=("step", "layer", "head", "query", "key"),
        coords={"step": [3, 6, 9], "layer": [4, 8]},
    )
    view = Attention(steps, step=6, layer=8, head=1, compare_step=9)
    assert view._where.sample == 1 and view._where.compare == 2
    np.testing.assert_allclose(view.pattern().values, steps.values[1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("given_", "tokens", "said"),
    [
        (np.zeros((2, 3, 4, 5)), None, "4 queries and 5 keys"),
        (np.zeros((2, 3, 4, 4)), ["a"], "tokens: 1; expected 4 texts"),
        (np.zeros(4), None, "shape \\(4,\\)"),
        (np.zeros((2, 3, 4, 4), int), None, "int64; expected numbers from 0 to 1"),
        (xr.DataArray(np.zeros((2, 4, 4)), dims=("banana", "query", "key")), None, "dims .*banana"),
        (np.zeros((0, 3, 4, 4)), None, "patterns are empty"),
    ],
)
def test_arrays_that_are_no_patterns(given_, tokens, said):
    with pytest.raises(MappnbError, match=said):
        Attention(given_, tokens=tokens)


# ---------------------------------------------------------------------------------------------------------- token texts
@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (" cat", "·cat"), ("Ġcat", "·cat"), ("ĠĠ", "··"), ("▁the", "·the"), ("\n\n", "⏎⏎"), ("\t", "⇥"), ("\x07", "⟨07⟩"), ("\x85", "⟨85⟩"),
        ("\u202e", "⟨U+202E⟩"), ("\u2028", "⟨U+2028⟩"), ("\ud800", "⟨U+D800⟩"), ("", "∅"), ("\u0301x", "◌\u0301x"),
        (b"caf\xc3\xa9", "café"),
        (b"\xc3", "⟨C3⟩"), ("<0x0A>", "<0x0A>"), ("<b>", "<b>"), (17, "17"), ("x" * 80, "x" * 60 + "…"), ("\U0010ffff", "⟨U+10FFFF⟩"),
    ],
)  # fmt: skip
def test_tokens_hide_nothing(token, expected):
    assert shown(token) == expected


@given(st.text(max_size=20) | st.binary(max_size=12))
def test_any_token_can_be_shown(token):
    text = shown(token)
    assert text and all(c.isprintable() for c in text)
    text.encode("utf-8")


# ------------------------------------------------------------------------------------------------------------- messages
@pytest.fixture(scope="module")
def big():
    return activations()


def test_no_message_is_larger_than_40_kb(big):
    """12 layers, 12 heads, 128 tokens: every kind of message, with its JSON."""
    view = Attention(big, compare=1)
    front = Front(view)
    kinds = {"ready": {}, "tokens": {"sample": 1}, "scores": {"sample": 0}, "code": {}}
    for kind, body in kinds.items():
        front.ask(kind, **body)
    for compare in (None, 1):
        _, got = front.ask("thumbs", sample=0, compare=compare, first=0, pool="max")
        assert got["thumbs"].shape == (12, 12, 16, 16)
        for kind in ("detail", "difference") if compare else ("detail", "other"):
            _, got = front.ask(kind, sample=0, compare=compare, layer=3, head=7, window=None, pool="max")
            assert got["codes"].shape == (128, 128)
        front.ask("row", sample=0, compare=compare, layer=3, head=7, at=100, axis="query")
    assert view.errors == []
    sizes = {c["kind"]: len(json.dumps(c)) + sum(map(len, b)) for c, b in front.sent}
    assert front.largest <= 40_000, sizes
    assert sizes["thumbs"] <= 37_200 and sizes["detail"] <= 16_700
    view.close()


def test_messages_carry_what_was_asked(view, data):
    front = Front(view)
    state = front.last("state")[0]
    assert state["layers"] == [0, 1, 2] and state["heads"] == list(range(6)) and state["num_samples"] == 4
    assert state["samples"][1] == "step 10, sequence 1"
    told, _ = front.ask("tokens", sample=1)
    assert told["slots"] == list(range(7, 40)) and told["frames"] == [[1, 10], [3, 20]] and told["padding"] == []
    assert told["texts"] == [shown(t) for t in data["token_text"].values[1, 7:]]
    front.say("go", sample=1, layer=2, head=4, query=3, window=[1, 11, 0, 10], threshold=0.2)
    assert (view._where.query, view._where.window) == (10, (8, 18, 7, 17)), "positions become slots"
    _, got = front.ask("detail", sample=1, compare=None, layer=2, head=4, window=[1, 11, 0, 10], pool="max")
    np.testing.assert_allclose(decode(got["codes"]), softmax_pattern(data, 1, 2, 4)[1:11, :10], atol=0.0041)
    _, got = front.ask("row", sample=0, compare=2, layer=0, head=0, at=5, axis="query")
    np.testing.assert_allclose(got["row"], softmax_pattern(data, 0, 0, 0)[5], atol=1e-6)
    np.testing.assert_allclose(got["other"], softmax_pattern(data, 2, 0, 0)[5], atol=1e-6)
    scores, values = front.ask("scores", sample=0)
    assert {s["name"] for s in scores["scores"]} == set(values) and values["induction"].shape == (3, 6)
    assert front.ask("code")[0]["text"] == view.code
    view.goto(layer=1, head=1, query=9)
    assert front.last("goto")[0]["where"]["query"] == 2, "slots become positions"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("thumbs", {"sample": "x", "first": 0, "pool": "max"}),
        ("thumbs", {"sample": 0, "first": 0, "pool": "__class__"}),
        ("detail", {"sample": 0, "layer": 99, "head": 0, "pool": "max"}),
        ("detail", {"sample": 0, "layer": 0, "head": 0, "pool": "max", "window": [0, 1e9, 0, 1]}),
        ("detail", {"sample": 0, "layer": 0, "head": 0, "pool": "max", "window": ["a"]}),
        ("row", {"sample": 0, "layer": 0, "head": 0, "at": 4000, "axis": "key"}),
        ("row", {"sample": 0, "layer": 0, "head": 0, "at": 1, "axis": "diagonal"}),
        ("go", {"sample": 0, "scale": 5}),
        ("go", {"sample": 77}),
        ("go", {"order": "x" * 200}),
        ("go", {"layer": True, "head": 0}),
        ("release", {}),
        ("nonsense", {}),
    ],
)
def test_bad_messages_are_answered_with_an_error(view, kind, body):
    front = Front(view)
    before = view._where
    front.say(kind, **body)
    told = front.last("error")[0]
    assert told["text"] and len(view.errors) == 1 and view._where == before


def test_go_cannot_leave_the_data(view):
    front = Front(view)
    front.say("go", query=10**6, layer=0, head=0)
    assert view._where.query == TOKENS - 1 and view.errors == []


def test_many_heads_come_in_parts():
    data = activations(layers=range(0, 12, 2), heads=32, kv_heads=8, tokens=20, samples=1, dim=8)
    view = Attention(data)
    front = Front(view)
    first, found = 0, []
    while first < 6:
        told, got = front.ask("thumbs", sample=0, compare=None, first=first, pool="max")
        assert got["thumbs"].nbytes <= 36_864
        found.append(got["thumbs"])
        first += told["count"]
    whole = np.concatenate(found)
    assert whole.shape == (6, 32, 16, 16) and front.largest <= 40_000
    view.goto(layer=10, head=31)
    np.testing.assert_array_equal(whole[5, 31], columns(view._source, 0, 10, 31, most=16).codes)


def test_closing_lets_go(data):
    view = Attention(data)
    view.overview()
    assert view._source._kept._bytes > 0
    view.close()
    assert view.closed and view._source._kept._bytes == 0


def test_cache_keeps_the_newest():
    cache = Cache(100)
    for i in range(5):
        cache.put(i, i, 40)
    assert [cache.get(i) for i in range(5)] == [None, None, None, 3, 4]
    cache.get(3)
    cache.put(5, 5, 40)
    assert cache.get(4) is None and cache.get(3) == 3
    cache.put(3, "new", 90)
    assert cache.get(3) == "new" and cache._bytes == 90
    assert cache.put(9, "huge", 101) == "huge" and cache.get(9) is None


# --------------------------------------------------------------------------------------------------------------- static
def page_data(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def page_codes(told: dict, heads: int) -> np.ndarray:
    raw = np.frombuffer(zlib.decompress(base64.b64decode(told["codes"])), np.uint8).reshape(heads, -1)
    cells = told["cells"]
    if not told["lower"]:
        return raw.reshape(heads, cells, cells)
    out = np.zeros((heads, cells, cells), np.uint8)
    out[:, *np.tril_indices(cells)] = raw
    return out


def test_page_holds_every_head_and_two_megabytes(big):
    view = Attention(big, compare=1)
    html = view.to_html()
    told = page_data(html)
    assert len(html.encode()) <= 2_000_000 and len(told["samples"]) == 2
    for i in (0, 1):
        codes = page_codes(told["samples"][i], 144)
        assert told["samples"][i]["cells"] == 128
        for layer, head in ((0, 0), (7, 3), (11, 11)):
            np.testing.assert_array_equal(codes[12 * layer + head], columns(view._source, i, layer, head).codes)
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", html)


def test_page_of_the_worst_patterns_fits(rng, tmp_path):
    """Uniform noise does not pack: 144 heads of 128 tokens still fit; more are pooled."""
    noise = np.tril(rng.random((12, 12, 128, 128)))
    view = Attention(noise)
    html = view.to_html(tmp_path / "page.html")
    assert len(html.encode()) <= 2_000_000 and page_data(html)["samples"][0]["cells"] == 128
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html
    wide = Attention(rng.random((2, 6, 12, 128, 128)), compare=1)
    html = wide.to_html()
    told = page_data(html)
    assert len(html.encode()) <= 2_000_000 and len(told["samples"]) == 2
    assert 60 < told["samples"][0]["cells"] < 128 and not told["samples"][0]["lower"]


def test_page_of_many_short_samples_fits(monkeypatch):
    """Their texts weigh more than their patterns; and there is an end to what a page waits for."""
    view = Attention(activations(layers=range(1), heads=2, kv_heads=2, tokens=48, samples=80, dim=8))
    whole = view.to_html()
    assert len(page_data(whole)["samples"]) == 64
    least = len(Attention(activations(layers=range(1), heads=2, kv_heads=2, tokens=8, samples=1, dim=8)).to_html())
    monkeypatch.setattr(_attn_page, "MOST_BYTES", (len(whole) + least) // 2)
    html = view.to_html()
    assert len(html.encode()) <= (len(whole) + least) // 2 and 10 < len(page_data(html)["samples"]) < 64


def test_static_texts_are_escaped(data):
    hostile = ["</script><script>window.hurt=1</script>", "<img src=x onerror=alert(1)>", "&amp;", "\u2028"]
    pattern = np.tril(np.full((1, 1, 4, 4), 0.5))
    view = Attention(pattern, tokens=hostile, layer=0, head=0)
    for html in (view.to_html(), view.twin_html(), view.snapshot()._repr_html_()):
        assert "<script>window.hurt" not in html and "<img src=x" not in html and "\u2028" not in html
    assert page_data(view.to_html())["samples"][0]["tokens"]["texts"][0] == shown(hostile[0])


def test_snapshot_and_twin(view, tmp_path):
    for where in ({}, {"layer": 1, "head": 2}, {"layer": 1, "head": 2, "query": 9}):
        view.goto(**where)
        shot = view.snapshot()
        assert (
            shot.svg.startswith("<svg")
            and "data:image/png;base64," in shot.svg
            and view.code in shot._repr_html_().replace("&#x27;", "'")
        )
        assert len(shot._repr_html_()) < 60_000
        assert "mappnb-still-attn" in view.twin_html()
    shot.save(tmp_path / "a.svg")
    assert "xmlns" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    view.compare(2)
    assert view.snapshot().svg.count("<image") == 3
    assert WORDS[1].replace(" ", "·") in view.snapshot().svg


def test_refresh_finds_what_was_written_since(tmp_path, monkeypatch):
    facts = {"causal": True, "softmax_scale": 1.0, "window": None, "softcap": None, "alibi": False, "sinks": None}
    monkeypatch.setattr(activation_runs, "FACTS", {**activation_runs.FACTS, **facts})
    points = ("q_rot", "k_rot")
    run = mappnb.attach(activation_runs.write_run(tmp_path / "run", points=points, steps=(0,)))
    view = run.attention(layer=1, head=1)
    front = Front(view)
    activation_runs.add_block(tmp_path / "run", 0, 1, activation_runs.block_of(0, Layout(), 1, points=points))
    view.refresh()
    assert len(view.samples) == 8 and front.last("state")[0]["num_samples"] == 8
    assert view._where.layer == 1 and frames(view.samples, 0) == [0, 4]


def test_a_picture_nobody_asked_for_is_cheap():
    num = 2048
    tokens = [str(i) for i in range(num)]
    view = Attention(np.broadcast_to(np.eye(num, dtype=np.float32), (6, 8, num, num)), tokens=tokens)
    assert "view.snapshot()" in view.twin_html() and "<svg" not in view.twin_html()
    assert Front(view).last("state")[0]["scores_soon"] is False
