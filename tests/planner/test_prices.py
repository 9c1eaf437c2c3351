"""Under prices by moment, what is kept fits, and is what a search of all keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.prices import MOST_OPERATORS, priced
from membudget.planner.schedule import Simulator
from membudget.planner.simulate import Simulation, simulate
from membudget.planner.solver import Solver
from membudget.planner.timeline import timeline
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
    assert MOST_OPERATORS == 1000


# How prices follow what is simulated.

CHAIN = chain_of([3, 1, 4, 1], [2.0, 7, 1, 8])


def priced_of(graph: StepGraph) -> Any:
    return solver_of(graph)


def test_each_budget_takes_four_rounds_of_forty_simulations(monkeypatch):
    solver, sizes, rates = priced_of(CHAIN), [], []
    at, follow = solver._at, solver._follow

    def noted_at(
        prices: np.ndarray, copy_price: float, given: dict[int, float]
    ) -> Simulation:
        sizes.append(given)
        found: Simulation = at(prices, copy_price, given)
        return found

    def noted_follow(
        prices: np.ndarray, found: Simulation, budget: int, rate: float
    ) -> None:
        rates.append(rate)
        follow(prices, found, budget, rate)

    monkeypatch.setattr(solver, "_at", noted_at)
    monkeypatch.setattr(solver, "_follow", noted_follow)
    solver.solve(8)

    assert len(sizes) == 4 * 40
    assert rates == [8.0 / (1 + step / 20) for step in range(40)] * 4
    true = solver._front.bytes
    # The first round is of the true sizes, the others of sizes up to e^0.3 off.
    assert sizes[:40] == [true] * 40
    changes = [abs(math.log(of[s] / true[s])) for of in sizes[40:] for s in true]
    assert 0.2 < max(changes) <= 0.3
    assert min(changes) > 0
    again = priced_of(CHAIN)
    again.solve(8)
    assert again._tried == solver._tried


def test_the_first_prices_are_high_where_the_plain_step_is_over_the_budget():
    solver = priced_of(CHAIN)
    assert timeline(CHAIN).alive_bytes == (3, 4, 8, 9, 8, 4, 3, 0)
    seconds = 18.0 + 4.0
    assert CHAIN.seconds == seconds
    high = seconds / 9 / 3
    assert solver._first_prices(7).tolist() == [
        high if moment in (2, 3, 4) else pytest.approx(high * 1e-3)
        for moment in range(8)
    ]
    # What is as large as the budget fits.
    assert solver._first_prices(8).tolist()[2:5] == [
        pytest.approx(seconds / 9 * 1e-3),
        pytest.approx(seconds / 9),
        pytest.approx(seconds / 9 * 1e-3),
    ]
    # Everything fits.
    assert solver._first_prices(9).tolist() == [pytest.approx(seconds / 9 * 1e-3)] * 8


def test_a_step_that_takes_no_time_has_prices():
    still = replace(
        CHAIN, operators=tuple(replace(o, seconds=0.0) for o in CHAIN.operators)
    )
    assert priced_of(still)._first_prices(0)[0] == 1.0 / 9 / 7


def test_prices_follow_the_excess_at_each_moment_at_most_e_fold():
    solver, alive = priced_of(CHAIN), (10, 11, 9, 10, 100, 0, 10, 10)
    found = Simulation(alive, 12, 3, 1.0, ())
    prices = np.full(8, 2.0)
    solver._follow(prices, found, 10, 0.5)
    factors = [1, math.exp(0.05), math.exp(-0.05), math.exp(0.1), math.e]
    factors += [math.exp(-0.5), 1, 1]
    assert prices == pytest.approx([2.0 * factor for factor in factors])
    solver._follow(prices, found, 10, 5.0)
    assert prices[5] == pytest.approx(2.0 * math.exp(-1.5))


def test_a_workspace_counts_in_the_excess():
    operators = tuple(
        replace(o, workspace_bytes=5 if i == 1 else 0)
        for i, o in enumerate(CHAIN.operators)
    )
    solver = priced_of(replace(CHAIN, operators=operators))
    prices = np.full(8, 1.0)
    solver._follow(prices, Simulation((10,) * 8, 10, 0, 1.0, ()), 10, 1.0)
    assert prices == pytest.approx([1, math.exp(0.5), *[1] * 6])
    high, low = solver._first_prices(8)[1:3]
    assert low == pytest.approx(high * 1e-3)


def test_a_storage_is_needed_from_its_last_use_to_the_first_recompute_of_it():
    gaps = priced_of(CHAIN)._gaps
    births = {CHAIN.storages[s].birth: gap for s, gap in gaps.items()}
    # Each is saved by the next operator, and read to recompute what that makes.
    assert births == {0: (2, 4), 1: (3, 4), 2: (4, 4), 3: (4, 4)}


def test_the_nearest_schedule_is_the_fastest_where_it_pays_for_what_it_is_over():
    solver = priced_of(CHAIN)
    solver.solve(6)
    tried = solver._tried.values()

    def penalised(found: Simulation) -> float:
        return found.seconds + max(0, found.peak_bytes - 6) / 6 * CHAIN.seconds

    nearest = min(map(penalised, tried))
    assert nearest in [penalised(s.simulation) for s in solver.schedules(6)]
    assert solver.least == []
