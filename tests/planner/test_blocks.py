"""Cuts lie where few bytes cross, and never inside a write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membudget.planner.blocks import (
    filled_in_parts,
    largest_call,
    module_blocks,
    segments,
)
from membudget.planner.choice import Choice, made_in, storages_of
from tests.planner.drafts import Draft, drafts


def test_a_chain_is_cut_where_little_passes():
    draft = Draft()
    value = draft.outside()
    for size in (9, 9, 1, 9, 9):
        made = draft.run(value, makes=[size])
        draft.save(*made)
        (value,) = made
    graph = draft.finish()
    first, second = segments(graph, Choice(0, 5), 2)
    assert (first.end, second.end) == (3, 5)
    assert [graph.storages[s].bytes for s in first.crossing] == [1]
    assert second.crossing == frozenset()


def test_a_skip_crosses_every_cut_that_it_spans():
    draft = Draft()
    (skip,) = draft.run(draft.outside(), makes=[2])
    draft.save(skip)
    value = skip
    for _ in range(3):
        (value,) = draft.run(value, makes=[3])
        draft.save(value)
    draft.run(value, skip, makes=[1])
    graph = draft.finish()
    pieces = segments(graph, Choice(0, 5), 5)
    storage = graph.values[skip].storage
    assert [storage in piece.crossing for piece in pieces] == [True] * 4 + [False]


@given(drafts(), st.integers(1, 6))
def test_pieces_follow_one_another_and_leave_what_is_read_later(graph, most):
    count = graph.backward_start
    region = Choice(0, count)
    pieces = segments(graph, region, most)
    assert len(pieces) <= most
    assert [p.start for p in pieces] == [0, *(p.end for p in pieces[:-1])]
    assert pieces[-1].end == count
    for piece in pieces[:-1]:
        made = made_in(graph, Choice(0, piece.end))
        later = graph.operators[piece.end : count]
        read = {s for o in later if not o.is_view for s in storages_of(graph, o.inputs)}
        written = {s for o in later for s in storages_of(graph, o.outputs)}
        assert piece.crossing == made & read
        assert not any(s in written for s in made)


def loop(draft: Draft, count: int) -> int:
    """Add a loop whose results go into one storage, which is read in the end."""
    (results,) = draft.run(makes=[count])
    value = draft.outside()
    for _ in range(count):
        (value,) = draft.run(value, makes=[4])
        draft.save(value)
        (results,) = draft.run(value, writes=[results])
    draft.save(*draft.run(results, makes=[1]))
    return draft.values[results].storage


def test_what_a_loop_fills_forbids_cuts_in_the_loop_unless_it_is_kept():
    draft = Draft()
    results = loop(draft, 6)
    graph = draft.finish()
    region = Choice(0, graph.backward_start)
    assert filled_in_parts(graph, region) == {results}
    (first, _) = segments(graph, region, 2)
    assert first.end == graph.backward_start - 1
    (first, second) = segments(graph, region, 2, frozenset({results}))
    assert first.end == 6
    assert results not in first.crossing | second.crossing


@pytest.mark.parametrize("use", ["read", "save"])
def test_a_loop_that_uses_what_it_fills_needs_what_that_was(use):
    draft = Draft()
    (results,) = draft.run(makes=[6])
    value = draft.outside()
    for place in range(6):
        is_used = place == 3
        read = [results] if is_used and use == "read" else []
        (value,) = draft.run(value, *read, makes=[4])
        draft.save(value, *([results] if is_used and use == "save" else []))
        (results,) = draft.run(value, writes=[results])
    graph = draft.finish()
    assert filled_in_parts(graph, Choice(0, graph.backward_start)) == set()


def test_a_write_that_spans_little_forbids_few_cuts():
    draft = Draft()
    loop(draft, 2)
    for _ in range(9):
        draft.save(*draft.run(draft.outside(), makes=[4]))
    graph = draft.finish()
    assert filled_in_parts(graph, Choice(0, graph.backward_start)) == set()


# Module calls.


def nested(*sizes: int) -> list[tuple[str, int, int]]:
    """Return the calls of a model with a child for each size, by its operators."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        ("", 0, ends[-1]),
        *(
            (f"h.{i}", end - size, end)
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ),
    ]


def blocks_of(
    sizes: list[int], calls: list[tuple[str, int, int]], share: float
) -> list[str]:
    """Return the paths of the blocks of a step that saves tensors of some sizes."""
    draft = Draft()
    value = draft.outside()
    for size in sizes:
        (value,) = draft.run(value, makes=[size])
        draft.save(value)
    return [call.path for call in module_blocks(draft.finish(calls), share)]


def test_a_call_is_cut_where_it_saves_more_than_its_share():
    calls = [*nested(2, 2), ("h.0.x", 0, 1), ("h.0.y", 1, 2)]
    sizes = [6, 4, 5, 5]
    assert blocks_of(sizes, calls, 1.0) == [""]
    assert blocks_of(sizes, calls, 0.99) == ["h.0", "h.1"]
    assert blocks_of(sizes, calls, 0.5) == ["h.0", "h.1"]
    # The second has no children.
    assert blocks_of(sizes, calls, 0.49) == ["h.0.x", "h.0.y", "h.1"]


@pytest.mark.parametrize(("inside", "paths"), [(6, ["h.0"]), (5, [""])])
def test_children_replace_their_parent_if_they_save_three_fifths_of_it(inside, paths):
    sizes = [inside, 10 - inside]
    assert blocks_of(sizes, [("", 0, 2), ("h.0", 0, 1)], 0.5) == paths


@pytest.mark.parametrize(("inside", "paths"), [(3, ["cell", "cell"]), (2, [""])])
def test_calls_in_a_loop_replace_their_parent_if_they_save_three_tenths(inside, paths):
    sizes = [inside, 10 - inside, inside, 10 - inside]
    calls = [("", 0, 4), ("cell", 0, 1), ("cell", 2, 3)]
    assert blocks_of(sizes, calls, 0.5) == paths


def test_a_call_that_saves_nothing_is_no_block():
    assert blocks_of([5, 0], nested(1, 1), 0.9) == ["h.0"]


def test_a_child_of_the_same_operators_is_the_same_block():
    calls = [("", 0, 2), ("h", 0, 2), ("h.0", 0, 1), ("h.1", 1, 2)]
    assert blocks_of([5, 5], calls, 0.5) == ["h.0", "h.1"]


def test_a_call_of_another_module_inside_of_a_call_is_no_child():
    calls = [("a", 0, 2), ("b", 0, 1), ("ab", 1, 2)]
    assert blocks_of([5, 5], calls, 0.5) == ["a"]


def test_a_module_that_is_called_twice_is_no_block_of_a_step_without_a_model():
    calls = [("a", 0, 1), ("a", 1, 2), ("b", 2, 3)]
    assert blocks_of([5, 5, 5], calls, 1.0) == ["b"]


def test_the_largest_call_is_the_outermost_one_with_the_most_operators():
    draft = Draft()
    value = draft.outside()
    for _ in range(6):
        (value,) = draft.run(value, makes=[1])
        draft.save(value)
    calls = [("a", 0, 2), ("b", 2, 5), ("b.x", 2, 4), ("c", 5, 6)]
    found = largest_call(draft.finish(calls))
    assert found is not None
    assert found.path == "b"
    assert largest_call(draft.finish()) is None


# Segments.


def ends(sizes: list[int], most: int, saves: list[bool] | None = None) -> list[int]:
    """Return where a chain of operators is cut, each of which saves its output."""
    draft = Draft()
    value = draft.outside()
    for size, is_saved in zip(sizes, saves or [True] * len(sizes), strict=True):
        (value,) = draft.run(value, makes=[size])
        if is_saved:
            draft.save(value)
    graph = draft.finish()
    return [s.end for s in segments(graph, Choice(0, len(sizes)), most)]


def test_a_chain_of_equal_operators_is_halved_again_and_again():
    assert ends([4] * 8, 1) == [8]
    assert ends([4] * 8, 2) == [4, 8]
    assert ends([4] * 8, 3) == [4, 6, 8]
    assert ends([4] * 8, 4) == [2, 4, 6, 8]
    assert ends([4] * 8, 99) == list(range(1, 9))


def test_a_cut_lies_in_the_middle_three_fifths_of_what_is_saved():
    # The narrowest places lie in the first and in the last fifth.
    assert ends([1, 9, 9, 8, 9, 9, 1, 9], 2) == [4, 8]
    # A fifth, and four fifths, are within.
    assert ends([2, 4, 2, 2], 2) == [1, 4]
    assert ends([3, 4, 1, 2], 2) == [3, 4]
    # Where nothing lies between, the narrowest of all is taken.
    assert ends([50, 1, 1], 2) == [2, 3]


def test_what_autograd_does_not_save_weighs_twice_at_a_cut():
    assert ends([9, 9, 5, 9, 9], 2, [True, True, False, True, True]) == [2, 5]
    assert ends([9, 9, 5, 9, 9], 2) == [3, 5]
    assert ends([9, 9, 4, 9, 9], 2, [True, True, False, True, True]) == [3, 5]


def test_a_chain_is_cut_before_a_view_and_not_behind_it():
    draft = Draft()
    value = draft.outside()
    for _ in range(3):
        (made,) = draft.run(value, makes=[4])
        draft.save(made)
        value = draft.view(made)
    graph = draft.finish()
    found = segments(graph, Choice(0, 6), 9)
    assert [s.end for s in found] == [1, 3, 5, 6]


def test_no_cut_lies_between_two_writes_of_a_storage():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.run(makes=[4])
    (a,) = draft.run(writes=[a])
    draft.save(a)
    draft.run(a, makes=[4])
    graph = draft.finish()
    assert [s.end for s in segments(graph, Choice(0, 4), 9)] == [3, 4]
