"""What a region copies before it overwrites what a replay reads."""

from __future__ import annotations

import pytest

from membudget.planner.choice import Choice, made_in
from membudget.planner.overwrites import (
    SourceCopy,
    copies_of_saved,
    source_copies,
    sources_until,
)
from membudget.planner.simulate import simulate
from membudget.planner.slices import slice_of_saved
from tests.planner.drafts import Draft


def copies_of(draft: Draft, *kept: int) -> list[SourceCopy]:
    """Return what a region of the whole forward copies that keeps some values."""
    graph = draft.finish()
    region = Choice(
        0, graph.backward_start, frozenset(draft.values[v].storage for v in kept)
    )
    dropped = made_in(graph, region) - region.kept
    return source_copies(graph, region, slice_of_saved(graph, region, dropped))


def overwritten(draft: Draft) -> int:
    """Add a value that is read for a dropped one, and then overwritten."""
    (a,) = draft.run(draft.outside(), makes=[8])
    draft.save(a)
    (b,) = draft.run(a, makes=[2])
    draft.save(b)
    (written,) = draft.run(writes=[a])
    return written


def test_a_source_that_is_overwritten_is_copied_until_what_needs_it_is_freed():
    draft = Draft()
    a = overwritten(draft)
    assert copies_of(draft, a) == [SourceCopy(1, 2, 5)]
    graph = draft.finish()
    region = Choice(0, 3, frozenset({1}))
    assert simulate(graph, [region]).alive_bytes[2] == 8 + 8


def test_a_source_that_is_dropped_too_is_not_copied():
    draft = Draft()
    overwritten(draft)
    assert copies_of(draft) == []


def test_content_that_the_region_does_not_keep_yet_is_not_copied():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[8])
    draft.save(*draft.run(a, makes=[2]))
    (a,) = draft.run(writes=[a])
    draft.save(a)
    assert copies_of(draft, a) == []


def test_a_write_to_one_part_of_a_split_leaves_the_others():
    for place, expected in [(0, []), (1, [SourceCopy(1, 3, 6)])]:
        draft = Draft()
        (a,) = draft.run(draft.outside(), makes=[8])
        draft.save(a)
        parts = draft.run(writes=[a, a], is_view=True)
        draft.save(*draft.run(parts[1], makes=[2]))
        draft.run(writes=[parts[place]])
        assert copies_of(draft, a) == expected


def test_older_memory_that_is_saved_and_overwritten_is_copied_until_it_is_freed():
    """A normalisation in training saves its running statistics, and writes them."""
    draft = Draft()
    state = draft.outside(8)
    y, _ = draft.run(makes=[4], writes=[state])
    draft.save(state, y)
    graph = draft.finish()
    for kept in ([], [y]):
        assert copies_of(draft, *kept) == [SourceCopy(0, 0, graph.saved[0].freed)]
    whole = Choice(0, 1, frozenset({graph.values[y].storage}))
    plain = simulate(graph, []).alive_bytes[0]
    assert simulate(graph, [whole]).alive_bytes[0] == plain + 8


def test_older_memory_that_is_saved_after_its_last_write_is_copied_at_the_end():
    draft = Draft()
    (state,) = draft.run(writes=[draft.outside(8)])
    draft.save(state)
    draft.run(makes=[4])
    assert copies_of(draft) == [SourceCopy(0, 2, draft.finish().saved[0].freed)]


@pytest.mark.parametrize(("kind", "copies"), [("buffer", 1), ("parameter", 0)])
def test_a_parameter_that_is_overwritten_before_it_is_saved_is_not_copied(kind, copies):
    """A parameter is no running state: the next call does not count."""
    draft = Draft()
    state = draft.outside(8, kind)
    draft.run(writes=[state])
    draft.save(*draft.run(state, makes=[1]), state)
    assert len(copies_of_saved(draft.finish(), Choice(0, 2))) == copies


def test_what_replays_read_from_a_copy_is_not_held_itself():
    """An activation in place, which saves a clone of what it overwrites."""
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[8])
    (clone,) = draft.run(a, makes=[8])
    draft.save(clone)
    draft.run(writes=[a])
    graph = draft.finish()
    region = Choice(1, 3)
    found = slice_of_saved(graph, region, made_in(graph, region))
    freed = graph.saved[0].freed
    assert source_copies(graph, region, found) == [SourceCopy(1, 2, freed)]
    assert sources_until(graph, region, found) == {1: 0}
