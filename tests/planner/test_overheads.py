"""What the engines take beside the operators is priced by what regions do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import REPLAY, RERUN, Choice
from membudget.planner.overheads import (
    CPU_OVERHEADS,
    FITTED_LAUNCH_S,
    NATIVE_OVERHEADS,
    NO_OVERHEADS,
    Overheads,
)
from membudget.planner.schedule import Simulator
from tests.planner.drafts import Draft, chain_of

OVERHEADS = Overheads(cache_bytes=5, record_s=1.0, record_cold_s=10.0, again_s=2.0)


def moving(*moved_bytes: tuple[int, int]) -> StepGraph:
    """Return a chain whose operators read and write so many bytes."""
    graph = chain_of([1] * len(moved_bytes), [1.0] * len(moved_bytes))
    forward = [
        replace(operator, read_bytes=read, written_bytes=written)
        for operator, (read, written) in zip(graph.operators, moved_bytes, strict=False)
    ]
    rest = graph.operators[len(moved_bytes) :]
    return replace(graph, operators=(*forward, *rest))


def test_an_operator_that_moves_more_than_the_cache_holds_costs_more():
    graph = moving((5, 0), (2, 3), (3, 3), (0, 6))
    found = [OVERHEADS.region_of_s(graph, Choice(i, i + 1)) for i in range(4)]
    assert found == [1.0, 1.0, 10.0, 10.0]
    assert OVERHEADS.region_of_s(graph, Choice(1, 4)) == 21.0


def test_a_view_costs_nothing_to_record():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.run(draft.view(a), makes=[4])
    assert OVERHEADS.region_of_s(draft.finish(), Choice(0, 3)) == 2.0


def test_a_write_to_a_part_of_a_storage_or_to_older_memory_costs_more():
    draft = Draft()
    older = draft.outside()
    (a,) = draft.run(older, makes=[4])
    draft.run(older, writes=[a])
    part = draft.view(a)
    draft.values[part] = replace(draft.values[part], bytes=2)
    (written,) = draft.run(older, writes=[part])
    draft.values[written] = replace(draft.values[written], bytes=2)
    draft.run(a, writes=[older])
    graph = draft.finish()
    prices = replace(OVERHEADS, record_write_s=200.0)
    regions = [Choice(i, i + 1) for i in range(graph.backward_start)]
    found = [prices.region_of_s(graph, region) for region in regions]
    assert found == [1.0, 1.0, 0.0, 201.0, 201.0]


def test_a_replay_takes_a_share_of_the_forward_and_its_overhead():
    graph = moving((5, 0), (0, 6))
    prices = replace(OVERHEADS, again_share=0.5)
    found = prices.with_replayed_forward(graph)
    assert [o.seconds for o in found.operators] == [2.5, 2.5, 1.0, 1.0]
    assert found.backward_start == graph.backward_start
    # So do the times of schedules: both operators are replayed, or rerun in full.
    simulator, call = Simulator(graph, prices), ModuleCall("0", 0, 2)
    schedules = [
        simulator.schedule([call], [Choice(0, 2, engine=engine)])
        for engine in (REPLAY, RERUN)
    ]
    replayed, reran = map(simulator.with_plain_times, schedules)
    count, again = len(replayed.simulation.replayed), len(reran.simulation.reran)
    assert replayed.simulation.seconds == graph.seconds + 0.5 * count
    assert replayed.overhead_s == simulator.region_s(replayed.choices[0]) + 2.0 * count
    assert reran.simulation.seconds == graph.seconds + again
    assert count
    assert again
    assert replayed.again_share == 0.5


@pytest.mark.parametrize("prices", [CPU_OVERHEADS, NATIVE_OVERHEADS])
def test_what_runs_in_python_is_in_proportion_to_what_a_launch_takes(prices):
    found = prices.on_a_processor(FITTED_LAUNCH_S / 2)
    of_replays = 0.5 if prices is CPU_OVERHEADS else 1.0
    assert found.record_s == prices.record_s * of_replays
    assert found.again_s == prices.again_s * of_replays
    assert found.rerun_saved_s == prices.rerun_saved_s / 2
    assert found.cache_bytes == prices.cache_bytes
    assert found.again_share == prices.again_share
    assert prices.on_a_processor(FITTED_LAUNCH_S) == prices


def test_the_recorder_in_cpp_takes_less_than_the_one_in_python():
    assert NATIVE_OVERHEADS.record_s < CPU_OVERHEADS.record_s
    assert NATIVE_OVERHEADS.record_cold_s < CPU_OVERHEADS.record_cold_s
    assert Overheads() == NO_OVERHEADS


def test_a_region_pays_for_itself_and_for_what_it_runs_and_saves():
    graph = moving((5, 0), (0, 6))
    assert [saved.moment for saved in graph.saved] == [0, 1]
    whole = ModuleCall("0", 0, 2)
    graph = replace(graph, calls=(whole, ModuleCall("0.1", 1, 2)))
    prices = replace(
        OVERHEADS,
        rerun_region_s=100.0,
        rerun_module_s=1000.0,
        rerun_nested_s=50.0,
        rerun_saved_s=0.25,
        record_region_s=200.0,
        record_saved_s=0.125,
        replay_region_s=5.0,
        replay_saved_s=0.5,
    )
    rerun = Choice(0, 2, engine=RERUN)
    assert prices.region_of_s(graph, rerun) == 100 + 2 * 1000 + 50 + 2 * 0.25
    forward_s = 200 + (1 + 10) + 2 * 0.125
    assert prices.forward_of_s(graph, Choice(0, 2)) == forward_s
    assert prices.region_of_s(graph, Choice(0, 2)) == forward_s + 5 + 2 * 0.5


def test_a_schedule_pays_for_what_its_blocks_record_and_recompute():
    graph = moving((5, 0), (0, 6), (1, 1))
    simulator = Simulator(graph, OVERHEADS)
    call = ModuleCall("h", 0, 2)
    found = simulator.schedule([call], [Choice(0, 2)])
    assert (found.calls, found.choices) == ((call,), (Choice(0, 2),))
    assert found.overhead_s == 11.0
    assert found.plain_s == graph.seconds + 3 * 2.0
    # Its recomputed operator is paid for with the seconds of the graph.
    assert found.simulation.recomputed == (0,)
    assert found.seconds == found.plain_s + 1.0 + 2.0 + 11.0
    assert not found.is_smallest

    kept = frozenset(graph.born_at[0])
    changed = simulator.changed(found, [Choice(0, 2, kept)])
    assert (changed.calls, changed.overhead_s) == (found.calls, 11.0)
    assert changed.choices == (Choice(0, 2, kept),)
    assert changed.simulation.recomputed == ()
