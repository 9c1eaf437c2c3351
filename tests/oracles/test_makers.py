"""What runs again together."""

from __future__ import annotations

from membudget.planner.choice import Choice
from tests.oracles.makers import Grouping, Maker
from tests.planner.drafts import Draft


def makers(draft: Draft) -> list[Maker]:
    graph = draft.finish()
    grouping = Grouping(graph, Choice(0, graph.backward_start), frozenset())
    return grouping.joined(grouping.grouped())


def operators(draft: Draft) -> list[tuple[int, ...]]:
    return [maker.operators for maker in makers(draft)]


def convolution_and_rectifier(rectified: int = 4) -> tuple[Draft, int]:
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4], seconds=8.0)
    (b,) = draft.run(a, makes=[rectified], seconds=1.0)
    draft.save(b)
    return draft, a


def test_what_one_operator_alone_reads_is_made_with_it():
    draft, _ = convolution_and_rectifier()
    (maker,) = makers(draft)
    assert maker.operators == (0, 1)
    assert maker.seconds == 9.0
    # While either runs, the storage between them is alive.
    assert sorted(maker.passing) == [(0, 4), (1, 4)]


def test_what_autograd_saved_is_a_choice_of_its_own():
    draft, a = convolution_and_rectifier()
    draft.save(a)
    assert operators(draft) == [(0,), (1,)]


def test_what_two_operators_read_is_a_choice_of_its_own():
    draft, a = convolution_and_rectifier()
    (c,) = draft.run(a, makes=[4])
    draft.save(c)
    assert operators(draft) == [(0,), (1,), (2,)]


def test_what_is_smaller_than_what_is_made_of_it_is_a_choice_of_its_own():
    draft, _ = convolution_and_rectifier(rectified=5)
    assert operators(draft) == [(0,), (1,)]


def test_what_is_there_longer_of_itself_is_a_choice_of_its_own():
    # Until the last operator has read it, keeping it costs nothing.
    draft, a = convolution_and_rectifier()
    draft.run(a, makes=[1])
    assert operators(draft) == [(0,), (1,)]


def test_operators_that_write_one_storage_run_together():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    (other,) = draft.run(draft.outside(), makes=[4])
    (b,) = draft.run(other, writes=[a])
    draft.save(b, other)
    assert operators(draft) == [(0, 2), (1,)]
    assert makers(draft)[0].reads == (draft.values[other].storage,)


def test_what_leads_nowhere_is_no_maker():
    draft = Draft()
    draft.run(draft.outside(), makes=[4])
    (a,) = draft.run(draft.outside(), makes=[4, 2])[:1]
    draft.save(a)
    (maker,) = makers(draft)
    assert maker.operators == (1,)
    assert maker.passing == ((1, 2),)
