"""A plan on a model that runs backward passes of its own: as simulated."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.graph import StepGraph
from membudget.planner.choice import Choice, made_in
from membudget.planner.schedule import Simulator
from membudget.planning import make_plan
from tests.oracles import CountedOperators

Kept = Callable[[StepGraph, Choice], set[int]]


class Penalised(nn.Module):
    """Scores, and what their gradient by the input weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        between = x.detach().requires_grad_()
        scores = self.layers(between).sum()
        (slopes,) = torch.autograd.grad(scores, between, create_graph=True)
        return slopes.square().mean() + self.layers(x).mean()


class PenalisedTwice(Penalised):
    """Two penalties: what the first one's backward pass saves lives into the second."""

    def forward(self, x: Tensor) -> Tensor:
        once = super().forward(x)
        return once + super().forward(2 * x) * once


class Equilibrium(nn.Module):
    """A fixed point, whose gradient is another one, found in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 16), nn.SiLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        state = self.layers(x)
        start = state.detach().requires_grad_()
        again = self.layers(start).tanh()

        def backward(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(4):
                (product,) = torch.autograd.grad(again, start, found, retain_graph=True)
                found = gradient + 0.5 * product
            return found

        state.register_hook(backward)
        return state.square().mean()


class Learning(nn.Module):
    """Layers whose weights the gradients of two losses change as they run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            made, fast, moved = layer(x), torch.eye(16), torch.zeros(16, 16)
            for _ in range(2):
                fast = fast.detach().requires_grad_()
                error = (made.detach() @ fast).tanh() - x.detach()
                (slope,) = torch.autograd.grad(error.square().mean(), fast)
                moved = 0.9 * moved + slope
                fast = fast - 0.1 * moved
            x = x + nn.functional.silu(made @ fast.detach())
        return x.square().mean()


class Sloped(Penalised):
    """Two gradients of one graph decide what each layer weighs."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.layers[0], self.layers[2]):
            between = x.detach().requires_grad_()
            made = layer(between).tanh().sin()
            (one,) = torch.autograd.grad(made.sum(), between, retain_graph=True)
            (two,) = torch.autograd.grad(made.square().sum(), between)
            weighs = (one - two).sigmoid().mean(-1, keepdim=True)
            x = nn.functional.silu(layer(x)) * weighs
        return x.square().mean()


def nothing(graph: StepGraph, region: Choice) -> set[int]:
    """Keep nothing."""
    return set()


def activations(graph: StepGraph, region: Choice) -> set[int]:
    """Keep what the activation functions make."""
    return {
        storage
        for storage in made_in(graph, region)
        if graph.operators[graph.storages[storage].birth].name == "aten.silu.default"
    }


def drawn(seed: int) -> Kept:
    """Keep a half, drawn by a seed."""

    def keep(graph: StepGraph, region: Choice) -> set[int]:
        draws = random.Random(seed)
        return {storage for storage in made_in(graph, region) if draws.random() < 0.5}

    return keep


KINDS = [Penalised, PenalisedTwice, Equilibrium, Learning, Sloped]


@pytest.mark.parametrize("keep", [nothing, activations, *map(drawn, range(6))])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_inside_a_forward_or_a_hook_runs_as_simulated(
    kind: type[nn.Module], keep: Kept
):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(256, 16)
    profile = mb.profile(model, x)
    graph = profile.graph
    (call,) = (call for call in graph.calls if call.path == "")
    region = Choice(call.start, call.end)
    kept = frozenset(keep(graph, region))
    choice = Choice(call.start, call.end, kept)
    schedule = Simulator(graph).schedule([call], [choice])

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    mb.apply(model, make_plan(profile, schedule, model, 0))
    for _ in range(2):  # The first one is verified.
        step()
    with CountedOperators() as operators:
        step()
    for name in ("silu", "sigmoid", "tanh"):
        ran = [*range(len(graph.operators)), *schedule.simulation.recomputed]
        simulated = [graph.operators[i].name == f"aten.{name}.default" for i in ran]
        assert operators.counts[name] == sum(simulated)
    model.zero_grad()
    # Of two penalties, a scalar is freed an operator before the simulation frees it.
    assert 0 <= schedule.peak_bytes - mb.peak(step).peak_bytes <= 4
