"""A stack of layers of which a step drops some, and its plan in stages of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import membudget as mb
from membudget.planned import model_parameters
from membudget.planner.choice import Choice, Stage
from membudget.planner.plan import Plan
from membudget.planner.region_plans import region_plan
from membudget.planner.simulate import simulate

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
