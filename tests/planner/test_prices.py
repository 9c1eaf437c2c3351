"""Under prices by moment, what is kept fits, and is what a search of all keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.prices import MOST_OPERATORS, priced
from membudget.planner.schedule import Simulator, Solver
from membudget.planner.simulate import simulate, timeline
from tests.planner.drafts import chain_of, drafts, fastest_s


def in_one_module(graph: StepGraph) -> StepGraph:
    return replace(graph, calls=(ModuleCall("", 0, graph.backward_start),))


def solver_of(graph: StepGraph) -> Solver:
    """Return the way to plan the whole forward as one module."""
    (found,) = priced(Simulator(in_one_module(graph)))
    return found


def test_a_budget_that_the_plain_step_fits_into_makes_nothing_again():
    graph = chain_of([3, 1, 4, 1], [2.0, 7, 1, 8])
    best = min(
        solver_of(graph).schedules(timeline(graph).peak_bytes),
        key=lambda chosen: chosen.seconds,
    )
    assert best.simulation.recomputed == ()


@given(drafts(pinned=False))
@settings(deadline=None, max_examples=25)
def test_what_is_said_to_fit_does(graph):
    budget = timeline(graph).peak_bytes * 3 // 4
    for solver in priced(Simulator(in_one_module(graph))):  # None saves nothing.
        kept = solver.solve(budget)
        if kept is not None:
            chosen = solver.schedule(kept)
            assert chosen.simulation.peak_bytes <= budget
            assert chosen.simulation == simulate(graph, chosen.choices)


@pytest.mark.parametrize("percent", [90, 80, 70])
def test_a_chain_has_the_best_that_one_region_can_have(percent):
    graph = chain_of([3, 1, 4, 1, 5, 9, 2, 6], [2.0, 7, 1, 8, 2, 8, 1, 8])
    budget = timeline(graph).peak_bytes * percent // 100
    solver = solver_of(graph)
    kept = solver.solve(budget)
    assert kept is not None
    assert solver.schedule(kept).simulation.seconds == fastest_s(graph, budget)


def test_where_nothing_fits_the_nearest_is_a_start():
    graph = chain_of([3, 1, 4, 1], [2.0, 7, 1, 8])
    solver = solver_of(graph)
    assert solver.solve(1) is None
    (nearest,) = solver.schedules(1)
    assert nearest.simulation.peak_bytes > 1


def test_the_answer_for_one_budget_does_not_forget_what_fitted_into_less():
    graph = chain_of([3, 1, 4, 1, 5, 9, 2, 6], [2.0, 7, 1, 8, 2, 8, 1, 8])
    solver, peak = solver_of(graph), timeline(graph).peak_bytes
    seconds = []
    for percent in (60, 70, 80, 90):
        kept = solver.solve(peak * percent // 100)
        if kept is not None:
            seconds.append(solver.schedule(kept).seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_a_large_step_is_left_out():
    rows = MOST_OPERATORS // 2 + 1
    large = chain_of([1] * rows, [1.0] * rows, rows)
    assert priced(Simulator(large)) == []
