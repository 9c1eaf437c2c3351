"""Row A15: what is verified is a path, not a signature."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import membudget as mb

pytestmark = pytest.mark.filterwarnings("ignore::membudget.UnrepeatableWarning")


class Alternating:
    """Goes one of several ways; one of them hides a write."""

    def __init__(self) -> None:
        self.way = "short"

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        if self.way == "short":
            return (x * w).sin()
        if self.way == "other":
            return (x * w).cos().exp()
        y = x * w + 1
        z = y * 2
        z.detach().numpy()[:] = 3.0  # No dispatcher shows this.
        return (z.exp() * w).sin()


def gradient(function: Callable[..., Tensor]) -> Tensor:
    w = torch.full((8,), 0.5, requires_grad=True)
    function(torch.linspace(0, 1, 8), w).sum().backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("ways", ["short hidden", "hidden short", "short other hidden"])
def test_row_a15_each_path_is_verified_the_first_time_it_is_taken(ways: str):
    function = Alternating()
    region = mb.checkpoint(engine="replay")(function)
    for way in ways.split() * 3:
        function.way = way
        assert torch.equal(gradient(region), gradient(function))


def test_row_a15_a_call_that_ends_early_makes_the_next_one_verify():
    hides = [False]

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * w
        if hides[0]:
            y.detach().numpy()[:] = 3.0
            return y.exp()
        return y.exp().sin()

    region = mb.checkpoint(engine="replay")(function)
    gradient(region)
    hides[0] = True
    gradient(region)  # Its operators are the beginning of those that were verified.
    assert torch.equal(gradient(region), gradient(function))
    assert torch.equal(gradient(region), gradient(function))
