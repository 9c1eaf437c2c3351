"""Cuts lie where few bytes cross, and never inside a write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membudget.planner.blocks import filled_in_parts, segments
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
