"""A recorder numbers operators as a region does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

import membudget as mb
from membudget.graph import StepGraph
from membudget.planner.plan import Plan
from membudget.planner.region_plans import region_plan
from membudget.step import Step
from tests.planner.drafts import keeping, region_of

FAKE = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])


class Block(nn.Module):
    """A block that tells a profiler the names of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with record_function("up"):
            y = torch.tanh(self.up(x))
        with record_function("down"):
            return x + torch.tanh(self.down(y))


def marked() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Block(), Block()), torch.randn(5, 4)


def plan_that_keeps(graph: StepGraph, model: nn.Module, operator: str) -> Plan:
    """Return a plan whose regions keep what an operator makes, and nothing else."""
    with mb.fit(model, torch.randn(5, 4), "100%", fake=True) as fitted:
        plan = fitted.plan
    regions = [
        region_plan(graph, path, keeping(graph, region_of(graph, path), [operator]))
        for path, _ in model.named_children()
    ]
    return dataclasses.replace(plan, regions=tuple(regions))


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the loss and the gradients of a step."""
    step = Step(model, x, None)
    loss = step.run().detach()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    step.prepare()
    return [loss, *found]


@FAKE
def test_profiler_events_are_not_operators(fake):
    model, x = marked()

    graph = mb.profile(model, x, fake=fake, device="h100").graph

    assert not [o for o in graph.operators if not o.name.startswith("aten.")]


@FAKE
def test_a_plan_finds_its_operators_between_profiler_events(fake):
    model, x = marked()
    plain = results(model, x)
    graph = mb.profile(model, x, fake=fake, device="h100").graph
    plan = plan_that_keeps(graph, model, "aten.tanh.default")
    assert [len(region.kept) for region in plan.regions] == [2, 2]

    applied = mb.apply(model, plan)
    planned = [results(model, x) for _ in range(2)]

    assert [region.differences for region in applied.status().regions] == [0, 0]
    assert [region.recomputes for region in applied.status().regions] == [2, 2]
    for step in planned:
        assert len(step) == len(plain) == 9
        assert all(map(torch.equal, step, plain))
