"""Fingerprints: which tensors have the same, and when they are taken."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from membudget.engine.fingerprints import Fingerprints, fingerprint

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


def test_views_of_equal_content_have_equal_fingerprints() -> None:
    tensor = torch.randn(4, 6)

    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())


def prints_of(saving: list[Tensor], x: Tensor) -> list[tuple[int, int]]:
    """Return the fingerprints of what RReLU saves, and after it a sine."""
    prints = Fingerprints()

    def pack(tensor: Tensor) -> Tensor:
        prints.add(tensor)
        saving.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.rrelu(x, training=True).sin()
    prints.settle()
    return prints.taken


def test_an_operator_that_fills_what_it_saved_is_waited_for() -> None:
    saved: list[Tensor] = []

    taken = prints_of(saved, torch.linspace(-2, 2, 100, requires_grad=True))

    assert taken == [fingerprint(tensor) for tensor in saved]
    assert len(taken) == 3


def test_a_vector_of_bytes_is_not_compared() -> None:
    prints = Fingerprints()
    prints.add(torch.zeros(3, dtype=torch.uint8))
    prints.add(torch.ones(3, dtype=torch.uint8))
    prints.settle()

    assert prints.taken[0] == prints.taken[1]
