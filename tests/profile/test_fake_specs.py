"""Layouts of tensors that a fake step records, and which of its integers are real."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.profile.fake import (
    MOST_REAL_BYTES,
    AnyNumber,
    _is_real_integer,
    _is_small_integer,
    _makes_integers,
)
from membudget.profile.recorded_call import RecordedCall, TensorSpec

small = settings(max_examples=60, deadline=None)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of no memory, permuted, cut or expanded."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    tensor = torch.empty(shape, device="meta")
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        tensor = tensor.narrow(dim, 0, draw(st.integers(1, tensor.shape[dim])))
    if draw(st.booleans()):
        tensor = tensor[..., None].expand(*tensor.shape, draw(st.integers(1, 3)))
    return tensor


@small
@given(tensors())
def test_a_layout_is_contiguous_where_its_tensor_is(tensor):
    spec = TensorSpec.of(tensor)
    assert spec.is_contiguous() == tensor.is_contiguous()
    assert spec.is_strided()


@small
@given(tensors())
def test_zeros_have_the_layout_that_was_recorded(tensor):
    spec = TensorSpec.of(tensor)
    start, end = spec.extent()
    zeros = spec.within(torch.zeros(end, dtype=torch.uint8), 0)
    assert (zeros.shape, zeros.stride()) == (tensor.shape, tensor.stride())
    assert zeros.storage_offset() == tensor.storage_offset()
    assert not zeros.any()
    assert spec.within(torch.zeros(end - start, dtype=torch.uint8), start).equal(zeros)


@pytest.mark.parametrize(
    ("shape", "stride", "is_matrix"),
    [
        ((), (), True),
        ((5,), (3,), True),
        ((4, 6), (6, 1), True),
        ((4, 6), (1, 4), True),
        # Rows, and columns, with a gap between them.
        ((4, 6), (9, 1), True),
        ((4, 6), (1, 9), True),
        # Rows, and columns, that overlap.
        ((4, 6), (5, 1), False),
        ((4, 6), (1, 3), False),
        ((4, 6), (12, 2), False),
        ((4, 6), (0, 1), False),
        # Only the last two dimensions count.
        ((2, 3, 4, 6), (1, 2, 6, 1), True),
        ((2, 4, 6), (24, 12, 2), False),
    ],
)
def test_a_matrix_has_one_dimension_without_gaps(shape, stride, is_matrix):
    assert TensorSpec(shape, stride, torch.float32).is_matrix() is is_matrix


@pytest.mark.cpu_only("emu has no sparse tensors")
def test_a_sparse_tensor_has_no_strides():
    spec = TensorSpec.of(torch.eye(2).to_sparse())
    assert (spec.shape, spec.stride) == ((2, 2), ())
    assert not spec.is_strided()


def test_the_layouts_of_a_call_are_those_of_all_its_arguments():
    one, other = (TensorSpec((n,), (1,), torch.float32) for n in (1, 2))
    call = RecordedCall(None, (one, [3, other]), {"out": one, "dim": 0}, [])
    assert list(call.specs()) == [one, other, one]


def integers(size_bytes: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device="meta")


def test_integers_of_up_to_64_mib_are_real():
    assert MOST_REAL_BYTES == 64 << 20
    assert _is_small_integer(integers(64 << 20))
    assert not _is_small_integer(integers((64 << 20) + 1))
    assert _is_small_integer(integers(64 << 20, torch.int64))
    assert _is_small_integer(integers(8, torch.bool))
    for dtype in (torch.float32, torch.complex64):
        assert not _is_small_integer(integers(64, dtype))


def test_only_a_plain_tensor_with_memory_is_a_real_integer():
    class Mine(torch.Tensor):
        pass

    assert _is_real_integer(torch.ones(2, dtype=torch.int64))
    assert not _is_real_integer(integers(8))
    assert not _is_real_integer(torch.ones(2))
    assert not _is_real_integer(torch.ones(2, dtype=torch.int64).as_subclass(Mine))


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "makes"),
    [
        (torch.ops.aten.arange.default, (5,), {}, True),
        (torch.ops.aten.arange.default, (5,), {"device": "cpu"}, True),
        (torch.ops.aten.arange.default, (5,), {"device": "meta"}, False),
        (torch.ops.aten.arange.default, (5.0,), {}, False),
        (torch.ops.aten.arange.default, (1 << 24,), {}, False),
        (torch.ops.aten.arange.default, (1 << 23,), {"pin_memory": False}, True),
        # No factory: it takes no device.
        (torch.ops.aten.mul.Scalar, (2, 3), {}, False),
    ],
)
def test_a_factory_of_small_integers_is_told_without_memory(
    operator, args, kwargs, makes
):
    assert _makes_integers(operator, args, kwargs) is makes


def test_any_number_is_one_half():
    with AnyNumber():
        assert torch.ones(()).item() == 0.5
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
