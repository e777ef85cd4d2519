"""Statistics of tensors: the native pass against numpy, exact merging, special values, strides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mappnb.activation_codecs import bfloat16_bits, from_bits
from mappnb.activation_stats import (
    BIN_EXPONENTS,
    FIELDS,
    NUM_BINS,
    STATS,
    describe,
    empty,
    merge,
    merge_all,
    tensor_stats,
    tensor_stats_reference,
)

AT = {name: i for i, name in enumerate(FIELDS)}


def assert_same(found, expected):
    """Compare statistics: counts and ends exactly, moments to what double precision gives for their scale."""
    (fields, histogram), (other, other_histogram) = found, expected
    np.testing.assert_array_equal(histogram, other_histogram)
    exact = [AT[name] for name in ("count", "min", "max", "num_zero", "num_nan", "num_posinf", "num_neginf")]
    np.testing.assert_array_equal(fields[exact], other[exact])
    n = max(other[AT["count"]], 1)
    spread = np.sqrt(other[AT["m2"]] / n)
    size = max(abs(other[AT["mean"]]), spread)
    np.testing.assert_allclose(fields[AT["mean"]], other[AT["mean"]], rtol=1e-12, atol=1e-13 * size)
    reach = max(other[AT["max"]] - other[AT["min"]], 0) if other[AT["count"]] else 0
    noise = 1e-13 * size  # each distance from the mean is known to so much
    for power, name in enumerate(("m2", "m3", "m4"), start=2):
        scale = n * (reach**power * 1e-12 + power * noise * (reach + noise) ** (power - 1))
        assert abs(fields[AT[name]] - other[AT[name]]) <= scale, name


def floats(dtype, width):
    return hnp.arrays(
        dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40), elements=st.floats(width=width)
    )


@given(floats(np.float32, 32))
def test_native_equals_numpy_float32(x):
    assert_same(tensor_stats(x), tensor_stats_reference(x))


@given(floats(np.float16, 16))
def test_native_equals_numpy_float16(x):
    assert_same(tensor_stats(x), tensor_stats_reference(x))


@given(hnp.arrays(np.float64, hnp.array_shapes(max_side=40), elements=st.floats(-1e60, 1e60)))
def test_native_equals_numpy_float64(x):
    assert_same(tensor_stats(x), tensor_stats_reference(x))


@given(hnp.arrays(np.uint16, hnp.array_shapes(max_side=60), elements=st.integers(0, 65535)))
def test_native_equals_numpy_bfloat16_for_all_bits(bits):
    assert_same(tensor_stats(bits, bfloat16=True), tensor_stats_reference(from_bits(bits, "bfloat16")))


def test_every_float16_and_every_bfloat16_falls_in_the_right_bin():
    bits = np.arange(65536, dtype=np.uint16)
    for found, numbers in (
        (tensor_stats(bits.view(np.float16)), bits.view(np.float16)),
        (tensor_stats(bits, bfloat16=True), from_bits(bits, "bfloat16")),
    ):
        x = np.abs(numbers[np.isfinite(numbers) & (numbers != 0)].astype(np.float64))
        exponents = np.floor(np.log2(x)).astype(int)
        expected = np.bincount(np.clip(exponents, -41, 41) + 41, minlength=NUM_BINS)
        np.testing.assert_array_equal(found[1], expected)
        np.testing.assert_array_equal(found[0][AT["num_zero"]], 2)
    assert BIN_EXPONENTS[0] == -41 and BIN_EXPONENTS[-1] == 41 and len(BIN_EXPONENTS) == NUM_BINS


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lengths_around_the_blocks(n, dtype, rng):
    x = (rng.standard_normal(n) * 3 + 100).astype(dtype)
    assert_same(tensor_stats(x), tensor_stats_reference(x))
    x[:: max(n // 7, 1)] = np.nan
    x[1 :: max(n // 3, 2)] = -np.inf
    assert_same(tensor_stats(x), tensor_stats_reference(x))


def test_moments_of_far_away_values_do_not_cancel():
    x = np.float32(1e6) + np.arange(4096, dtype=np.float32) % 2  # variance 1/4, mean 1e6
    of = describe(tensor_stats(x)[0])
    assert of["var"] == pytest.approx(0.25, rel=1e-9)
    assert of["kurtosis"] == pytest.approx(1, rel=1e-9)  # two equal values


def test_known_distribution_and_names(rng):
    x = rng.standard_normal(400_000).astype(np.float32)
    x[:100_000] = 0
    fields, histogram = tensor_stats(x)
    of = describe(fields)
    assert tuple(of) == STATS
    assert of["sparsity"] == 0.25
    assert of["var"] == pytest.approx(0.75, rel=0.01)
    assert of["kurtosis"] == pytest.approx(4, rel=0.02)  # 3 * 0.75 / 0.75 ** 2
    assert histogram.sum() + fields[AT["num_zero"]] == x.size
    assert of["absmax"] == np.abs(x).max()


def test_nothing_finite():
    for x in (np.zeros(0, np.float32), np.array([np.nan, np.inf, -np.inf, np.inf], np.float32)):
        fields, histogram = tensor_stats(x)
        assert_same((fields, histogram), tensor_stats_reference(x))
        of = describe(fields)
        assert of["count"] == 0 and np.isnan([of["mean"], of["var"], of["min"], of["absmax"]]).all()
        np.testing.assert_array_equal(merge(fields, empty()[0])[: AT["num_zero"]], empty()[0][: AT["num_zero"]])


@given(st.lists(hnp.arrays(np.float64, st.integers(0, 30), elements=st.floats(-1e3, 1e3)), min_size=1, max_size=7))
def test_merge_is_the_whole(parts):
    whole = tensor_stats_reference(np.concatenate(parts))
    pieces = [tensor_stats_reference(p) for p in parts]
    assert_same((merge_all(np.stack([p[0] for p in pieces])), sum(p[1] for p in pieces)), whole)


def test_merge_is_by_element(rng):
    x = rng.standard_normal((2, 5, 40))
    fields = np.stack([[tensor_stats_reference(v)[0] for v in row] for row in x])
    merged = merge(fields[0], fields[1])
    for i in range(5):
        np.testing.assert_allclose(merged[i], tensor_stats_reference(x[:, i])[0], rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(merge_all(fields, axis=0), merged)
    assert merge_all(fields[:0]).shape == (5, len(FIELDS))


def test_views_are_read_in_place(rng):
    base = rng.standard_normal((6, 4, 8, 5)).astype(np.float32)
    views = {
        "transposed": base.transpose(1, 0, 2, 3),
        "rows": base[:, :, :3],
        "columns": base[..., 1:3],
        "every other": base[::2],
        "strided last": base[..., ::2],
        "broadcast": np.broadcast_to(base[0, 0, 0], (3, 5)),
        "reversed": base[::-1],
        "fortran": np.asfortranarray(base[0, 0]),
        "one": base[2:3, 1:2, :, 1:2],
    }
    for name, view in views.items():
        found, expected = tensor_stats(view), tensor_stats_reference(np.ascontiguousarray(view))
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-10, atol=1e-9, err_msg=name)
        np.testing.assert_array_equal(found[1], expected[1], err_msg=name)


def test_other_numbers_are_converted():
    fields, _ = tensor_stats(np.array([True, False, True]))
    assert fields[AT["count"]] == 3 and fields[AT["num_zero"]] == 1
    with pytest.raises(ValueError, match="16 bits"):
        tensor_stats(np.zeros(3, np.float32), bfloat16=True)


def test_bfloat16_rounding_is_torchs():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    ours = from_bits(bfloat16_bits(x), "bfloat16")
    np.testing.assert_array_equal(ours, torch.from_numpy(x).to(torch.bfloat16).float().numpy())
