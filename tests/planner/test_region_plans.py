"""Equal calls of one module share a region, which names them by number."""

from __future__ import annotations

from membudget.graph import StepGraph
from membudget.planner.blocks import module_blocks, numbered_calls
from membudget.planner.choice import Choice, Stage, made_in
from membudget.planner.region_plans import region_plans
from tests.planner.drafts import Draft


def loop(before: int = 0, models: int = 1) -> StepGraph:
    """Return a model that calls a cell of two operators three times.

    Args:
        before: How often the cell is called before the model.
        models: How often the model is called, if it is.
    """
    draft = Draft()
    value = draft.outside()
    for _ in range(2 * (3 + before)):
        (made,) = draft.run(value, makes=[4])
        draft.save(made)
        value = made
    count = len(draft.operators)
    cells = [("cell", start, start + 2) for start in range(0, count, 2)]
    model = [("", 2 * before, count)] * models
    return draft.finish([*cells[:before], *model, *cells[before:]])


def test_equal_calls_share_a_region_and_others_have_their_own():
    graph = loop()
    calls = numbered_calls(graph)
    kept = min(made_in(graph, Choice(2, 4)))
    choices = [Choice(0, 2), Choice(2, 4, frozenset({kept})), Choice(4, 6)]
    first, second = region_plans(graph, calls, choices)
    assert (first.path, first.times, first.numbers) == ("cell", 3, (0, 2))
    assert (second.path, second.times, second.numbers) == ("cell", 3, (1,))
    assert len(second.kept) == 1


def test_a_module_that_is_called_once_has_no_numbers():
    graph = loop()
    (model,) = (call for call in graph.calls if call.path == "")
    (region,) = region_plans(graph, [model], [Choice(0, 6)])
    assert (region.times, region.numbers) == (1, ())


def test_operators_that_do_not_run_have_no_number():
    graph = loop()
    kept = frozenset(made_in(graph, Choice(0, 6)))
    stages = (Stage(0, frozenset()), Stage(3, frozenset()))
    (model,) = (call for call in graph.calls if call.path == "")
    choice = Choice(0, 6, kept, stages)
    (region,) = region_plans(graph, [model], [choice], absent={0, 2})
    assert region.operators == len(region.sequence) == 4
    assert [k.number for k in region.kept] == [1, 2, 3, 4]
    assert [stage.after for stage in region.stages] == [0, 1]


def test_each_call_of_a_module_in_a_loop_is_a_block():
    assert [c.path for c in module_blocks(loop(), 1.0)] == [""]
    found = module_blocks(loop(), 0.5)
    assert [(c.path, c.start) for c in found] == [("cell", 0), ("cell", 2), ("cell", 4)]


def test_calls_have_no_number_where_nothing_says_when_to_count_anew():
    for graph in (loop(before=1), loop(models=0), loop(models=2)):
        assert numbered_calls(graph) == []
        assert all(call.path == "" for call in module_blocks(graph, 0.5))
