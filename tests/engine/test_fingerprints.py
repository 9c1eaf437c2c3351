"""When the fingerprints of what a run saves are taken."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from membudget.engine.fingerprints import Fingerprints
from membudget.state.bits import fingerprint


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


def test_the_tensors_of_an_operator_wait_until_another_one_saves() -> None:
    prints = Fingerprints()
    counts: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        prints.add(tensor)
        counts.append(len(prints.taken))
        return tensor

    x, y = (torch.linspace(0, 1, 3, requires_grad=True) for _ in range(2))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        (x * y).sin().exp()
    # Both factors of the product are saved by one operator.
    assert counts == [0, 0, 2, 3]
    prints.settle()
    assert len(prints.taken) == 4
    prints.settle()
    assert len(prints.taken) == 4
