"""Fingerprints of a tensor's bits: which tensors have the same, and what they need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import membudget as mb
from membudget.engine.bits import SKIPPED, fingerprint

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
def test_two_exchanged_elements_change_the_fingerprint(
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
def test_a_sign_that_moves_changes_the_fingerprint(a: int, b: int) -> None:
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
def test_equal_content_has_equal_fingerprints_whatever_the_strides(name: str) -> None:
    tensor = LAYOUTS[name]

    assert fingerprint(tensor) == fingerprint(tensor.clone().contiguous())


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fingerprint_needs_little_memory_beside_the_tensor(name: str) -> None:
    tensor = LAYOUTS[name].resolve_conj()

    taken = mb.peak(lambda: fingerprint(tensor)).peak_bytes

    assert taken <= 25 * max(16_384, tensor.numel() / 16)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, device="meta"), torch.eye(3).to_sparse()],
    ids=["meta", "sparse"],
)
def test_a_tensor_without_bytes_has_no_fingerprint(tensor: Tensor) -> None:
    assert fingerprint(tensor) == SKIPPED
