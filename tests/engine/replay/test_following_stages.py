"""Calls that follow a route, and whose backward pass runs in stages (Rule 11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.replay.followed import (
    Function,
    Outputs,
    Staged,
    check,
    gradient_of,
    input_of,
    replayed,
)
from tests.oracles import CountedOperators


def mixed(x: Tensor) -> Tensor:
    """Take operators that save their inputs, their outputs or both, and views."""
    h = (x.sin().exp() @ x.t()).tanh()
    left, right = h.chunk(2, 1)
    h = (left * right).sigmoid() @ x[:3]
    return (h.cos() * x.exp()).sin().sum(1)


def counted_in_backward(function: Function, seed: int) -> Counter[str]:
    x = input_of(seed).requires_grad_()
    loss = function(x).sum()
    with CountedOperators() as operators:
        (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(mixed(x).sum(), x)
    assert torch.equal(found, expected)
    return Counter(operators.counts)


HELD: dict[str, Callable[[int], Outputs]] = {
    "nothing": lambda stage: set(),
    "all": lambda stage: {(n, i) for n in range(20) for i in range(2)},
    "every third": lambda stage: {(n, 0) for n in range(0, 20, 3)},
    "what is before": lambda stage: {(n, 0) for n in range(2 * stage + 1)},
    "the last before": lambda stage: {(2 * stage, 0)},
}


@pytest.mark.parametrize("held", HELD)
def test_rule11_a_stage_on_a_route_replays_as_much_as_a_recorded_one(held, trips):
    policy = Staged(*(HELD[held](stage) for stage in range(8)))
    region = replayed(mixed, policy)
    recorded, *others = (counted_in_backward(region, seed) for seed in range(4))
    assert trips == [True] * 3
    assert others == [recorded] * 3
    assert recorded["exp"] >= 2  # Those of the forward, whose results were dropped.


class Overwrites(torch.autograd.Function):
    """Returns its input; its backward overwrites what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.mul_(2)


@pytest.mark.parametrize("held", [set(), {(1, 0)}, {(1, 0), (2, 0)}])
def test_rule4_a_stage_lends_a_copy_of_what_another_stage_reads(held, trips):
    def function(x: Tensor, _: Any) -> Tensor:
        one = x.sin()
        two = one.exp()  # Made anew from `one`, after that was lent.
        three = two.cos() * 2 + 1
        return three * Overwrites.apply(one)

    check(function, replayed(function, Staged(*[held] * 4)), [None] * 4)
    assert trips == [True] * 3


def test_rule11_stages_that_alternate_are_bit_for_bit_as_plain(trips):
    def function(x: Tensor) -> tuple[Tensor, ...]:
        one = x.sin().exp()
        return one.cos().tanh(), (one * one).sigmoid().exp()

    def gradients(function: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        x = input_of(0).requires_grad_()
        outputs = [output.sum() for output in function(x)]
        losses = [*outputs, outputs[0] * 2, outputs[0] + outputs[1]]
        return [torch.autograd.grad(g, x, retain_graph=True)[0] for g in losses]

    region = replayed(function, Staged(*[{(2, 0)}] * 4))
    expected = gradients(function)
    for _ in range(3):
        assert all(map(torch.equal, gradients(region), expected))
    assert trips == [True] * 2


@pytest.mark.parametrize("retained", [(1, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("of_view", [False, True])
def test_rule4_stages_retain_what_an_operator_overwrites(retained, of_view, trips):
    def function(x: Tensor, _: Any) -> Tensor:
        h = x * 2
        view = h.t()
        (view if of_view else h).mul_(3)
        return (h.sin() * x).exp()

    region = replayed(function, Staged(*[{retained}] * 4))
    check(function, region, [None] * 4)
    assert trips == [True] * 3


@pytest.mark.parametrize("turns", range(8))
def test_rule11_a_call_that_leaves_its_route_goes_back_in_its_stages(turns, trips):
    def function(x: Tensor, turn: int) -> Tensor:
        for number in range(8):
            x = x.sin()
            if number == turn:
                x = x.exp()
        return x

    region = replayed(function, Staged(*({(2 * n, 0)} for n in range(6))))
    counts = []
    for turn in (turns, 9, 9, turns):
        x = input_of(0).requires_grad_()
        loss = region(x, turn).sum()
        with CountedOperators() as operators:
            (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, gradient_of(function, 0, turn))
        counts.append(Counter(operators.counts))
    assert counts[0] == counts[3]
    assert counts[1] == counts[2]
