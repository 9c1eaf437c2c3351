"""Cuts lie where few bytes cross, and never inside a write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from membudget.planner.blocks import segments
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
