"""Row A9: what decides is kept, and verification can watch every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget._torch import DispatchMode

DECISIONS: dict[str, Any] = {
    "comparison": lambda x: x > 0,
    "argmax": lambda x: x.argmax(1, keepdim=True).expand_as(x) == 0,
    "rounding": lambda x: x.mul(4).to(torch.int64) % 2 == 0,
    "isnan": lambda x: ~x.isnan(),
    "largest": lambda x: x.max(1).indices[:, None].expand_as(x) > 0,
}


class Ran(DispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("decision", DECISIONS)
def test_row_a09_a_decision_is_never_made_again(decision: str):
    decide = DECISIONS[decision]
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()

    def function(x: Tensor) -> Tensor:
        return torch.where(decide(x.sin()), x.exp(), x.square()).tanh()

    y = mb.checkpoint(engine="replay", verify=False)(function)(x)
    with Ran() as ran:
        y.sum().backward()

    # What comes of a decision alone, `== 0` say, is the same again.
    assert not {name for name in ran.names if name in DECIDING}


DECIDING = {
    # The sine is what is decided about: nothing else needs it.
    *("aten::argmax", "aten::isnan", "aten::max", "aten::_to_copy", "aten::sin"),
}


def test_row_a09_masks_of_random_numbers_are_drawn_again():
    x = torch.ones(64, 64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return torch.native_dropout(x.sin(), 0.5, True)[0].exp()

    y = mb.checkpoint(engine="replay", verify=False)(function)(x)
    with Ran() as ran:
        y.sum().backward()
    assert ran.names["aten::native_dropout"] or ran.names["aten::bernoulli_"]


def flaky(calls: list[int]) -> Any:
    """Return a function that is reproducible for its first three calls alone."""

    def function(x: Tensor) -> Tensor:
        hidden = x.sin()
        if calls[0] >= 3:
            # What a kernel with atomics does: other low bits in each run.
            hidden.detach().numpy()[0] += calls[0] * 1e-3
        calls[0] += 1
        return hidden.exp()

    return function


def test_row_a09_verify_always_compares_every_step():
    calls = [0]
    function = flaky(calls)
    x = torch.ones(3, requires_grad=True)
    region = mb.checkpoint(engine="replay", verify="always")(
        lambda x: function(x).tanh()
    )
    for _ in range(3):
        region(x).sum().backward()
    with pytest.raises(mb.RecomputeMismatchError, match="did not reproduce"):
        region(x).sum().backward()
