"""The recompute slice: what leads to the targets runs again, and nothing else."""

from __future__ import annotations

from membudget.planner.choice import Block
from membudget.planner.slices import slice_of_saved
from tests.planner.drafts import Draft


def test_only_operators_that_lead_to_a_saved_tensor_are_in_its_slice():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    (b,) = draft.run(a, makes=[1])
    draft.run(a, makes=[1])
    (c,) = draft.run(b, makes=[1])
    draft.save(c)
    graph = draft.finish()
    a_s, b_s, c_s = (graph.values[v].storage for v in (a, b, c))
    found = slice_of_saved(graph, Block(0, 4), {a_s, b_s, c_s})
    assert sorted(found.writes) == [0, 1, 3]
    assert found.targets == {c_s: graph.saved[0].freed}
    assert found.writers == {a_s: [0], b_s: [1], c_s: [3]}


def test_what_is_not_dropped_is_a_source_and_needed_until_its_targets_are():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    (b,) = draft.run(a, makes=[1])
    draft.save(b)
    graph = draft.finish()
    source, target = (graph.values[v].storage for v in (a, b))
    found = slice_of_saved(graph, Block(0, 2), {target})
    assert sorted(found.writes) == [1]
    assert found.needed_until[source] == graph.saved[0].freed


def test_all_writers_of_a_storage_are_in_the_slice_in_order():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    draft.run(writes=[a])
    draft.save(a)
    graph = draft.finish()
    storage = graph.values[a].storage
    assert slice_of_saved(graph, Block(0, 2), {storage}).writers == {storage: [0, 1]}
