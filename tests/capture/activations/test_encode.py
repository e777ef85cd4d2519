"""Encoders in torch against numpy's, copies that use memory again, statistics as a GPU takes them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from mappnb import activation_codecs as codecs  # noqa: E402
from mappnb.activation_stats import FIELDS, tensor_stats, tensor_stats_reference  # noqa: E402
from mappnb.capture.activations.copies import Copies  # noqa: E402
from mappnb.capture.activations.encode import (  # noqa: E402
    as_numpy,
    device_stats,
    dtype_name,
    encode,
    packing_attrs,
    stats_of,
)
from mappnb.errors import CaptureError  # noqa: E402

OPTIONS = {
    "full": {},
    "cast": {"dtype": "bfloat16"},
    "int8": {},
    "topk": {"k": 5},
    "bucket": {"size": 7, "reduce": "mean"},
    "sketch": {"size": 12, "seed": 3},
}


def numpy_twin(mode, x, options):
    options = {"to" if k == "dtype" else k: v for k, v in options.items()}
    values = as_numpy(x)
    return codecs.encode(mode, values, dtype=dtype_name(x), **options)


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_torch_packs_what_numpy_packs(mode, dtype):
    x = torch.randn(3, 4, 30, dtype=torch.float64).to(dtype)
    if mode != "sketch":
        x[0, 0, 0] = torch.nan
    parts = encode(mode, x, OPTIONS[mode])
    attrs = packing_attrs(mode, OPTIONS[mode], dtype=dtype_name(x), length=30)
    other, other_attrs = numpy_twin(mode, x, OPTIONS[mode])
    assert {k: attrs.get(k) for k in other_attrs} == other_attrs
    found = codecs.decode(mode, {k: as_numpy(v) for k, v in parts.items()}, attrs)
    expected = codecs.decode(mode, other, other_attrs)
    tolerance = {"sketch": 1e-3, "bucket": 1e-5}.get(mode, 0)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
    for name, part in parts.items():
        assert part.shape == other[name].shape


def test_bucket_maximum_and_one_short_bucket():
    x = torch.randn(2, 3, 10)
    for size in (1, 3, 10, 64):
        for reduce in ("mean", "max"):
            options = {"size": size, "reduce": reduce}
            np.testing.assert_allclose(
                encode("bucket", x, options)[""], numpy_twin("bucket", x, options)[0][""], rtol=1e-5, atol=1e-6
            )


def test_all_of_a_row_can_be_kept_and_ties_keep_their_number():
    x = torch.ones(2, 6)
    parts = encode("topk", x, {"k": 9})
    assert parts["index"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert encode("topk", x, {"k": 2})["index"].shape == (2, 2)


def test_unknown_mode_is_told():
    with pytest.raises(CaptureError, match="'stats'; known: full"):
        encode("stats", torch.ones(2), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_statistics_by_torch_are_those_of_the_native_pass(dtype):
    x = (torch.randn(40, 50, dtype=torch.float64) * 5 + 2).to(dtype)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0], dtype=dtype)
    x[1, :2] = torch.tensor([1e-30, 2.0**-12], dtype=dtype)
    row = device_stats(x.T)
    fields, histogram = stats_of(x)
    np.testing.assert_allclose(row[: len(FIELDS)], fields, rtol=1e-4)
    np.testing.assert_array_equal(row[len(FIELDS) :], histogram)


def test_statistics_by_torch_of_nothing():
    for x in (torch.zeros(0), torch.full((3,), torch.nan), torch.zeros(4)):
        fields, histogram = tensor_stats_reference(x.numpy())
        row = device_stats(x)
        np.testing.assert_array_equal(row[: len(FIELDS)], fields)
        np.testing.assert_array_equal(row[len(FIELDS) :], histogram)


def test_statistics_of_huge_values_do_not_overflow():
    x = torch.tensor([3e38, -3e38, 1e38, 0.0])
    np.testing.assert_allclose(device_stats(x)[: len(FIELDS)], tensor_stats(x.numpy())[0], rtol=1e-5)


def test_copies_are_contiguous_and_their_memory_is_used_again():
    copies = Copies(1 << 20)
    x = torch.randn(6, 5).T
    copy, event = copies.copy(x)
    assert event is None and copy.is_contiguous() and torch.equal(copy, x)
    x.zero_()
    assert copy.abs().sum() > 0
    address = copy.data_ptr()
    copies.give_back(copy)
    unlike, _ = copies.copy(torch.ones(30))
    assert unlike.data_ptr() != address
    again, _ = copies.copy(torch.ones(5, 6))
    assert again.data_ptr() == address and (again == 1).all()
    other, _ = copies.copy(torch.ones(5, 6))
    assert other.data_ptr() != address


def test_copies_keep_no_more_than_they_may():
    copies = Copies(1000)
    kept = [copies.copy(torch.ones(100))[0] for _ in range(4)]
    for copy in kept:
        copies.give_back(copy)
    assert copies._kept_bytes <= 1000
    copies.give_back(copies.copy(torch.ones(1000))[0])
    assert copies._kept_bytes <= 1000
    empty, _ = copies.copy(torch.ones(0, 3))
    assert empty.shape == (0, 3)
    copies.give_back(empty)


@pytest.mark.gpu
def test_copies_and_statistics_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    copies = Copies(1 << 24)
    x = torch.randn(512, 512, device="cuda")
    want = x.cpu()
    copy, event = copies.copy(x.T)
    x.zero_()
    event.synchronize()
    assert torch.equal(copy, want.T)
    for mode, options in OPTIONS.items():
        y = torch.randn(4, 30, device="cuda")
        for name, part in encode(mode, y, options).items():
            np.testing.assert_allclose(
                as_numpy(part.cpu().float()), encode(mode, y.cpu(), options)[name].float(), rtol=1e-3, atol=1e-3
            )
    y = torch.randn(1000, device="cuda")
    np.testing.assert_allclose(device_stats(y).cpu(), device_stats(y.cpu()), rtol=1e-5)
