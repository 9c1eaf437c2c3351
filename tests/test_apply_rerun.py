"""A plan whose regions rerun: the plain step bit for bit, at the simulated peak."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.attempt import run_under
from membudget.graph import StepGraph
from membudget.outcome import plain_run
from membudget.planned import model_parameters, without_plan
from membudget.planner.blocks import module_blocks
from membudget.planner.choice import RERUN, Block, Choice
from membudget.planner.plan import Plan, RegionPlan
from membudget.planner.region_plans import region_plans
from membudget.planner.second_run import may_rerun
from membudget.planner.simulate import simulate
from membudget.step import Step
from tests.planner.models import MODELS, measured_peak
from tests.test_apply_plan import check_same, facts_of_step


def plan_that_reruns(
    model: nn.Module, graph: StepGraph, share: float
) -> tuple[Plan, list[Choice]]:
    """Return a plan that reruns each block that may, and its choices."""
    calls = [
        c
        for c in module_blocks(graph, share)
        if may_rerun(graph, Block(c.start, c.end))
    ]
    choices = [Choice(c.start, c.end, engine=RERUN) for c in calls]
    return plan_of(model, *region_plans(graph, calls, choices)), choices


def plan_of(model: nn.Module, *regions: RegionPlan) -> Plan:
    kind, names = type(model).__name__, model_parameters(model)
    return Plan(kind, names, 0, 0, 0, 1, 1, "", regions)


@pytest.mark.parametrize("share", [1 / 2, 1 / 10])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_reruns_change_no_bit_and_take_what_is_simulated(name, share):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    graph = mb.profile(model, batch, fake=True).graph
    reruns = copy.deepcopy(model)
    plan, choices = plan_that_reruns(reruns, graph, share)
    applied = mb.apply(reruns, plan)
    for _ in range(3):
        check_same(facts_of_step(model, batch), facts_of_step(reruns, batch))
    assert all(r.recomputes == r.forwards >= 3 for r in applied.status().regions)
    predicted = simulate(graph, choices).peak_bytes
    assert measured_peak(reruns, batch) == pytest.approx(predicted, rel=2e-3)


def test_most_models_have_blocks_that_rerun():
    counts = {}
    for name, make in MODELS.items():
        model, batch = make()
        graph = mb.profile(model, batch, fake=True).graph
        counts[name] = len(plan_that_reruns(model, graph, 1 / 2)[1])
    assert counts["gpt"] >= 4
    assert counts["mlp"] >= 6
    # All but the first convolution write running statistics.
    assert counts["resnet"] == 1


def test_a_plan_s_regions_are_verified_once_so_that_later_steps_stay_in_its_bytes():
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    graph = mb.profile(model, batch, fake=True).graph
    mb.apply(model, plan_that_reruns(model, graph, 1 / 2)[0])
    _, *later = [measured_peak(model, batch) for _ in range(5)]
    assert len({*later}) == 1


class Counting(nn.Module):
    """A layer whose output depends on how often it has run: no rerun can know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scales = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (1 + next(self.scales) % 2)).tanh()


def test_a_region_whose_rerun_gives_other_bits_is_replayed_instead():
    torch.manual_seed(0)
    model, batch = nn.Sequential(Counting(), nn.Linear(16, 1)), torch.randn(8, 16)
    step = Step(model, batch, None)
    plain = plain_run(step)
    plan = plan_of(model, RegionPlan("0", 4, (), engine=RERUN))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, applied = run_under(step, plan, plain)
    assert [w.category for w in caught] == [mb.UnrepeatableWarning]
    (region,) = applied.status().regions
    assert region.switched
    assert "(a rerun gave different bits; replayed since)" in str(applied.status())


def test_a_region_that_reruns_is_of_the_plan_like_any_other():
    torch.manual_seed(0)
    model, batch = MODELS["mlp"]()
    graph = mb.profile(model, batch, fake=True).graph
    plain = measured_peak(model, batch)
    mb.apply(model, plan_that_reruns(model, graph, 1 / 2)[0])
    with without_plan(model, put_back=True):
        assert measured_peak(model, batch) == plain
    assert measured_peak(model, batch) < plain
