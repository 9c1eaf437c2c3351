"""What a search at random finds fits, and is no slower than where it began."""

from __future__ import annotations

from hypothesis import given, settings

from membudget.planner.anneal import annealed
from membudget.planner.regions import Region, Stage, made_in
from membudget.planner.simulate import simulate
from membudget.planner.timeline import timeline
from tests.planner.drafts import Draft, chain_of, drafts, fastest_s


@given(drafts(pinned=False))
@settings(deadline=None, max_examples=25)
def test_a_plan_fits_and_is_no_slower_than_where_it_began(graph):
    start = [Region(0, graph.backward_start)]
    before = simulate(graph, start)
    plan = annealed(graph, start, before, before.peak_bytes)
    if plan is None:
        assert not graph.seconds or not made_in(graph, start[0])
        return
    regions, found = plan
    assert found == simulate(graph, regions)
    assert found.peak_bytes <= before.peak_bytes
    assert found.seconds <= before.seconds


def test_the_best_of_a_chain_is_found_from_a_plan_that_does_not_fit():
    graph = chain_of([3, 1, 4, 1, 5, 9, 2, 6], [2.0, 7, 1, 8, 2, 8, 1, 8])
    keeps_all = [Region(0, 8, frozenset(made_in(graph, Region(0, 8))))]
    before = simulate(graph, keeps_all)
    budget = timeline(graph).peak_bytes * 7 // 10
    assert before.peak_bytes > budget

    plan = annealed(graph, keeps_all, before, budget)
    assert plan is not None
    assert plan[1].peak_bytes <= budget
    assert plan[1].seconds == fastest_s(graph, budget)
    assert plan == annealed(graph, keeps_all, before, budget)


def test_stages_stay_where_they_are():
    graph = chain_of([3, 1, 4, 1], [2.0, 7, 1, 8])
    start = [Region(0, 4, frozenset(), (Stage(0), Stage(2)))]
    plan = annealed(graph, start, simulate(graph, start), 100)
    assert plan is not None
    assert plan[0][0].stages == start[0].stages


def test_what_cannot_fit_has_no_plan():
    graph = chain_of([3, 1, 4, 1], [2.0, 7, 1, 8])
    start = [Region(0, 4)]
    assert annealed(graph, start, simulate(graph, start), 1) is None


def test_what_must_not_run_again_stays_kept():
    draft = Draft()
    value = draft.outside()
    for index in range(4):
        (made,) = draft.run(value, makes=[3], is_pinned=index == 1)
        draft.save(value)
        value = made
    graph = draft.finish()
    kept = frozenset(graph.born_at[1])
    start = [Region(0, 4, kept)]
    plan = annealed(graph, start, simulate(graph, start), 100)
    assert plan is not None
    assert kept <= plan[0][0].kept
