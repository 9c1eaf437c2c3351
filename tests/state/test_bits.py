"""Fingerprints: which tensors have equal ones, and how much memory they take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import membudget as mb
from membudget.state.bits import (
    SKIPPED,
    fingerprint,
    has_bits,
    may_be_a_workspace,
)

ELEMENTS = st.lists(st.integers(-128, 127), min_size=1, max_size=40)


@given(ELEMENTS, st.data())
def test_one_changed_element_changes_the_fingerprint(
    elements: list[int], data: st.DataObject
) -> None:
    tensor = torch.tensor(elements, dtype=torch.int16)
    changed = tensor.clone()
    index = data.draw(st.integers(0, len(elements) - 1))
    changed[index] += data.draw(st.integers(1, 1000))

    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(changed)


@given(ELEMENTS, st.data())
def test_swapping_two_elements_changes_the_fingerprint(
    elements: list[int], data: st.DataObject
) -> None:
    tensor = torch.tensor(elements, dtype=torch.int8)
    places = st.integers(0, len(elements) - 1)
    a, b = data.draw(places), data.draw(places)
    exchanged = tensor.clone()
    exchanged[a], exchanged[b] = tensor[b], tensor[a]

    same = torch.equal(tensor, exchanged)

    assert (fingerprint(tensor) == fingerprint(exchanged)) == same


@given(st.integers(0, 39_999), st.integers(0, 39_999))
def test_moving_a_sign_changes_the_fingerprint(a: int, b: int) -> None:
    tensors = torch.ones(2, 40_000, dtype=torch.float64)
    tensors[0, a] = tensors[1, b] = -1.0

    assert (fingerprint(tensors[0]) == fingerprint(tensors[1])) == (a == b)


LAYOUTS = {
    "transposed": torch.randn(400, 600).t(),
    "turned": torch.randn(3, 200, 70, 2).permute(2, 0, 3, 1),
    "channels last": torch.randn(2, 64, 40, 40).to(memory_format=torch.channels_last),
    "every second": torch.randn(90_000)[1::2],
    "repeated": torch.randn(300, 1).expand(300, 200),
    "conjugate": torch.randn(150, 100, dtype=torch.complex64).conj(),
    "one byte off": torch.zeros(9, dtype=torch.bool)[1:],
    "none": torch.empty(3, 0),
    "number": torch.tensor(2.5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_content_has_equal_fingerprints_for_all_strides(name: str) -> None:
    tensor = LAYOUTS[name]

    assert fingerprint(tensor) == fingerprint(tensor.clone().contiguous())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fingerprint_needs_little_memory_besides_the_tensor(name: str) -> None:
    tensor = LAYOUTS[name].resolve_conj()

    taken = mb.peak(lambda: fingerprint(tensor)).peak_bytes

    assert taken <= 25 * max(2_048, tensor.numel() / 16)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, device="meta"), torch.eye(3).to_sparse()],
    ids=["meta", "sparse"],
)
def test_a_tensor_without_bytes_has_no_fingerprint(tensor: Tensor) -> None:
    assert fingerprint(tensor) == SKIPPED


@pytest.mark.parametrize("bit", range(64))
def test_every_single_bit_changes_both_sums(bit: int) -> None:
    word = (1 << bit) - (1 << 64 if bit == 63 else 0)
    tensor = torch.tensor([5, -7, 0, 9])
    changed = tensor.clone()
    changed[2] = word
    before, after = fingerprint(tensor), fingerprint(changed)

    assert before[0] != after[0]
    assert before[1] != after[1]


def test_only_the_first_sum_depends_on_positions() -> None:
    tensor = torch.tensor([1, 2, 3])
    before, after = fingerprint(tensor), fingerprint(tensor.flip(0))

    assert before[0] != after[0]
    assert before[1] == after[1] == 6


def test_zeros_at_other_positions_change_the_first_sum() -> None:
    lengths = [fingerprint(torch.zeros(n, dtype=torch.int64)) for n in range(1, 50)]

    assert len({mixed for mixed, _ in lengths}) == 49
    assert {plain for _, plain in lengths} == {0}


def test_pieces_of_a_large_tensor_are_placed_behind_each_other() -> None:
    tensor = torch.zeros(3, 7001, dtype=torch.int16)
    marked = []
    for place in (0, 2047, 2048, 7000, 7001, 21002):
        one = tensor.clone()
        one.view(-1)[place] = 1
        marked.append(fingerprint(one))

    assert len(set(marked)) == len(marked)
    assert {plain for _, plain in marked} == {1}


@pytest.mark.parametrize(
    ("tensor", "bits", "workspace"),
    [
        (torch.ones(3), True, False),
        (torch.nn.Parameter(torch.ones(3)), True, False),
        (torch.ones(3, dtype=torch.uint8), True, True),
        (torch.ones(3, 1, dtype=torch.uint8), True, False),
        (torch.ones(3, dtype=torch.int8), True, False),
        (torch.ones(3, device="meta"), False, False),
        (torch.eye(3).to_sparse(), False, False),
        (torch.ones(3).as_subclass(type("Mine", (Tensor,), {})), False, False),
    ],
)
def test_only_dense_tensors_with_memory_have_bits(
    tensor: Tensor, bits: bool, workspace: bool
) -> None:
    assert has_bits(tensor) is bits
    assert may_be_a_workspace(tensor) is workspace


def test_negative_zero_and_different_nans_are_differences() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    first = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    one, other = first.view(torch.float32).unbind()
    assert one.isnan()
    assert other.isnan()
    assert fingerprint(one) != fingerprint(other)


def test_the_hash_is_the_documented_one() -> None:
    assert fingerprint(torch.arange(5.0)) == (-782699560626769926, 4299161600)
