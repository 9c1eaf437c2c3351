"""Local search: what it finds fits, and is no slower than where it began."""

from __future__ import annotations

from hypothesis import given, settings

from membudget.graph import StepGraph
from membudget.planner.annealing import anneal
from membudget.planner.choice import Choice, Stage, made_in
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.search import fill
from membudget.planner.simulate import simulate
from membudget.planner.timeline import timeline
from tests.planner.drafts import Draft, chain_of, drafts, fastest_s


def filled(graph: StepGraph, choices: list[Choice], budget_bytes: int) -> Schedule:
    simulator = Simulator(graph)
    return fill(simulator, simulator.schedule((), choices), budget_bytes)


def annealed(
    graph: StepGraph, choices: list[Choice], budget_bytes: int
) -> Schedule | None:
    simulator = Simulator(graph)
    return anneal(simulator, simulator.schedule((), choices), budget_bytes)


def test_with_room_for_all_nothing_runs_again():
    graph = chain_of([2, 3, 4], [1.0, 2.0, 3.0])
    found = filled(graph, [Choice(0, 3)], timeline(graph).peak_bytes)
    assert found.simulation.recomputed == ()


def test_what_fits_is_kept_and_no_more():
    graph = chain_of([2, 2, 2, 8], [1.0, 9.0, 1.0, 1.0])
    found = filled(graph, [Choice(0, 4)], 12)
    (choice,) = found.choices
    assert choice.kept == {2, 3}
    assert found.simulation == simulate(graph, [choice])


@given(drafts(pinned=False))
@settings(deadline=None)
def test_a_filled_schedule_fits_and_is_no_slower(graph):
    choices = [Choice(0, graph.backward_start)]
    before = simulate(graph, choices)
    found = filled(graph, choices, before.peak_bytes)
    assert found.simulation == simulate(graph, found.choices)
    assert found.peak_bytes <= before.peak_bytes
    assert found.seconds <= before.seconds


@given(drafts(pinned=False))
@settings(deadline=None, max_examples=25)
def test_an_annealed_schedule_fits_and_is_no_slower_than_where_it_began(graph):
    start = [Choice(0, graph.backward_start)]
    before = simulate(graph, start)
    found = annealed(graph, start, before.peak_bytes)
    if found is None:
        assert not graph.seconds or not made_in(graph, start[0])
        return
    assert found.simulation == simulate(graph, found.choices)
    assert found.peak_bytes <= before.peak_bytes
    assert found.seconds <= before.seconds


def test_the_best_of_a_chain_is_found_from_a_plan_that_does_not_fit():
    graph = chain_of([3, 1, 4, 1, 5, 9, 2, 6], [2.0, 7, 1, 8, 2, 8, 1, 8])
    keeps_all = [Choice(0, 8, frozenset(made_in(graph, Choice(0, 8))))]
    before = simulate(graph, keeps_all)
    budget = timeline(graph).peak_bytes * 7 // 10
    assert before.peak_bytes > budget

    found = annealed(graph, keeps_all, budget)
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.seconds == fastest_s(graph, budget)
    assert found == annealed(graph, keeps_all, budget)


def test_stages_stay_where_they_are():
    graph = chain_of([3, 1, 4, 1], [2.0, 7, 1, 8])
    start = [Choice(0, 4, frozenset(), (Stage(0), Stage(2)))]
    found = annealed(graph, start, 100)
    assert found is not None
    assert found.choices[0].stages == start[0].stages


def test_what_cannot_fit_has_no_plan():
    graph = chain_of([3, 1, 4, 1], [2.0, 7, 1, 8])
    start = [Choice(0, 4)]
    assert annealed(graph, start, 1) is None


def test_what_must_not_run_again_stays_kept():
    draft = Draft()
    value = draft.outside()
    for index in range(4):
        (made,) = draft.run(value, makes=[3], must_keep=index == 1)
        draft.save(value)
        value = made
    graph = draft.finish()
    kept = frozenset(graph.born_at[1])
    start = [Choice(0, 4, kept)]
    found = annealed(graph, start, 100)
    assert found is not None
    assert kept <= found.choices[0].kept
