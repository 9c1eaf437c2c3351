"""What is kept beside a plan makes it faster, and it still fits."""

from __future__ import annotations

from hypothesis import given, settings

from membudget.graph import StepGraph
from membudget.planner.improve import filled
from membudget.planner.regions import Region
from membudget.planner.simulate import Simulation, simulate
from membudget.planner.timeline import timeline
from tests.planner.drafts import chain_of, drafts


def filled_up(
    graph: StepGraph, regions: list[Region], budget_bytes: int
) -> tuple[list[Region], Simulation]:
    return filled(graph, regions, simulate(graph, regions), budget_bytes)


def test_with_room_for_all_nothing_runs_again():
    graph = chain_of([2, 3, 4], [1.0, 2.0, 3.0])
    _, found = filled_up(graph, [Region(0, 3)], timeline(graph).peak_bytes)
    assert found.recomputed == ()


def test_what_fits_is_kept_and_no_more():
    graph = chain_of([2, 2, 2, 8], [1.0, 9.0, 1.0, 1.0])
    (region,), found = filled_up(graph, [Region(0, 4)], 12)
    assert region.kept == {2, 3}
    assert found == simulate(graph, [region])


@given(drafts(pinned=False))
@settings(deadline=None)
def test_a_better_plan_fits_and_is_no_slower(graph):
    regions = [Region(0, graph.backward_start)]
    before = simulate(graph, regions)
    after, found = filled(graph, regions, before, before.peak_bytes)
    assert found == simulate(graph, after)
    assert found.peak_bytes <= before.peak_bytes
    assert found.seconds <= before.seconds
