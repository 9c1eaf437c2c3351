"""The planner: what it returns fits, and more bytes are never slower."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import membudget as mb
from membudget.errors import BudgetError, MembudgetError
from membudget.graph import ModuleCall, StaticBytes, StepGraph
from membudget.planner import search
from membudget.planner.choice import RERUN, Choice, saved_in
from membudget.planner.overheads import Overheads
from membudget.planner.planner import Planner, plain_schedule, smoothed
from membudget.planner.schedule import Schedule
from membudget.planner.simulate import simulate
from membudget.planner.solver import Solver
from tests.planner.drafts import chain_of
from tests.planner.models import MODELS

REAL = ("mlp", "gpt", "unet")


@cache
def graph_of(name: str) -> StepGraph:
    return mb.profile(*MODELS[name](), fake=True).graph


def answers(planner: Planner, budgets: list[int]) -> list[Schedule | None]:
    found: list[Schedule | None] = []
    refused: list[tuple[int, BudgetError]] = []
    for budget in budgets:
        try:
            found.append(planner.fastest(budget))
        except BudgetError as error:
            refused.append((budget, error))
            found.append(None)
    assert all(
        e.asked_bytes - e.before_bytes == b < e.least_bytes - e.before_bytes
        for b, e in refused
    )
    return found


def ladder(planner: Planner, count: int = 12) -> list[int]:
    plain, least = planner.plain_peak_bytes, planner.least_bytes()
    return [least + (plain - least) * i // (count - 1) for i in range(count)]


def check_ladder(graph: StepGraph) -> None:
    planner = Planner(graph)
    budgets = ladder(planner)
    found = answers(planner, budgets)
    before = math.inf
    for budget, chosen in zip(budgets, found, strict=True):
        assert chosen is not None, budget
        assert chosen.simulation.peak_bytes <= budget
        again = simulate(smoothed(graph), chosen.choices)
        assert again == chosen.simulation
        assert chosen.simulation.seconds <= before * (1 + 1e-9)
        before = chosen.simulation.seconds


REAL_LEAST = ("mlp", "gpt", "unet")


@pytest.mark.parametrize("name", REAL_LEAST)
def test_every_plan_of_a_ladder_fits_and_more_bytes_are_never_slower(name):
    check_ladder(graph_of(name))


rows = st.lists(
    st.tuples(st.integers(1, 99), st.integers(1, 9)), min_size=1, max_size=10
)


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 4))
def test_plans_of_chains_fit(rows, per_call):
    graph = chain_of([a for a, _ in rows], [float(b) for _, b in rows], per_call)
    planner = Planner(graph)
    budgets = ladder(planner)
    for budget, chosen in zip(budgets, answers(planner, budgets), strict=True):
        assert chosen is not None, budget
        assert chosen.simulation.peak_bytes <= budget


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 4))
def test_plans_of_chains_with_more_bytes_are_never_slower(rows, per_call):
    graph = chain_of([a for a, _ in rows], [float(b) for _, b in rows], per_call)
    planner = Planner(graph)
    before = math.inf
    for chosen in answers(planner, ladder(planner)):
        if chosen is not None:
            assert chosen.simulation.seconds <= before
            before = chosen.simulation.seconds


@pytest.mark.parametrize("name", REAL)
def test_the_plain_peak_needs_no_regions(name):
    planner = Planner(graph_of(name))
    chosen = planner.fastest(planner.plain_peak_bytes)
    assert chosen.choices == ()
    assert chosen.calls == ()
    assert chosen.simulation.recomputed == ()
    assert chosen.simulation.peak_bytes == planner.plain_peak_bytes


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "gpt",
        "unet",
    ],
)
def test_a_byte_less_than_the_plain_peak_is_planned(name):
    planner = Planner(graph_of(name))
    budget = planner.plain_peak_bytes - 1
    assert planner.fastest(budget).simulation.peak_bytes <= budget


def test_no_plan_takes_less_than_the_least():
    planner = Planner(graph_of("shared_modules"))
    chosen = planner.fastest(planner.plain_peak_bytes * 9 // 10)
    assert planner.least_bytes() <= chosen.simulation.peak_bytes


@pytest.mark.parametrize("name", REAL_LEAST)
def test_what_is_too_little_is_refused_with_the_least_that_is_enough(name):
    planner = Planner(graph_of(name))
    with pytest.raises(BudgetError, match="no plan fits in 1,000 bytes") as raised:
        planner.fastest(1000)
    error = raised.value
    assert error.asked_bytes == error.before_bytes + 1000
    assert error.least_bytes == error.before_bytes + planner.least_bytes()
    least = planner.least_bytes()
    assert planner.fastest(least).simulation.peak_bytes <= least


@pytest.mark.parametrize("budget", [0, -1, -(1 << 40)])
def test_budgets_of_nothing_are_refused(budget):
    planner = Planner(graph_of("mlp"))
    with pytest.raises(BudgetError, match="no plan fits") as raised:
        planner.fastest(budget)
    assert raised.value.asked_bytes - raised.value.before_bytes == budget


def test_each_region_stands_beside_its_call():
    planner = Planner(graph_of("mlp"))
    chosen = planner.fastest(planner.plain_peak_bytes * 2 // 3)
    assert chosen.calls
    for call, region in zip(chosen.calls, chosen.choices, strict=True):
        assert (call.start, call.end) == (region.start, region.end)


def test_a_step_without_modules_has_the_plain_plan_alone():
    graph = chain_of([4, 4, 4], [1.0, 1.0, 1.0])
    planner = Planner(graph)
    assert planner.least_bytes() == planner.plain_peak_bytes
    with pytest.raises(BudgetError, match="no plan fits"):
        planner.fastest(planner.plain_peak_bytes - 1)


def with_seconds(graph: StepGraph, *seconds: float) -> StepGraph:
    operators = tuple(
        dataclasses.replace(o, seconds=seconds[i % len(seconds)])
        for i, o in enumerate(graph.operators)
    )
    return dataclasses.replace(graph, operators=operators)


def test_a_step_that_takes_no_time_is_planned():
    planner = Planner(with_seconds(graph_of("mlp"), 0.0))
    least = planner.least_bytes()
    for budget in ladder(planner):
        chosen = planner.fastest(budget)
        assert chosen.simulation.seconds == 0
        assert chosen.simulation.peak_bytes <= budget
    assert planner.fastest(least).simulation.peak_bytes <= least


@pytest.mark.parametrize("wrong", [math.nan, -1e-3, math.inf])
def test_seconds_that_cannot_be_are_refused(wrong):
    graph = with_seconds(graph_of("mlp"), 1e-3, wrong, 1e-3)
    with pytest.raises(MembudgetError, match="seconds"):
        Planner(graph)


def test_the_engine_s_own_time_counts_once_for_each_operator_that_runs():
    graph = graph_of("gpt")
    # A region that reruns takes so long that none does.
    prices = Overheads(
        record_s=1e-3, record_cold_s=1e-3, again_s=1e-3, rerun_region_s=10.0
    )
    plain, paid = Planner(graph), Planner(graph, prices)
    budget = plain.plain_peak_bytes * 7 // 10
    chosen = paid.fastest(budget)
    recorded = sum(
        not graph.operators[index].is_view
        for region in chosen.choices
        for index in range(region.start, region.end)
    )
    operators = recorded + len(chosen.simulation.recomputed)
    assert chosen.overhead_s == pytest.approx(operators * 1e-3)
    assert chosen.simulation == simulate(paid.graph, chosen.choices)
    assert chosen.plain_s == paid.graph.seconds == plain.graph.seconds


def test_blocks_rerun_where_recording_their_operators_takes_longer():
    graph = graph_of("gpt")
    prices = Overheads(record_s=1e-3, record_cold_s=1e-3, again_s=1e-3)
    prices = dataclasses.replace(prices, rerun_region_s=1e-4, rerun_saved_s=1e-5)
    planner = Planner(graph, prices)
    chosen = planner.fastest(planner.plain_peak_bytes * 6 // 10)
    assert {choice.engine for choice in chosen.choices} == {RERUN}
    found = chosen.simulation
    assert (found.replayed, bool(found.reran)) == ((), True)
    saved = sum(len(saved_in(graph, choice)) for choice in chosen.choices)
    regions_s = 1e-4 * len(chosen.choices) + 1e-5 * saved
    assert chosen.overhead_s == pytest.approx(regions_s)
    again_s = sum(planner.graph.operators[index].seconds for index in found.reran)
    assert chosen.seconds == pytest.approx(chosen.plain_s + again_s + regions_s)


def test_blocks_that_are_equal_take_equal_seconds_and_the_sum_stays():
    graph = chain_of([4, 4, 4, 4], [1.0, 2.0, 3.0, 6.0], per_call=2)
    even = smoothed(graph)
    assert [o.seconds for o in even.operators[:4]] == [2.0, 4.0, 2.0, 4.0]
    assert even.seconds == graph.seconds


def test_calls_inside_of_longer_ones_are_averaged_first():
    graph = chain_of([4] * 10, [1.0, 2, 3, 4, 9, 8, 7, 6, 3, 1])
    alike = ("long", 0, 4), ("long", 4, 8), ("short", 4, 6), ("short", 8, 10)
    calls = tuple(ModuleCall(f"{p}.{i}", a, b) for i, (p, a, b) in enumerate(alike))
    found = smoothed(dataclasses.replace(graph, calls=calls))
    seconds = [o.seconds for o in found.operators[:10]]
    # 9 and 3, and then 1 and their mean.
    assert seconds == [3.5, 3.25, 5.0, 5.0, 3.5, 3.25, 5.0, 5.0, 6.0, 4.5]


def test_calls_of_other_operators_or_shapes_are_not_averaged():
    graph = chain_of([4, 4, 5, 4], [1.0, 2.0, 3.0, 6.0], per_call=1)
    named = dataclasses.replace(graph.operators[3], name="test.other")
    graph = dataclasses.replace(
        graph, operators=(*graph.operators[:3], named, *graph.operators[4:])
    )
    assert [o.seconds for o in smoothed(graph).operators[:4]] == [1.5, 1.5, 3.0, 6.0]


class OnlyLeast(Solver):
    """Knows the smallest schedule, and none for any budget."""

    def solve(self, budget_bytes: int) -> None:
        return None

    def smallest(self) -> int:
        return 0

    def schedule(self, solution: int) -> Schedule:
        return self._simulator.schedule((), [Choice(0, 4)])


def only_least() -> Planner:
    graph = chain_of([4, 4, 4, 4], [1.0, 2.0, 3.0, 4.0])
    return Planner(graph, solvers=[lambda simulator: [OnlyLeast(simulator)]])


def test_where_no_solver_finds_a_schedule_the_smallest_is_improved():
    planner = only_least()
    least = planner.least_bytes()
    assert least < planner.plain_peak_bytes
    found = planner.fastest(least)
    assert found.peak_bytes <= least
    assert found.choices


def test_the_smallest_schedule_says_so_and_does_not_depend_on_seconds():
    planner = only_least()
    smallest = planner.smallest()
    assert smallest.is_smallest
    assert smallest.choices == (Choice(0, 4),)
    assert smallest.plain_s == planner.graph.seconds
    # With nothing smaller than the plain step, that is the smallest.
    plain = Planner(chain_of([4], [1.0]), solvers=[])
    assert plain.smallest() == dataclasses.replace(
        plain_schedule(plain.graph), is_smallest=True
    )


@pytest.mark.parametrize(("options", "runs"), [({}, True), ({"quickly": True}, False)])
def test_schedules_are_annealed_unless_the_planner_is_in_a_hurry(
    options, runs, monkeypatch
):
    annealed = []
    monkeypatch.setattr(search, "anneal", lambda *args: annealed.append(args))
    planner = Planner(chain_of([4] * 6, [1.0] * 6, per_call=2))
    budget = planner.plain_peak_bytes - 1
    assert planner.fastest(budget, **options).peak_bytes <= budget
    assert bool(annealed) is runs


def test_a_refusal_counts_what_is_in_use_before_the_step():
    graph = chain_of([4, 4], [1.0, 1.0])
    static = StaticBytes(parameters=1000, buffers=0, inputs=0, optimizer=0)
    planner = Planner(dataclasses.replace(graph, static=static))
    with pytest.raises(BudgetError, match="no plan fits in 3 bytes above") as raised:
        planner.fastest(3)
    error = raised.value
    assert (error.asked_bytes, error.before_bytes) == (1003, 1000)
    assert error.least_bytes == 1000 + planner.least_bytes()
    assert f"smallest feasible budget is {planner.least_bytes():,} bytes" in str(error)
