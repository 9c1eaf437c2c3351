"""What is recomputed at least, against every choice of what is live."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.graph import StepGraph
from membudget.planner import dependency_cuts
from membudget.planner.choice import Block, made_in, writers_of
from membudget.planner.dependency_cuts import DependencyCuts
from tests.planner.drafts import Draft, chain_of, drafts, subsets

many = settings(max_examples=300, deadline=None)


def nothing(storage: int) -> bool:
    return False


def seconds_with(
    graph: StepGraph, wanted: frozenset[int], live: frozenset[int]
) -> float:
    """Return the seconds in which what is not live is recomputed."""
    writers = writers_of(graph, forward(graph), made_in(graph, forward(graph)))
    pending, again = [*(wanted - live)], set()
    while pending:
        for writer in writers.get(pending.pop(), ()):
            if writer not in again:
                again.add(writer)
                read = set(graph.reads[writer]) - {*graph.writes[writer]} - live
                pending += [s for s in read if max(writers.get(s, [-1])) < writer]
    if any(graph.operators[i].must_keep for i in again):
        return math.inf
    return sum(graph.operators[i].seconds for i in again)


def forward(graph: StepGraph) -> Block:
    return Block(0, graph.backward_start)


def fastest_s(graph: StepGraph, wanted: frozenset[int], room: int) -> float:
    """Return the seconds under the best choice of what is live."""
    sizes = [storage.bytes for storage in graph.storages]
    fitting = (
        live
        for live in subsets(made_in(graph, forward(graph)))
        if sum(map(sizes.__getitem__, live)) <= room
    )
    return min(seconds_with(graph, wanted, live) for live in fitting)


@many
@given(drafts(), st.data())
def test_no_choice_of_what_is_live_takes_fewer_seconds(graph, data):
    made = sorted(made_in(graph, forward(graph)))
    wanted = (
        frozenset(data.draw(st.sets(st.sampled_from(made)))) if made else frozenset()
    )
    room = data.draw(st.integers(0, 30))
    least_s = DependencyCuts(graph, {}).least_s(wanted, nothing, room)
    assert least_s <= fastest_s(graph, wanted, room) + 1e-12


@pytest.mark.parametrize(("room", "seconds"), [(0, 6.0), (1, 1.0), (2, 0.0), (3, 0.0)])
def test_what_a_dropped_storage_is_computed_from_is_recomputed_or_live(room, seconds):
    # 0 makes 9 bytes, of which 1 makes 1 byte, of which 2 makes 2 that are wanted.
    graph = chain_of([9, 1, 2], [3.0, 2.0, 1.0])
    wanted = [graph.values[graph.operators[2].outputs[0]].storage]
    least_s = DependencyCuts(graph, {}).least_s(wanted, nothing, room)
    assert least_s == pytest.approx(seconds)


def test_what_is_live_in_any_case_is_not_recomputed():
    graph = chain_of([9, 1, 2], [3.0, 2.0, 1.0])
    first, second, third = sorted(made_in(graph, forward(graph)))
    cuts = DependencyCuts(graph, {})
    assert cuts.least_s([third], {second}.__contains__, 0) == pytest.approx(1.0)
    assert cuts.least_s([third], {first}.__contains__, 0) == pytest.approx(3.0)


def test_an_operator_that_two_storages_are_computed_from_runs_once():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[9], seconds=5.0)
    made = [draft.run(a, makes=[1])[0] for _ in range(2)]
    graph = draft.finish()
    wanted = [graph.values[value].storage for value in made]
    assert DependencyCuts(graph, {}).least_s(wanted, nothing, 0) == pytest.approx(7.0)


def test_what_is_written_after_it_is_saved_is_recomputed_until_then():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1], seconds=2.0)
    draft.run(writes=[a], seconds=3.0)
    graph = draft.finish()
    storage = graph.values[a].storage
    assert DependencyCuts(graph, {}).writers_of(storage) == [0, 1]
    assert DependencyCuts(graph, {storage: 0}).least_s([storage], nothing, 0) == 2.0


def test_the_outputs_of_an_operator_that_must_not_run_again_take_room():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[2], seconds=1.0, must_keep=True)
    (b,) = draft.run(a, makes=[3], seconds=4.0)
    graph = draft.finish()
    wanted = [graph.values[b].storage]
    assert fastest_s(graph, frozenset(wanted), 2) == 4.0
    # The 2 bytes of which it is made leave no room for any of its 3.
    assert DependencyCuts(graph, {}).least_s(wanted, nothing, 2) == pytest.approx(4.0)


def test_no_network_is_cut_once_the_nodes_are_spent(monkeypatch):
    graph = chain_of([1] * 9, [1.0] * 9)
    wanted = sorted(made_in(graph, forward(graph)))
    monkeypatch.setattr(dependency_cuts, "MOST_NODES", 30)
    cuts = DependencyCuts(graph, {})
    assert cuts.least_s(wanted, nothing, 4) > 0
    assert cuts.is_spent
    assert cuts.least_s(wanted, nothing, 4) == 0.0
