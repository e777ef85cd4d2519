"""The explain view without a browser: what is drawn sums to the explanation, what is pressed runs its methods."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("anywidget", reason="needs anywidget")

from capture.ranks import run_ranks
from widgets.explain_case import large, on_ranks, small
from widgets.front import Front

from mappnb.errors import InterpError, MappnbError
from mappnb.widgets import Explain
from mappnb.widgets import _expl_levels as levels


@pytest.fixture(scope="module")
def told():
    return small()


@pytest.fixture
def view(told):
    made = Explain(told)
    yield made
    made.close()


@pytest.fixture
def front(view):
    return Front(view)


def row_of(told, query: str) -> int:
    return int(told.table.query(query).index[0])


# ------------------------------------------------------------------------------------------------------------- columns
def test_waterfall_adds_up_to_the_metric(told):
    steps = levels.waterfall(told.table, told.unexplained)
    assert sum(s.value for s in steps) == pytest.approx(told.metric, abs=1e-12)
    assert [s.name for s in steps] == [
        "embedding", *(f"L{at} {part}" for at in range(3) for part in ("attention", "MLP")), "final norm bias", "unexplained",
    ]  # fmt: skip
    table = told.table
    heads = table[table["component"].isin(["head", "attention_bias"]) & (table["layer"] == 1)]
    assert steps[3].value == pytest.approx(heads["direct_effect"].sum(), abs=1e-12)
    assert steps[-1].value == told.unexplained


def test_waterfall_of_many_layers_has_a_step_each(told):
    found = large(told, layers=40, heads=2, tokens=5)
    steps = levels.waterfall(found.table, found.unexplained)
    assert len(steps) == 42 and sum(s.value for s in steps) == pytest.approx(found.metric)
    mine = found.table[found.table["layer"] == 7]
    assert next(s for s in steps if s.name == "L7").value == pytest.approx(mine["direct_effect"].sum())


def test_sums_by_token_and_layer(view, told):
    drawn, table = view.columns, told.table
    names = levels.Level((), "", table).components
    assert names == ["embed", "head", "mlp", "neuron", "attention_bias", "final_norm_bias"]
    for measure in ("attribution", "direct_effect"):
        for code, name in enumerate(names):
            for t in (0, 4, 10):
                wanted = table[(table["component"] == name) & (table["position"] == t)][measure].sum()
                assert drawn[f"strip_{measure}"][code, t] == pytest.approx(wanted, abs=1e-6)
        for at in range(3):
            wanted = table[(table["component"] == "head") & (table["layer"] == at) & (table["position"] == 10)][
                measure
            ].sum()
            assert drawn[f"head_{measure}"][at, 10] == pytest.approx(wanted, abs=1e-6)
    assert drawn["edges"].tolist() == list(range(12))


def test_long_prompts_share_columns_and_keep_their_sums(told):
    found = large(told, layers=2, heads=2, tokens=1300)
    level = levels.Level((), "", found.table)
    drawn = levels.sums(level, 2, 1300)
    assert drawn["head_attribution"].shape == (2, 512) and drawn["edges"][[0, -1]].tolist() == [0, 1300]
    heads = found.table[(found.table["component"] == "head") & (found.table["layer"] == 1)]
    a, b = drawn["edges"][100:102]
    wanted = heads[(heads["position"] >= a) & (heads["position"] < b)]["attribution"].sum()
    assert drawn["head_attribution"][1, 100] == pytest.approx(wanted, abs=1e-6)
    assert drawn["head_attribution"][1].sum() == pytest.approx(heads["attribution"].sum(), abs=1e-4)


def test_of_a_large_table_the_largest_rows_go_to_the_browser(told):
    found = large(told)
    assert len(found.table) == 163_500
    front = Front(Explain(found))
    content, _ = front.ask("level", path=[])
    parts = [m for m in front.sent if m[0]["kind"] == "level"]
    arrays = {name: a for c, b in parts for name, a in front.decoded(c, b)[1].items()}
    assert front.largest <= 500_000
    assert parts[0][0]["left"] == 163_500 - 20_000 and len(arrays["row"]) == 20_000
    size = found.table[["direct_effect", "attribution"]].abs().max(axis=1)
    assert size.loc[arrays["row"]].min() >= size.drop(arrays["row"]).max()
    assert arrays["strip_attribution"].sum() == pytest.approx(found.table["attribution"].sum(), abs=1e-2)
    rest = found.table.drop(arrays["row"])
    small = int(rest.index[rest["component"] == "head"][0])
    where = {**front.view._where.told(), "component": "mlp", "layer": 5, "position": 7, "row": small}
    content, more = front.ask("rows", **where)
    mine = found.table.query("component == 'mlp' and layer == 5 and position == 7").index
    assert more["row"].tolist() == [*mine, small] and content["path"] == []
    assert more["attribution"] == pytest.approx(found.table.loc[more["row"], "attribution"].to_numpy(), rel=1e-6)
    page = front.view.to_html()
    assert len(page) <= 2_000_000
    front.view.close()


def test_rows_rank_and_filter(view, told):
    assert view.rows["attribution"].abs().iloc[:-4].is_monotonic_decreasing
    assert view.rows.index[0] == told.top(1).index[0]
    view.set(by="direct_effect", component="head", layer=2, position=10)
    assert (
        view.rows.index[0]
        == told.table.query("component == 'head' and layer == 2 and position == 10")["direct_effect"].abs().idxmax()
    )
    assert len(view.rows) == 4
    assert view.selection.equals(view.rows)
    assert (
        view.code == "mappnb.widgets.Explain(explanation, by='direct_effect', component='head', layer=2, position=10)"
    )
    again = eval(view.code, {"mappnb": __import__("mappnb.widgets"), "explanation": told})
    assert again._where == view._where
    again.close()


# ------------------------------------------------------------------------------------------------------------- actions
def test_ablate_is_the_explanations(view, told, front):
    row = row_of(told, "component == 'head' and layer == 1 and unit == 2 and position == 10")
    front.say("go", **{**view._where.told(), "row": row})
    assert view.selection.index.tolist() == [row] and "ablation" not in view.selection
    content, _ = front.ask("ablate", row=row, path=[])
    assert content["real"] == pytest.approx(told.ablate(row), abs=1e-7)
    assert content["predicted"] == told.table.loc[row, "attribution"]
    assert view.selection["ablation"].item() == content["real"]
    assert view.ablations[["component", "layer", "unit", "position"]].to_numpy().tolist() == [["head", 1, 2, 10]]
    content, _ = front.ask("level", path=[])
    assert content["ablated"] == [[row, view.ablate(row)]]


def test_a_component_is_ablated_once(view, told, monkeypatch):
    row = row_of(told, "component == 'mlp' and layer == 0 and position == 3")
    calls = []
    monkeypatch.setattr(type(told), "ablate", lambda self, at: calls.append(at) or 0.25)
    assert view.ablate(row) == view.ablate(row) == 0.25 and len(calls) == 1
    assert Front(view).ask("ablate", row=row, path=[])[0]["real"] == 0.25 and len(calls) == 1


def test_upstream_and_back(view, told, front):
    row = row_of(told, "component == 'head' and layer == 2 and unit == 1 and position == 10")
    content, arrays = front.ask("level", path=[row])
    wanted = told.upstream(row)
    pd.testing.assert_frame_equal(view.table, wanted)
    assert arrays["attribution"] == pytest.approx(wanted["attribution"].to_numpy(), abs=1e-7)
    assert [c[0] for c in content["crumbs"]] == [[], [row]] and content["crumbs"][1][
        1
    ] == "upstream of L2 head 1 at 10 “d”"
    assert "direct_effect" not in arrays and "waterfall" not in content
    assert view._where.path == (row,)
    inner = row_of_frame(wanted, "component == 'mlp'")
    content, _ = front.ask("level", path=[row, inner])
    assert len(content["crumbs"]) == 3
    pd.testing.assert_frame_equal(view.table, told.upstream(wanted.loc[inner]))
    assert view.code == f"mappnb.widgets.Explain(explanation, path=({row}, {inner}))"
    view.back()
    assert view._where.path == (row,) and view._where.row == inner
    assert front.last("goto")[0]["where"]["row"] == inner


def test_nothing_is_before_what_has_no_effect(view, told, front):
    row = row_of(told, "component == 'head' and layer == 2 and unit == 1 and position == 9")
    assert told.table.loc[row, "attribution"] == 0.0, "the last layer, not the last token"
    content, arrays = front.ask("level", path=[row])
    assert content["components"] == [] and len(arrays["row"]) == 0 and not arrays["head_attribution"].any()
    assert "0 of 0 rows" in view.snapshot()._repr_html_() and view.errors == []


def row_of_frame(frame, query: str) -> int:
    return int(frame.query(query).index[0])


def test_ablating_an_upstream_row_is_compared_with_its_own_attribution(view, told):
    row = row_of(told, "component == 'mlp' and layer == 2 and position == 10")
    table = view.upstream(row)
    inner = row_of_frame(table, "component == 'head' and layer == 1")
    content, _ = Front(view).ask("ablate", row=inner, path=[row])
    same = told.table.merge(table.loc[[inner], ["component", "layer", "unit", "position"]])
    assert content["predicted"] == pytest.approx(same["attribution"].item())
    assert content["predicted"] != pytest.approx(table.loc[inner, "attribution"])
    assert content["real"] == pytest.approx(told.ablate(table.loc[inner]))


def test_check_is_the_explanations(view, told, front):
    content, _ = front.ask("check", n=8)
    wanted = told.check(8)
    assert [r[0] for r in content["rows"]] == wanted.index.tolist()
    assert content["real"] == pytest.approx(wanted["ablation"].tolist(), abs=1e-6)
    assert content["correlation"] == pytest.approx(wanted.attrs["correlation"], abs=1e-6)
    assert len(view.ablations) == 8
    assert view.rows.loc[wanted.index, "ablation"].to_numpy() == pytest.approx(wanted["ablation"].to_numpy(), abs=1e-6)
    assert front.ask("ready", theme="dark")[0]["check"]["rows"] == content["rows"]


# -------------------------------------------------------------------------------------------------------- several ranks
def test_a_model_on_several_ranks_is_not_run_by_a_click(told, monkeypatch):
    monkeypatch.setitem(told.model.layout, "tp", 2)
    view = Explain(told)
    front = Front(view)
    state = front.last("state")[0]
    assert "spread over ranks (tp=2)" in state["readonly"] and "on every rank" in state["readonly"]
    calls = []
    for name in ("ablate", "upstream", "check"):
        monkeypatch.setattr(type(told), name, lambda self, *a, name=name, **k: calls.append(name) or 0.5)
    row = row_of(told, "component == 'head'")
    for kind, fields in (("ablate", {"row": row, "path": []}), ("level", {"path": [row]}), ("check", {"n": 20})):
        assert "spread over ranks" in front.ask(kind, **fields)[0]["text"]
    assert calls == []
    assert view.ablate(row) == 0.5, "Python may: it runs on every rank"
    assert front.ask("ablate", row=row, path=[])[0]["real"] == 0.5, "what is known is told"
    assert calls == ["ablate"]
    view.close()


# --------------------------------------------------------------------------------------------------------------- static
def test_snapshot_and_twin(view, told, tmp_path):
    view.check(6)
    shot = view.snapshot()
    assert shot.code == view.code and repr(shot).startswith("Snapshot of Explain('a' instead of 'b'")
    html = shot._repr_html_()
    best = told.top(1).iloc[0]
    name = levels.component_name(best["component"], best["layer"], best["unit"])
    assert f">{name}</td>" in html and f">{name}</text>" in html
    assert "6 real ablations: correlation" in html and "<script" not in html
    assert len(re.findall(r"<rect", shot.svg)) >= 11 + 9
    shot.save(tmp_path / "shot.svg")
    assert "as it was saved" in view.twin_html()
    view.upstream(row_of(told, "component == 'mlp' and layer == 2 and position == 10"))
    assert "upstream of L2 MLP" in view.snapshot()._repr_html_()


def test_page_holds_what_was_worked_out(view, told, tmp_path):
    row = row_of(told, "component == 'mlp' and layer == 1 and position == 10")
    real = view.ablate(row)
    view.upstream(row)
    page = view.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page and len(page) < 300_000
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))
    assert set(data["levels"]) == {"", str(row)} and data["state"]["traced"] == [[row]]
    assert data["levels"][""]["ablated"] == [[row, real]]
    first = data["levels"][""]["arrays"][0]
    assert first["name"] == "row"
    labels = np.frombuffer(base64.b64decode(data["levels"][""]["base64"][0]), "<i4")
    assert labels.tolist() == told.table.index.tolist()
    assert "holds no model" in data["state"]["readonly"] and "http" not in re.sub(
        r"http://www\.w3\.org/2000/svg", "", page
    )


def test_texts_of_a_prompt_are_escaped(told):
    found = large(told, layers=2, heads=1, tokens=9)
    view = Explain(found)
    state = Front(view).last("state")[0]
    assert state["tokens"][0] == "<b>⟨U+202E⟩" and state["tokens"][1] == "·word1"
    assert (
        "<b>" not in view.snapshot()._repr_html_()
        and "<b>" not in view.to_html().split("<body>")[1].split('<script type="module"')[0]
    )
    view.close()


# -------------------------------------------------------------------------------------------------------------- mistakes
def test_mistakes_are_told(view, told, front):
    bias = row_of(told, "component == 'final_norm_bias'")
    for call, words in [
        (lambda: Explain(told.table), "a DataFrame was given; expected what mappnb.interp.explain"),
        (lambda: Explain(told, by="atribution"), "did you mean 'attribution'"),
        (lambda: Explain(told, component="heads"), "did you mean 'head'"),
        (lambda: Explain(told, layer=3), "layer is 3; there are 3, from 0"),
        (lambda: Explain(told, position=11), "position is 11; there are 11"),
        (lambda: Explain(told, row=10**6), "no row 1000000"),
        (lambda: Explain(told, path=[10**6]), "no way"),
        (lambda: view.set(units=3), "set\\(\\) has no 'units'"),
        (view.ablate, "which row"),
        (lambda: view.ablate(bias), "it is a bias of the model"),
        (lambda: view.upstream(row_of(told, "component == 'embed'")), "nothing of the model is before it"),
    ]:
        with pytest.raises((MappnbError, InterpError), match=words):
            call()
    assert view._where.path == ()
    for kind, fields, words in [
        ("level", {"path": "x"}, "path is 'x'"),
        ("level", {"path": [10**8]}, "no way"),
        ("ablate", {"row": "__import__", "path": []}, "expected a finite number"),
        ("ablate", {"row": bias, "path": []}, "it is a bias of the model"),
        ("ablate", {"row": 0, "path": [3]}, "left by now"),
        ("go", {**view._where.told(), "by": "x"}, "by is 'x'"),
        ("nonsense", {}, "unknown message"),
    ]:
        assert words in front.ask(kind, **fields)[0]["text"], kind
    assert len(view.errors) == 7


def test_a_closed_view_lets_go(told):
    view = Explain(told)
    view.close()
    assert view.describe() == "Explain(closed)" and view._levels == {} and view._explanation is None
    with pytest.raises(MappnbError, match="closed"):
        view.explanation  # noqa: B018


@pytest.mark.dist
def test_a_view_in_a_job_of_two_ranks():
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    preload = ("mappnb.testing.gpt_train", "mappnb.testing.gpt_model")
    (one,) = run_ranks(on_ranks, 1, {}, timeout_s=120, preload=preload)
    assert one["readonly"] == ""
    for found in run_ranks(on_ranks, 2, {"tp": 2}, timeout_s=120, preload=preload):
        assert "tp=2" in found["readonly"] and all("tp=2" in text for text in found["refused"])
        assert found["ablated"] == pytest.approx(one["ablated"], abs=1e-5)
        assert found["upstream"] == one["upstream"] and found["told"]
