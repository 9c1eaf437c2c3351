"""Regions by the number of a call: each call has its own, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb
from membudget.attach import has_region
from membudget.errors import PlanError
from membudget.planned import model_parameters, without_plan
from membudget.planner.plan import RegionPlan
from tests.planner.drafts import PLAN


class Loop(nn.Module):
    """Three calls of one layer; an exception may leave the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor, calls: int = 3, fails: bool = False) -> Tensor:
        for _ in range(calls):
            x = self.layer(x)
        if fails:
            raise InterruptedError("in the loop")
        return x.sum()


def plan_for(model: nn.Module, *regions: RegionPlan) -> mb.Plan:
    return replace(PLAN, parameters=model_parameters(model), regions=regions)


FIRST_AND_LAST = RegionPlan("layer", 3, (), times=3, numbers=(0, 2))


def counted(model: nn.Module, applied: mb.Applied, *args: int) -> tuple[int, int]:
    """Return how many calls of one more step were regions, and differed."""
    (before,) = applied.status().regions
    model(torch.ones(2, 4), *args).backward()
    (after,) = applied.status().regions
    return after.forwards - before.forwards, after.differences - before.differences


def test_only_the_calls_that_a_plan_names_are_regions():
    model = Loop()
    applied = mb.apply(model, plan_for(model, FIRST_AND_LAST))
    assert counted(model, applied) == (2, 0)
    assert counted(model, applied, 2) == (1, 0)
    assert counted(model, applied) == (2, 0)


def test_calls_beyond_those_of_the_plan_are_regions_and_counted():
    model = Loop()
    applied = mb.apply(model, plan_for(model, FIRST_AND_LAST))
    assert counted(model, applied, 5) == (4, 2)
    assert "2 calls ran other operators than planned" in str(applied.status())


def test_numbers_start_anew_after_an_exception_and_without_gradients():
    model = Loop()
    applied = mb.apply(model, plan_for(model, FIRST_AND_LAST))
    with pytest.raises(InterruptedError, match="in the loop"):
        model(torch.ones(2, 4), 1, True)
    with torch.no_grad():
        model(torch.ones(2, 4), 2)
    assert counted(model, applied) == (2, 0)


class Checkpointed(nn.Module):
    """Checkpoints a layer in its second call."""

    def __init__(self, checkpoint: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.checkpoint = Loop().layer, checkpoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.checkpoint(self.layer, self.layer(x))
        return self.layer(x).sum()


@pytest.mark.parametrize(
    "checkpoint", [partial(torch_checkpoint, use_reentrant=False), mb.checkpoint]
)
@pytest.mark.parametrize("engine", ["replay", "rerun"])
def test_a_call_in_a_function_that_runs_again_has_no_region(checkpoint, engine):
    model, x = Checkpointed(checkpoint), torch.ones(2, 4)
    parameters = [*model.parameters()]
    plain = torch.autograd.grad(model(x), parameters)
    last = RegionPlan("layer", 3, (), times=3, numbers=(1, 2), engine=engine)
    applied = mb.apply(model, plan_for(model, last))
    for _ in range(3):
        found = torch.autograd.grad(model(x), parameters)
        assert all(map(torch.equal, plain, found))
    assert [region.forwards for region in applied.status().regions] == [3]


def test_nothing_is_left_on_the_model_when_a_plan_is_removed_or_set_aside():
    model = Loop()
    applied = mb.apply(model, plan_for(model, FIRST_AND_LAST))
    with without_plan(model, put_back=True):
        assert not any(map(has_region, model.modules()))
    assert counted(model, applied) == (2, 0)
    applied.remove()
    assert not any(map(has_region, model.modules()))
    assert type(model) is Loop


def test_a_region_of_the_model_around_numbered_calls_is_refused():
    model = Loop()
    plan = plan_for(model, FIRST_AND_LAST, RegionPlan("", 9, ()))
    with pytest.raises(PlanError, match="single calls inside: make the plan again"):
        mb.apply(model, plan)
    assert not any(map(has_region, model.modules()))
