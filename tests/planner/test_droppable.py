"""What a schedule may free, and what is live under every schedule."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.graph import Operator, Saved, StepGraph
from membudget.planner.droppable import Droppable, LiveAlways, droppables
from membudget.planner.simulate import simulate
from tests.planner.drafts import Draft
from tests.planner.steps import longer_steps, schedules


def node(reads: list[int], freed: int = 6) -> StepGraph:
    """Return a step whose backward unpacks 4 bytes at 4, and reads them at `reads`.

    Operator 5 unpacks another tensor.
    """
    draft = Draft()
    for _ in range(2):
        (a,) = draft.run(draft.outside(), makes=[4])
        draft.save(a)
    draft.run()
    draft.run()
    graph = draft.finish()

    def reading(index: int, operator: Operator) -> Operator:
        value = graph.saved[1].value
        return replace(operator, inputs=(value,) if index in reads else ())

    def moved(saved: Saved, moment: int) -> Saved:
        return replace(saved, asked=(moment,), freed=freed)

    first, second = graph.saved
    operators = tuple(reading(i, o) for i, o in enumerate(graph.operators))
    saved = (moved(first, 6), moved(second, 4))
    storages = tuple(replace(s, death=8) for s in graph.storages)
    return replace(graph, operators=operators, saved=saved, storages=storages)


def held(graph: StepGraph) -> tuple[tuple[int, int], ...]:
    (found,) = (d for d in droppables(graph) if d.saved_at == 1)
    return found.held


def test_a_tensor_is_held_from_when_it_is_unpacked_until_it_is_read_last():
    assert held(node([])) == ((4, 5),)
    assert held(node([4])) == ((4, 5),)
    assert held(node([4, 5])) == ((4, 6),)


def test_reads_after_another_tensor_is_unpacked_or_it_is_freed_may_be_of_another():
    assert held(node([5, 6, 7], freed=8)) == ((4, 6),)
    assert held(node([5], freed=5)) == ((4, 5),)


def test_what_is_never_unpacked_is_not_held():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(a, is_asked=False)
    assert droppables(draft.finish()) == [Droppable(1, 1, 1, ())]


def test_what_is_empty_or_held_by_the_user_is_not_droppable():
    draft = Draft()
    a, b = draft.run(draft.outside(), makes=[0, 4])
    draft.save(a, b)
    draft.hold(b)
    assert droppables(draft.finish()) == []


def test_a_droppable_storage_is_live_until_it_is_released_and_while_it_is_held():
    graph = node([5])
    found = droppables(graph)
    live = LiveAlways(graph, found, [])
    (storage,) = (d.storage for d in found if d.saved_at == 1)
    moments = [t for t in range(2, 8) if live.has(storage, t)]
    assert moments == [4, 5]
    kept = LiveAlways(graph, [], found)
    assert [t for t in range(2, 8) if kept.has(storage, t)] == [2, 3, 4, 5]


@settings(max_examples=200, deadline=None)
@given(longer_steps(), st.data())
def test_no_schedule_has_fewer_bytes_live_than_all_have(graph, data):
    found = simulate(graph, data.draw(schedules(graph)))
    live = LiveAlways(graph, droppables(graph), [])
    workspaces = [operator.workspace_bytes for operator in graph.operators]
    for own, workspace, least in zip(
        found.alive_bytes, workspaces, live.bytes, strict=True
    ):
        assert own + workspace >= least
