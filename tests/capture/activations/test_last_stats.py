"""Statistics of a tensor that passes two points in a row are taken once, and again after any change."""

import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from mappnb import activation_stats  # noqa: E402
from mappnb.activation_stats import tensor_stats_reference  # noqa: E402
from mappnb.capture.activations.last_stats import LastStats  # noqa: E402


@pytest.fixture
def passes(monkeypatch):
    """Lengths of what the native pass has read."""
    read, native = [], activation_stats._core.tensor_stats

    def counted(rows, *args):
        read.append(rows.size)
        return native(rows, *args)

    monkeypatch.setattr(activation_stats._core, "tensor_stats", counted)
    return read


def check(row, tensor):
    for found, expected in zip(row, tensor_stats_reference(tensor.detach().numpy()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def stream(requires_grad=True):
    """A residual stream as Megatron has it, dims (token, sample, hidden): the result of an operation."""
    return torch.randn(5, 2, 8, requires_grad=requires_grad) * 2


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_same_tensor_is_read_once(passes, requires_grad):
    last, x = LastStats(), stream(requires_grad)
    rows = [last.of(x.transpose(0, 1)) for _ in range(3)]  # another view object each time
    assert len(passes) == 1 and rows[0] is rows[1] is rows[2]
    check(rows[0], x)
    assert last.of(x) is not rows[0] and len(passes) == 2  # another view
    last.forget()
    last.of(x)
    assert len(passes) == 3


@pytest.mark.parametrize("through", ["itself", "a view", "a detached alias"])
def test_a_change_in_place_is_seen(passes, through):
    last, x = LastStats(), stream()
    check(last.of(x.transpose(0, 1)), x)
    with torch.no_grad():
        {"itself": x, "a view": x[1:], "a detached alias": x.detach()}[through].mul_(3)
    check(last.of(x.transpose(0, 1)), x)
    assert len(passes) == 2


def test_equal_memory_and_counts_of_changes_are_not_enough(passes):
    """``.data`` begins to count anew: after one change each the counts are equal, and the values are not."""
    last, x = LastStats(), stream()
    x.add_(1)
    check(last.of(x), x)
    other = x.data
    other.add_(1)
    assert (other.data_ptr(), other._version, other.shape) == (x.data_ptr(), x._version, x.shape)
    check(last.of(other), other)
    assert len(passes) == 2


def test_other_tensors_are_read_each(passes):
    last, x = LastStats(), stream()
    same = x.clone()
    for tensor in (x, same, x[:3], x[:4], x[1:4], x.flatten(0, 1), x.permute(1, 0, 2), x.permute(2, 1, 0)):
        check(last.of(tensor), tensor)
    assert passes == [80, 80, 48, 64, 48, 80, 80, 80]
    with torch.inference_mode():
        y = torch.ones(3)
        check(last.of(y), y)
        y.mul_(2)
        check(last.of(y), y)


def test_no_memory_is_held_and_another_tensor_there_is_read(passes):
    last, x = LastStats(), stream(requires_grad=False)
    last.of(x.transpose(0, 1))
    gone = weakref.ref(x)
    del x
    assert gone() is None
    last.of(stream(requires_grad=False).transpose(0, 1))  # perhaps at the same address
    assert len(passes) == 2


def test_a_pipeline_output_whose_memory_was_freed_is_another(passes):
    """Megatron-core's ``deallocate_output_tensor`` puts one number in place of what was sent."""
    last, x = LastStats(), stream(requires_grad=False)
    last.of(x)
    x.data = torch.empty(1)
    last.of(x)
    assert passes == [80, 1]
