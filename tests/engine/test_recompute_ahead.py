"""Recompute before a backward pass asks: in order, once, and for two-part passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from tests.oracles import CountedOperators
from tests.test_apply_plan import plan_of

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


class Fork(torch.autograd.Function):
    """Hand out a tensor of no elements whose gradient must come before `x`'s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach(), torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Join(torch.autograd.Function):
    """Make the backward pass of what `phony` comes from wait for that of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phony: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.empty(0)


class Timeline(TorchDispatchMode):
    """Note the forwards and the backward passes of region `a` and region `b`."""

    NAMES = {
        "exp": "a:forward",
        "mul": "a:backward",  # The gradient of `exp`: the gradient times the result.
        "tanh": "b:forward",
        "tanh_backward": "b:backward",
    }

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.events.append(self.NAMES[name])
        return func(*args, **(kwargs or {}))


def joined(engine: str) -> tuple[Tensor, mb.Regions]:
    """Return the sum of two regions, of which `b` is joined to what `a` returns."""
    a = torch.rand(1, requires_grad=True)
    b = torch.rand(1, requires_grad=True)
    _ = a + 1 + 2 + 3 + 4 + 5  # Raises the sequence number: autograd prefers `a` now.
    with mb.collect_regions() as regions:
        a = mb.checkpoint(torch.exp, a, engine=engine, verify=False)
        a, phony = Fork.apply(a)
        b = Join.apply(b, phony)
        b = mb.checkpoint(torch.tanh, b, engine=engine, verify=False)
    return torch.cat((a, b)).sum(), regions


@ENGINES
def test_joined_regions_recompute_each_just_before_its_backward(engine: str) -> None:
    with Timeline() as timeline:
        out, _ = joined(engine)
        out.backward()

    assert timeline.events == [
        *("a:forward", "b:forward"),
        *("b:forward", "b:backward"),
        *("a:forward", "a:backward"),
    ]


@ENGINES
def test_joined_regions_recompute_before_either_backward_on_demand(engine: str) -> None:
    with Timeline() as timeline:
        out, regions = joined(engine)
        regions.recompute()
        out.backward()

    assert timeline.events == [
        *("a:forward", "b:forward"),
        *("a:forward", "b:forward"),
        *("b:backward", "a:backward"),
    ]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        y: Tensor = x + self.dropout(self.down(hidden))
        return y


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 2048).reshape(256, 8)


def with_plan(model: nn.Sequential, engine: str) -> None:
    """Apply a plan, whose regions run under the engine that it names."""
    mb.apply(model, plan_of(blocks(), batch()))


Attach = Callable[[nn.Sequential, str], object]
WAYS: dict[str, Attach] = {
    "blocks": lambda m, engine: mb.apply(m, blocks=Block, engine=engine),
    "whole": lambda m, engine: mb.apply(m, blocks=nn.Sequential, engine=engine),
    "nested": lambda m, engine: mb.apply(
        m, blocks=(Block, nn.LayerNorm, nn.Linear), engine=engine
    ),
    "plan": with_plan,
    "span": lambda m, engine: mb.apply(m, spans=[("0", "1")]),
}


def gradients_in_two_parts(
    model: nn.Sequential, ahead: bool
) -> tuple[list[Tensor | None], list[CountedOperators]]:
    """Return all gradients, and what ran ahead, for the inputs and for the weights."""
    x, gradient = batch().requires_grad_(), batch()
    torch.manual_seed(1)
    counters = [CountedOperators() for _ in range(3)]
    with mb.execution_group():
        with mb.collect_regions() as regions:
            y = model(x)
        if ahead:
            with counters[0]:
                regions.recompute()
        with counters[1]:
            _, groups = stage_backward_input([y], [gradient], [x], model.parameters())
        del y
        with counters[2]:
            stage_backward_weight(model.parameters(), groups)
    return [x.grad, *(p.grad for p in model.parameters())], counters


def forwards(counter: CountedOperators) -> int:
    """Return how many forwards of blocks ran, by an operator that each runs once."""
    return counter.counts["gelu"]


@pytest.mark.parametrize("way", WAYS)
@ENGINES
def test_two_part_backwards_take_what_was_recomputed_ahead(
    way: str, engine: str
) -> None:
    expected, _ = gradients_in_two_parts(blocks(), ahead=False)
    model = blocks()
    WAYS[way](model, engine)
    for _ in range(3):  # The first calls are verified.
        model.zero_grad()
        found, (ahead, inputs, weights) = gradients_in_two_parts(model, ahead=True)

    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert forwards(ahead) <= 3
    assert (forwards(inputs), forwards(weights)) == (0, 0)


@pytest.mark.parametrize("way", ["blocks", "whole"])
@ENGINES
def test_two_part_backwards_recompute_each_region_once_in_a_group(
    way: str, engine: str
) -> None:
    model = blocks()
    WAYS[way](model, engine)
    _, (_, inputs, weights) = gradients_in_two_parts(model, ahead=False)

    assert (forwards(inputs), forwards(weights)) == (3, 0)


@ENGINES
def test_recomputed_tensors_die_with_their_nodes_within_a_group(engine: str) -> None:
    model = blocks()
    WAYS["blocks"](model, engine)
    gradients_in_two_parts(model, ahead=True)
    x = batch().requires_grad_()
    with mb.execution_group(), mb.collect_regions() as regions:
        y = model(x)
        regions.recompute()
        y.sum().backward()
        del y
        assert len(regions) == 0


def test_regions_that_ran_are_counted_when_they_are_gone() -> None:
    x = torch.ones(2, requires_grad=True)
    with mb.collect_regions() as regions:
        mb.checkpoint(torch.exp, x)

    assert (regions.ran, len(regions)) == (1, 0)
