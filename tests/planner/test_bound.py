"""The bound against every schedule of small steps, and against what is known of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.errors import OptionError
from membudget.graph import StepGraph, Storage
from membudget.planner.bound import least_seconds
from membudget.planner.choice import Choice, Stage
from membudget.planner.simulate import Simulation, simulate
from tests.planner.drafts import Draft, chain_of, drafts
from tests.planner.steps import (
    every_schedule,
    longer_steps,
    read_across,
    runs_nothing_pinned,
    schedules,
)

many = settings(max_examples=150, deadline=None)


def check(graph: StepGraph, simulations: Iterable[Simulation]) -> None:
    """Checkpoint the bound at each peak against the fastest schedule with that peak."""
    fastest: dict[int, float] = {}
    for simulation in simulations:
        peak, seconds = simulation.peak_bytes, simulation.seconds
        fastest[peak] = min(fastest.get(peak, seconds), seconds)
    for peak, seconds in fastest.items():
        assert seconds >= least_seconds(graph, peak) - 1e-12


@many
@given(drafts())
def test_no_choice_for_the_whole_forward_is_below_the_bound(graph):
    check(graph, every_schedule(graph, [0, graph.backward_start]))


@many
@given(longer_steps())
def test_no_choice_is_below_the_bound_whatever_else_the_step_holds(graph):
    check(graph, every_schedule(graph, [0, graph.backward_start]))


@many
@given(longer_steps(), st.data())
def test_no_choice_for_several_regions_is_below_the_bound(graph, data):
    inner = st.lists(st.integers(0, graph.backward_start), max_size=3)
    borders = sorted([0, *data.draw(inner), graph.backward_start])
    check(graph, every_schedule(graph, borders, read_across(graph, borders)))


def test_what_a_region_drops_and_a_later_one_reads_is_there_when_it_is_asked_for():
    draft = Draft()
    draft.run()
    (a,) = draft.run(draft.outside(), makes=[2])
    draft.save(a)
    (b,) = draft.run(a, makes=[1])
    draft.save(b)
    graph = draft.finish()
    simulation = simulate(graph, [Choice(0, 2), Choice(2, 3)])
    assert graph.saved[0].asked == (4,)
    assert simulation.alive_bytes[4] == 2


@settings(max_examples=400, deadline=None)
@given(longer_steps(), st.data())
def test_no_drawn_schedule_is_below_the_bound(graph, data):
    for _ in range(5):
        found = simulate(graph, data.draw(schedules(graph)))
        if runs_nothing_pinned(graph, found):
            check(graph, [found])


@many
@given(longer_steps(), st.integers(0, 60), st.integers(0, 20))
def test_more_budget_never_costs_more(graph, budget, more):
    less_s, more_s = (least_seconds(graph, b) for b in (budget, budget + more))
    # The search for a price leaves a hundredth.
    assert less_s - graph.seconds >= 0.98 * (more_s - graph.seconds)


@many
@given(longer_steps())
def test_the_plain_step_is_the_bound_at_its_own_peak(graph):
    assert least_seconds(graph, simulate(graph, ()).peak_bytes) == graph.seconds


def shares_of_the_fastest(graph: StepGraph) -> list[float]:
    """Return the bound over the fastest schedule, for each peak that there is."""
    cuts = [[0, 10], [0, 5, 10], [0, 3, 6, 10], [0, 2, 4, 6, 8, 10]]
    known = [s for cut in cuts for s in every_schedule(graph, cut)]
    return [
        least_seconds(graph, peak)
        / min(s.seconds for s in known if s.peak_bytes <= peak)
        for peak in {s.peak_bytes for s in known}
    ]


def test_the_bound_is_reached_at_each_peak_of_a_chain_of_equal_layers():
    assert shares_of_the_fastest(chain_of([4] * 10, [1.0] * 10)) == [1.0] * 7


def test_the_bound_is_within_a_few_percent_on_a_chain_of_two_sizes():
    shares = shares_of_the_fastest(chain_of([4, 1] * 5, [1.0] * 10))
    assert 0.96 < min(shares) < 1.0
    assert max(shares) == 1.0


def test_a_chain_pays_for_what_is_over_the_budget_when_the_backward_begins():
    # Four outputs are saved; the fifth is alive in the last operator of the forward.
    graph = chain_of([4] * 5, [1.0] * 5)
    assert simulate(graph, ()).peak_bytes == 20
    assert least_seconds(graph, 20) == 10.0
    assert least_seconds(graph, 16) == 11.0
    assert least_seconds(graph, 14) == 11.5
    # What is beyond the second output needs the one before it, which is not kept.
    assert least_seconds(graph, 9) == 13.0
    assert least_seconds(graph, 8) == 14.0


def two_outputs(must_keep: bool = False) -> StepGraph:
    """Return a step that saves both outputs of an operator that takes 6 seconds."""
    draft = Draft()
    draft.run()
    small, large = draft.run(
        draft.outside(), makes=[2, 4], seconds=6.0, must_keep=must_keep
    )
    draft.save(small, large)
    draft.run()
    return draft.finish(backward_s=0.0)


def test_an_operator_with_two_outputs_is_paid_once():
    graph = two_outputs()
    assert least_seconds(graph, 6) == graph.seconds
    # In its own backward both outputs must be there: no schedule has less than that.
    assert least_seconds(graph, 5) == float("inf")
    moments = replace(
        graph,
        storages=(*graph.storages, Storage(6, "gradient", "", 3, 4, None)),
    )
    assert least_seconds(moments, 6) == pytest.approx(graph.seconds + 6.0)
    assert least_seconds(moments, 8) == pytest.approx(graph.seconds + 4.0)


def test_what_a_pinned_operator_makes_stays():
    graph = two_outputs(must_keep=True)
    gradient = Storage(6, "gradient", "", 3, 4, None)
    crowded = replace(graph, storages=(*graph.storages, gradient))
    assert least_seconds(crowded, 12) == graph.seconds
    assert least_seconds(crowded, 11) == float("inf")


def test_gradients_alive_late_in_the_backward_raise_the_bound():
    graph = chain_of([4] * 6, [1.0] * 6)
    gradient = Storage(12, "gradient", "", 8, 9, None)
    crowded = replace(graph, storages=(*graph.storages, gradient))
    assert least_seconds(graph, 24) == graph.seconds
    # Moment 8 has 12 bytes of gradient, asks for 4 and will ask for 8 more.
    assert least_seconds(crowded, 24) == graph.seconds
    assert least_seconds(crowded, 20) == graph.seconds + 1.0
    assert least_seconds(crowded, 16) == graph.seconds + 2.0
    assert least_seconds(crowded, 15) == float("inf")


def test_what_there_is_no_room_for_twice_is_recomputed_twice():
    draft = Draft()
    draft.run()
    (a,) = draft.run(draft.outside(), makes=[4], seconds=3.0)
    for _ in range(2):
        draft.run(a)
        draft.save(a)
        draft.run()
    graph = draft.finish()
    assert [saved.asked for saved in graph.saved] == [(9,), (7,)]
    gradients = (Storage(4, "gradient", "", t, t + 1, None) for t in (6, 8))
    crowded = replace(graph, storages=(*graph.storages, *gradients))
    twice = simulate(crowded, [Choice(0, 6, stages=(Stage(0), Stage(3)))])
    assert (twice.peak_bytes, twice.seconds) == (4, graph.seconds + 6.0)
    assert least_seconds(crowded, 4) == pytest.approx(graph.seconds + 6.0)
    # Half of it has room at either op index.
    assert least_seconds(crowded, 6) == pytest.approx(graph.seconds + 3.0)


def test_what_a_dropped_storage_is_computed_from_has_to_be_there_too():
    draft = Draft()
    draft.run()
    (a,) = draft.run(draft.outside(), makes=[8], seconds=5.0)
    (b,) = draft.run(a, makes=[4], seconds=1.0)
    draft.run(b)
    draft.save(b)
    draft.run(makes=[9])
    graph = draft.finish()
    assert least_seconds(graph, 13) == graph.seconds
    # `a` was freed in the forward, and is larger than what is computed from it.
    assert least_seconds(graph, 12) == pytest.approx(graph.seconds + 6.0 / 4)


def test_a_tensor_that_the_backward_pass_reads_is_live_until_it_has():
    draft = Draft()
    a, b = draft.run(draft.outside(), makes=[4, 4])
    draft.save(a, b)
    graph = draft.finish()
    first, last = graph.operators[1], replace(graph.operators[1], inputs=(a,))
    gradient = Storage(8, "gradient", "", 2, 3, None)
    longer = replace(
        graph,
        operators=(graph.operators[0], first, last),
        saved=tuple(replace(saved, freed=3) for saved in graph.saved),
        storages=(*(replace(s, death=3) for s in graph.storages), gradient),
    )
    assert least_seconds(longer, 12) < float("inf")
    assert least_seconds(longer, 11) == float("inf")


def test_what_the_user_holds_is_not_dropped():
    draft = Draft()
    (held,) = draft.run(draft.outside(), makes=[4])
    draft.save(held)
    draft.hold(held)
    graph = draft.finish()
    assert least_seconds(graph, 4) == graph.seconds
    assert least_seconds(graph, 3) == float("inf")


def test_a_write_in_place_is_paid_with_what_it_writes():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4], seconds=2.0)
    (a,) = draft.run(writes=[a], seconds=3.0)
    draft.save(a)
    draft.run(a, makes=[1])
    draft.run(makes=[5])
    graph = draft.finish()
    assert least_seconds(graph, 5) == graph.seconds + 5.0


def test_what_the_backward_never_asks_for_is_dropped_for_nothing():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(a, is_asked=False)
    draft.run(makes=[4])
    graph = draft.finish()
    assert simulate(graph, ()).peak_bytes == 8
    assert least_seconds(graph, 4) == graph.seconds


def test_a_step_without_operators_takes_no_time():
    assert least_seconds(Draft().finish(), 0) == 0.0


def test_a_negative_budget_is_refused():
    with pytest.raises(OptionError, match="a budget is 0 bytes or more; got -1"):
        least_seconds(two_outputs(), -1)
