"""Names of points: grammar, aliases, groups, and what is said of a name that does not exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mappnb.activation_points import GROUPS, POINTS, WEIGHTS, PointName, alias, parse_point, point_names, resolve
from mappnb.errors import CaptureError, SchemaError

NAMES = st.builds(
    lambda point, layer, grad: PointName(point, layer if POINTS[point].per_layer else -1, grad),
    st.sampled_from(sorted(POINTS)),
    st.integers(-1, 200),
    st.booleans(),
)


@given(NAMES)
def test_text_and_name_are_inverses(name: PointName) -> None:
    assert parse_point(str(name)) == name
    assert resolve(str(name)) == str(name)


@pytest.mark.parametrize("style", ["tl", "hf", "gpt2"])
def test_aliases_come_back(style) -> None:
    for point, info in POINTS.items():
        name = f"layers.7.{point}" if info.per_layer else point
        try:
            other = alias(name, style)
        except SchemaError:
            continue
        expected = (
            "layers.7.mlp_pre" if (style, point) == ("tl", "mlp_gate") else name
        )  # TransformerLens has one name for both
        assert resolve(other) == expected


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("blocks.3.attn.hook_q", "layers.3.q"),
        ("blocks.11.hook_resid_post", "layers.11.resid_post"),
        ("blocks.0.attn.hook_rot_k", "layers.0.k_rot"),
        ("ln_final.hook_normalized", "final_ln"),
        ("model.layers.3.self_attn.o_proj", "layers.3.attn_out"),
        ("model.layers.3.self_attn.o_proj.input", "layers.3.z"),
        ("model.layers.12", "layers.12.resid_post"),
        ("model.layers.12.output", "layers.12.resid_post"),
        ("model.layers.12.mlp.down_proj.input", "layers.12.mlp_act"),
        ("model.norm", "final_ln"),
        ("transformer.h.5.mlp.c_fc", "layers.5.mlp_pre"),
        ("transformer.h.5.ln_2.input", "layers.5.resid_mid"),
        ("lm_head", "logits"),
        ("layers.*.q", "q"),
        ("blocks.*.attn.hook_q.grad", "q.grad"),
    ],
)
def test_names_of_other_libraries(name, canonical) -> None:
    assert resolve(name) == canonical


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layers.3.resid_pots", "did you mean 'resid_post'"),
        ("layers.x.q", "'x' is no layer"),
        ("layers.3.logits", "logits belongs to no layer"),
        ("unembed.grad", "gradient of a weight"),
    ],
)
def test_wrong_names(name, said) -> None:
    with pytest.raises(SchemaError, match=said):
        parse_point(name)


def test_fused_modules_and_near_names() -> None:
    with pytest.raises(SchemaError, match="gives q, k, v in one"):
        resolve("transformer.h.3.attn.c_attn")
    with pytest.raises(CaptureError, match=r"did you mean 'blocks\.\*\.hook_resid_post'"):
        resolve("blocks.1.hook_resid_psot", error=CaptureError)
    with pytest.raises(SchemaError, match="known: tl, hf, gpt2; did you mean 'gpt2'"):
        alias("q", "gpt")
    with pytest.raises(SchemaError, match="say the layer"):
        alias("q", "tl")


def test_groups() -> None:
    assert [n.point for n in point_names("all")] == list(POINTS)
    assert point_names(["residual", "resid_post", "layers.2.q.grad"]) == [
        *(PointName(p) for p in GROUPS["residual"]),
        PointName("q", 2, True),
    ]
    assert all(n.grad for n in point_names("mlp.grad"))


def test_the_table_is_whole() -> None:
    for info in [*POINTS.values(), *WEIGHTS.values()]:
        assert info.what and info.sharding and info.dims
        assert info.split in ("", *info.dims)
    assert not set(POINTS) & set(WEIGHTS)
