"""Drawn functions of views and writes, called again and again, that turn on the way.

Only `y` needs a gradient, so that autograd allows every write. It is multiplied by sums
of the other tensors, which a backward pass needs as they were at that moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget import policies
from membudget.engine.replay import following
from tests.engine.replay.followed import Staged

Operators = list[Callable[[Tensor], Tensor]]

VIEWS: Operators = [
    lambda t: t.t(),
    lambda t: t[1:] if len(t) > 1 else t,
    lambda t: t[:, ::2],
    lambda t: t[..., :2],
    lambda t: t.detach(),
    lambda t: t.view(1, -1) if t.is_contiguous() else t.t(),
    lambda t: t.unbind(0)[0].unsqueeze(0),
    lambda t: t.chunk(2, 1)[-1],
    lambda t: t.as_strided((2, 2), (2, 1)) if t.numel() > 3 else t,
]
WRITES: Operators = [
    lambda t: t.mul_(0.5),
    lambda t: t.add_(1),
    lambda t: t.neg_(),
    lambda t: t.copy_(t.clone() * 3),
    lambda t: t.add_(t[:1].clone()),
    lambda t: t.sigmoid_(),
    lambda t: t[:1].mul_(t[-1:]),
    lambda t: t.split(1)[0].add_(2).unsqueeze(0)[0],
    lambda t: t.t_(),
]
FRESH: Operators = [
    lambda t: t.sin(),
    lambda t: t * 2,
    lambda t: t.tanh(),
    lambda t: t @ t.t() / 8,
    lambda t: torch.softmax(t, 1),
]
KEEPS = {
    "nothing": policies.nothing,
    "some": policies.operators("sin", "mul_", "t", "add_", "mm"),
    "sums": policies.operators("sum"),
    "everything": policies.everything,
    "nothing, in stages": Staged(*[set()] * 20),
    "retained": Staged(*({(n, 0) for n in range(1, 40, 3)} for _ in range(20))),
    "written": Staged(*({(n, 1) for n in range(1, 40, 2)} for _ in range(20))),
}
CALLS, LATEST = 8, 4


class Statement(NamedTuple):
    """Apply an operator to one of the latest tensors, or multiply `y` by its sum."""

    apply: Callable[[Tensor], Tensor] | None
    argument: int

    def run(self, y: Tensor, tensors: list[Tensor]) -> Tensor:
        tensor = tensors[-1 - self.argument % len(tensors)]
        if self.apply is None:
            return (y * tensor.sum()).sin()
        tensors.append(self.apply(tensor))
        return y


def drawn_statement(draw: random.Random) -> Statement:
    kinds: list[Sequence[Callable[[Tensor], Tensor] | None]]
    kinds = [VIEWS, VIEWS, WRITES, FRESH, [None]]
    kind = draw.choice(kinds)
    return Statement(draw.choice(kind), draw.randrange(LATEST))


def drawn_function(draw: random.Random) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Return a function that runs some more statements on its way if it turns."""
    statements = [drawn_statement(draw) for _ in range(draw.randint(4, 14))]
    detour = [drawn_statement(draw) for _ in range(draw.randint(1, 4))]
    at = draw.randrange(len(statements))
    forgets = draw.random() < 0.5

    def function(x: Tensor, buffer: Tensor, turns: bool) -> Tensor:
        y, tensors = x.exp(), [buffer * 0.7, buffer]
        for number, statement in enumerate(statements):
            for each in [*detour, statement] if turns and number == at else [statement]:
                y = each.run(y, tensors)
                if forgets:
                    del tensors[:-LATEST]
        return (y * tensors[-1].sum()).cos().sum()

    return function


def outcome_of(
    function: Callable[..., Tensor], seed: int, turns: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the loss, the gradient and the buffer."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x = torch.randn(5, generator=generator).requires_grad_()
    buffer = torch.randn(4, 6, generator=generator)
    loss = function(x, buffer, turns)
    loss.backward()
    return loss.detach(), x.grad, buffer


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("seed", range(60))
def test_rule11_calls_that_turn_on_the_way_are_bit_for_bit_as_plain(
    seed, keep, monkeypatch
):
    monkeypatch.setattr("membudget.engine.replay.routes._MOST_LEFT", CALLS)
    following._UNVERIFIED.clear()
    draw = random.Random(seed)
    function = drawn_function(draw)
    options = {"verify": seed % 5 == 0, "keep": KEEPS[keep]}
    region = mb.checkpoint(engine="replay", **options)(function)
    for call in range(CALLS):
        turns = call > 2 and draw.random() < 0.5
        expected = outcome_of(function, call, turns)
        found = outcome_of(region, call, turns)
        for one, other in zip(expected, found, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other), call
