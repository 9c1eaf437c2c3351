"""What is found of a block: who writes in it, what it makes and saves."""

from __future__ import annotations

from dataclasses import replace

from membudget.planner.choice import (
    Block,
    Choice,
    is_output,
    made_in,
    run_together,
    storages_saved_in,
    writers_of,
)
from membudget.planner.simulate import simulate
from membudget.planner.slices import dropped_in
from tests.planner.drafts import Draft, chain_of


def test_the_writers_of_a_storage_are_listed_in_order():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    draft.run(writes=[a])
    graph = draft.finish()
    storage = graph.values[a].storage
    assert writers_of(graph, Block(0, 2), {storage}) == {storage: [0, 1]}


def test_a_tensor_is_an_output_of_the_operator_that_saves_it_if_that_makes_it():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    (b,) = draft.run(a, makes=[1])
    draft.save(a, b)
    graph = draft.finish()
    assert [is_output(graph, saved) for saved in graph.saved] == [False, True]


def test_operators_that_share_a_storage_through_others_run_together():
    assert run_together([[0, 4], [1, 2], [4, 2], [3]]) == [[0, 1, 2, 4], [3]]


def test_what_is_found_of_a_block_once_is_that_of_its_operators_and_its_graph():
    graph = chain_of([4] * 3, [1.0] * 3)
    made = [made_in(graph, Block(0, end)) for end in (1, 2, 1)]
    assert made[0] is made[2]
    assert made[0] < made[1]
    # What a choice keeps has no part in it.
    assert made_in(graph, Choice(0, 1, frozenset(made[0]))) is made[0]
    # Another function finds its own.
    assert storages_saved_in(graph, Block(0, 1)).keys() == {0}
    without = replace(graph, storages=())
    assert made_in(without, Block(0, 1)) == set()


def test_what_is_empty_or_held_is_never_dropped():
    draft = Draft()
    large, empty, held = draft.run(draft.outside(), makes=[4, 0, 2])
    draft.save(large, empty, held)
    draft.hold(held)
    graph = draft.finish()
    assert dropped_in(graph, Choice(0, 1)) == {graph.values[large].storage}


def test_an_operator_does_not_run_again_for_what_is_empty():
    draft = Draft()
    large, empty = draft.run(draft.outside(), makes=[4, 0], must_keep=True)
    draft.save(large, empty)
    graph = draft.finish()
    kept = frozenset({graph.values[large].storage})
    assert simulate(graph, [Choice(0, 1, kept)]).recomputed == ()
