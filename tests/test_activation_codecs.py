"""Packing of tensors: what comes back, and how far off it may be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mappnb.activation_codecs import MODES, bfloat16_bits, decode, encode, from_bits, part_name, sketch_matrix
from mappnb.errors import SchemaError

numbers = st.floats(-1e6, 1e6, width=32)
tensors = hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=9), elements=numbers)


def through(mode, x, **options):
    parts, attrs = encode(mode, x, **options)
    return decode(mode, parts, attrs)


@given(tensors)
def test_full_is_the_same(x):
    np.testing.assert_array_equal(through("full", x), x)


@given(tensors)
def test_casts_round_to_nearest(x):
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)  # beyond 65504 infinite, as in torch
    np.testing.assert_array_equal(through("cast", x, to="float16"), half)
    assert (np.abs(through("cast", x) - x) <= np.abs(x) * 2.0**-8 + 1e-38).all()  # bfloat16 has 8 bits


@given(tensors)
def test_int8_is_off_by_half_a_step_at_most(x):
    back = through("int8", x)
    step = np.abs(x).max(-1, keepdims=True) / 127
    assert (np.abs(back - x) <= step * 0.5001 + 1e-30).all()
    rows = np.abs(x).max(-1) > 1e-30
    largest = np.take_along_axis(back, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.abs(largest)[rows], np.abs(x).max(-1)[rows], rtol=1e-6)


def test_int8_marks_what_is_not_finite():
    x = np.array([[1, np.nan, -np.inf, -1], [np.nan] * 4, [0, 0, 0, 0]], np.float32)
    back = through("int8", x)
    np.testing.assert_array_equal(back, [[1, np.nan, np.nan, -1], [np.nan] * 4, [0] * 4])


@given(tensors, st.integers(1, 12))
def test_topk_keeps_the_largest_and_nothing_else(x, k):
    back = through("topk", x, k=k)
    kept = back != 0
    np.testing.assert_array_equal(back[kept], x[kept])
    assert (kept.sum(-1) <= k).all()
    left = np.where(kept, 0, np.abs(x)).max(-1)
    least = np.where(kept, np.abs(x), np.inf).min(-1)
    assert (left <= least).all()
    full = np.count_nonzero(x, axis=-1) <= k
    np.testing.assert_array_equal(back[full], x[full])


def test_topk_keeps_nan_and_long_rows_have_long_indexes(rng):
    x = rng.standard_normal((2, 70_000)).astype(np.float32)
    x[0, 5] = np.nan
    parts, attrs = encode("topk", x, k=3)
    assert parts["index"].dtype == np.uint32 and 5 in parts["index"][0]
    back = decode("topk", parts, attrs)
    assert np.isnan(back[0, 5]) and np.count_nonzero(back[1]) == 3
    assert encode("topk", x[:, :100], k=3)[0]["index"].dtype == np.uint16


@given(tensors, st.integers(1, 12))
def test_buckets_by_a_loop(x, size):
    for reduce, function in (("mean", np.mean), ("max", np.max)):
        back = through("bucket", x, size=size, reduce=reduce)
        groups = [function(x[..., i : i + size], axis=-1) for i in range(0, x.shape[-1], size)]
        np.testing.assert_allclose(back, np.stack(groups, -1), rtol=1e-5, atol=1e-1 if reduce == "mean" else 0)


def test_sketch_keeps_inner_products_and_shards_add_up(rng):
    x = rng.standard_normal((2, 3000)).astype(np.float32)
    x[1] += x[0]  # an inner product that is not small
    a, b = through("sketch", x, size=1024, seed=3)
    assert a @ b == pytest.approx(x[0] @ x[1], rel=0.15)
    parts = [through("sketch", x[:, i : i + 1000], size=1024, seed=3, start=i) for i in (0, 1000, 2000)]
    np.testing.assert_allclose(sum(parts), np.stack([a, b]), rtol=1e-3, atol=1e-3)


def test_sketch_matrix_is_what_it_always_was():
    signs = sketch_matrix(4, 7, 0, 6) * 2
    np.testing.assert_array_equal(
        signs, np.array(SKETCH_OF_SEED_7, np.float32)
    )  # stored sketches are compared over runs: it may never change
    np.testing.assert_array_equal(sketch_matrix(4, 7, 2, 5) * 2, signs[2:5])
    big = sketch_matrix(100, 1, 0, 2000)
    assert np.abs(big).max() == pytest.approx(0.1) and abs(big.mean()) < 1e-3
    assert not np.array_equal(big, sketch_matrix(100, 2, 0, 2000))


SKETCH_OF_SEED_7 = [[-1, -1, 1, -1], [1, 1, 1, -1], [-1, -1, -1, 1], [-1, 1, -1, -1], [-1, 1, 1, -1], [-1, -1, 1, 1]]


@given(hnp.arrays(np.uint16, st.integers(1, 50), elements=st.integers(0, 65535)))
def test_bfloat16_bits_come_back(bits):
    values = from_bits(bits, "bfloat16")
    back = from_bits(bfloat16_bits(values), "bfloat16")
    np.testing.assert_array_equal(back, values)
    np.testing.assert_array_equal(through("full", bits, dtype="bfloat16"), values)
    assert through("topk", bits, dtype="bfloat16", k=2).dtype == np.float32


def test_empty_rows_and_one_element():
    for mode, options in (("full", {}), ("int8", {}), ("cast", {}), ("bucket", {"size": 3}), ("topk", {"k": 2})):
        assert through(mode, np.zeros((0, 4), np.float32), **options).shape[0] == 0
        assert through(mode, np.full((2, 1), 3, np.float32), **options)[1, 0] == 3


def test_a_selection_is_decoded_as_the_whole(rng):
    x = rng.standard_normal((4, 3, 8)).astype(np.float32)
    for mode, options in (("int8", {}), ("topk", {"k": 3})):
        parts, attrs = encode(mode, x, **options)
        some = {name: part[1:3, 0] for name, part in parts.items()}
        np.testing.assert_array_equal(decode(mode, some, attrs), decode(mode, parts, attrs)[1:3, 0])


def test_errors_say_what_is_known():
    with pytest.raises(SchemaError, match=r"unknown mode 'topK'.*known: full, cast.*did you mean 'topk'"):
        encode("topK", np.zeros(3, np.float32), k=1)
    with pytest.raises(SchemaError, match=r"'int8' needs the parts .*missing: \['scale'\]"):
        decode("int8", {"": np.zeros(3, np.int8)}, {})
    assert part_name("q", "scale") == "q_scale" and part_name("q", "") == "q"
    assert set(MODES) == {"full", "cast", "int8", "topk", "bucket", "sketch"}
