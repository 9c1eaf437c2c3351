"""A plan with stages on a model: the plain step bit for bit, at the simulated cost."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import membudget as mb
from membudget.graph import StepGraph
from membudget.planned import model_parameters
from membudget.planner.choice import Choice, Stage, made_in
from membudget.planner.frontier import Front
from membudget.planner.plan import Plan
from membudget.planner.region_plans import region_plan
from membudget.planner.schedule import Simulator
from membudget.planner.simulate import simulate
from membudget.planner.timeline import timeline
from membudget.planning import make_plan
from tests.drawn import needed_before
from tests.oracles.exact import exact
from tests.planner.models import MODELS, measured_peak
from tests.seconds import DEADLOCK_S
from tests.test_apply_plan import check_same, facts_of_step


def some_region(graph: StepGraph, seed: int) -> Choice:
    """Return the whole model as a region, with stages that somebody might want."""
    chance = random.Random(seed)
    (call,) = (call for call in graph.calls if call.path == "")
    whole = Choice(call.start, call.end)
    found = Front(graph, whole).keep_sets()
    kept = chance.choice(found[len(found) // 2 :]).kept
    starts = sorted(chance.sample(range(call.start + 1, call.end), 4))
    candidates = made_in(graph, whole) - kept
    stages = [Stage(call.start)]
    for start in starts:
        useful = sorted(candidates & needed_before(graph, whole, start))
        held = frozenset(s for s in useful if chance.random() < 0.3)
        stages.append(Stage(start, held))
    return Choice(call.start, call.end, kept, tuple(stages))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_stages_change_no_bit_and_cost_what_is_simulated(name, seed):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    graph = mb.profile(model, batch, fake=True).graph
    region = some_region(graph, seed)
    found = simulate(graph, [region])
    assert len(found.recomputed) > 0
    staged = copy.deepcopy(model)
    regions = (region_plan(graph, "", region),)
    plan = Plan(
        type(model).__name__, model_parameters(model), 0, 0, 0, 1, 1, "", regions
    )
    applied = mb.apply(staged, plan)
    for _ in range(2):
        check_same(facts_of_step(model, batch), facts_of_step(staged, batch))
    (status,) = applied.status().regions
    assert (status.differences, status.unrepeatable) == (0, 0)
    # A write into what is read later costs the engine a copy that paper does not know.
    assert measured_peak(staged, batch) == pytest.approx(found.peak_bytes, rel=0.06)


def test_a_stage_makes_again_what_an_earlier_one_let_go():
    torch.manual_seed(0)
    model, batch = MODELS["mlp"]()
    graph = mb.profile(model, batch, fake=True).graph
    (call,) = (call for call in graph.calls if call.path == "")
    middle = (call.start + call.end) // 2
    stages = (Stage(call.start), Stage(middle))
    at_once = simulate(graph, [Choice(call.start, call.end)])
    in_two = simulate(graph, [Choice(call.start, call.end, frozenset(), stages)])
    assert len(in_two.recomputed) > len(at_once.recomputed)
    assert in_two.peak_bytes < at_once.peak_bytes


def test_an_optimal_schedule_runs_as_it_was_simulated():
    torch.manual_seed(0)
    model, batch = MODELS["unet"]()
    found = mb.profile(model, batch, fake=True)
    budget = timeline(found.graph).peak_bytes * 6 // 10
    (call,) = (call for call in found.graph.calls if call.path == "")
    whole = Choice(call.start, call.end)
    best = exact(found.graph, budget, DEADLOCK_S, region=whole)
    assert best.region is not None
    chosen = Simulator(found.graph).schedule((call,), (best.region,))
    optimal = copy.deepcopy(model)
    plan = make_plan(found, chosen, model, budget)
    applied = mb.apply(optimal, plan)
    check_same(facts_of_step(model, batch), facts_of_step(optimal, batch))
    assert applied.status().regions[0].differences == 0
    assert measured_peak(optimal, batch) == pytest.approx(plan.peak_bytes, rel=0.01)
