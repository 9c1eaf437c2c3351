"""Optimizers are as they were after steps that run them only to be measured."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import membudget as mb
from membudget.state.optimizers import optimizers_kept
from membudget.state.snapshot import State

Make = Callable[[list[nn.Parameter]], Optimizer]

MAKERS: dict[str, Make] = {
    "momentum": lambda of: SGD(of, lr=0.1, momentum=0.9),
    "adam": lambda of: Adam(of, lr=0.1),
}


def network() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*blocks)


def trained(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def after(model: nn.Module, optimizer: Optimizer, x: Tensor) -> list[Tensor]:
    """Return the weights after two more steps."""
    for _ in range(2):
        trained(model, optimizer, x)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_fit_of_a_step_that_trains_changes_nothing(kind, has_stepped):
    x, plain = torch.randn(64, 16), network()
    model = copy.deepcopy(plain)
    pairs = [(m, MAKERS[kind]([*m.parameters()])) for m in (plain, model)]
    if has_stepped:
        for pair in pairs:
            trained(*pair, x)

    kept = [id(t) for s in pairs[1][1].state.values() for t in s.values()]
    fitted = mb.fit(lambda: trained(*pairs[1], x), modules=model, budget="80%")

    assert fitted.plan.regions
    assert kept == [id(t) for s in pairs[1][1].state.values() for t in s.values()]
    assert all(map(torch.equal, after(*pairs[0], x), after(*pairs[1], x)))


def test_options_that_a_step_changes_are_restored_also_after_an_error():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = SGD([weight], lr=0.1, momentum=0.9)

    def step() -> None:
        with optimizers_kept(State([])):
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 5.0
            raise ZeroDivisionError("of the step")

    with pytest.raises(ZeroDivisionError, match="of the step"):
        step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state
