"""Call a region again and again, on routes, and compare it with the plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import membudget as mb
from membudget import policies
from membudget.engine.candidate import Candidate
from membudget.engine.policy import Policy
from membudget.engine.stages import Stages

Function = Callable[..., Any]
Outputs = set[tuple[int, int]]


class Staged(Policy):
    """Keeps nothing, and goes back by stages of two operators."""

    def __init__(self, *held: Outputs) -> None:
        self.stages = Stages([(2 * n, 0) for n in range(len(held))], list(held))

    def keeps(self, candidate: Candidate) -> bool:
        return False

    def by_operator(self, operator: Any) -> bool:
        return False


def replayed(function: Function, keep: Any = None, **options: Any) -> Function:
    """Return a function as a region that replays."""
    options = {"verify": False, "keep": keep} | options
    region: Function = mb.checkpoint(engine="replay", **options)(function)
    return region


def input_of(seed: int) -> Tensor:
    """Return another input for each seed."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(6, 8, generator=generator)


def gradient_of(function: Function, seed: int, *args: Any) -> Tensor:
    """Return the gradient of the input, after one backward pass."""
    x = input_of(seed).requires_grad_()
    torch.manual_seed(seed)
    function(x, *args).sum().backward()
    assert x.grad is not None
    return x.grad


def check(function: Function, region: Function, arguments: list[Any]) -> None:
    """Compare calls with the plain function, each with another input and argument."""
    for seed, argument in enumerate(arguments):
        expected = gradient_of(function, seed, argument)
        assert torch.equal(gradient_of(region, seed, argument), expected), seed


KEEPS = {
    "nothing": policies.nothing,
    "some": policies.operators("addmm", "native_batch_norm"),
    "everything": policies.everything,
    "nothing, in stages": Staged(*[set()] * 20),
}


def with_given(call: Function) -> Function:
    return lambda *args: call(*args, [torch.ones(8), torch.ones(8)])


def unpacked(call: Function) -> Function:
    """Return the function with arguments that a given one makes, new each time."""
    return lambda x, make: call(x, *make())
