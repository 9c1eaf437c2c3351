"""Layers that are dropped at random, in a whole model that goes back by stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.planned import model_parameters
from membudget.planner.choice import Choice, Stage
from membudget.planner.plan import Plan
from membudget.planner.region_plans import region_plan
from membudget.planner.simulate import simulate
from tests.oracles import CountedOperators

WIDTH, LAYERS = 16, 12
BATCH = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class Layer(nn.Module):
    """A layer whose operators are those of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a residual sum."""
        inner = torch.sigmoid(self.up(self.norm(x)))
        return x + torch.dropout(self.down(inner * inner.exp()), 0.1, True)


class Stack(nn.Module):
    """Layers, of which each step drops the ones that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.dropped: frozenset[int] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        for number, layer in enumerate(self.layers):
            torch.rand([])  # Other models choose by this.
            x = layer(x) if number not in self.dropped else x
        return x.tanh().square().sum()


def staged_plan(model: Stack, dropped: frozenset[int]) -> tuple[Plan, int]:
    """Return a plan by stages of one layer, and how many operators it recomputes.

    Of what layers return, stages hold the first half, and the forward keeps the other.
    """
    model.dropped = dropped
    graph = mb.profile(model, BATCH, fake=True).graph
    (whole,) = (call for call in graph.calls if call.path == "")
    layers = [call for call in graph.calls if call.path.count(".") == 1]
    results = [graph.operators[layer.end - 1].outputs[0] for layer in layers]
    storages = [graph.values[result].storage for result in results]
    half = len(layers) // 2
    stages = [Stage(whole.start)]
    for number, layer in enumerate(layers[1:], start=1):
        held = storages[:number] if number <= half else []
        stages.append(Stage(layer.start, frozenset(held)))
    kept = frozenset(storages[half:])
    choice = Choice(whole.start, whole.end, kept, tuple(stages))
    regions = (region_plan(graph, "", choice),)
    parameters = model_parameters(model)
    plan = Plan("Stack", parameters, 0, 0, 0, 1, 1, "", regions)
    return plan, len(simulate(graph, [choice]).recomputed)


def outcome(model: Stack, seed: int) -> list[Tensor | None]:
    """Return the loss, the gradients and the random stream of a step."""
    torch.manual_seed(seed)
    loss = model(BATCH)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [loss.detach(), torch.get_rng_state(), *gradients]


def are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def recomputed_exponentials(model: Stack) -> int:
    """Return how often a backward pass computes what each layer's forward does once."""
    torch.manual_seed(0)
    loss = model(BATCH)
    with CountedOperators() as operators:
        loss.backward()
    model.zero_grad()
    return operators.counts["exp"]


@pytest.mark.parametrize("planned", [(), (1,), (0, 5, 8)])
@pytest.mark.parametrize("dropped", [(), (0,), (7,), (11,), (3, 4), (0, 2, 9, 11)])
def test_other_layers_than_planned_do_not_make_each_stage_begin_anew(planned, dropped):
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    plan, recomputed = staged_plan(model, frozenset(planned))
    mb.apply(model, plan)
    model.dropped = frozenset(planned)
    as_planned = recomputed_exponentials(model)
    assert 0 < as_planned < recomputed
    for step in range(3):  # Known sequences of operators as well as new ones.
        plain.dropped = model.dropped = frozenset(dropped)
        assert all(map(are_equal, outcome(plain, step), outcome(model, step)))
    # A call that runs others keeps nothing more, so that all is recomputed once more,
    # and what leads to a layer that the plan does not know another time.
    ran = LAYERS - len(dropped)
    assert recomputed_exponentials(model) <= as_planned + 2 * ran
