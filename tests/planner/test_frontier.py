"""The choices of a region against every subset of what it makes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.graph import StepGraph
from membudget.planner.choice import Choice
from membudget.planner.frontier import Front, KeepSet
from tests.planner.drafts import (
    Draft,
    chain_of,
    drafts,
    every_trade,
    extra_seconds,
    lower_hull,
)

many = settings(max_examples=40, deadline=None)


def whole(graph: StepGraph) -> Choice:
    return Choice(0, graph.backward_start)


def trades(graph: StepGraph, region: Choice) -> list[tuple[int, float]]:
    return [(c.kept_bytes, c.seconds) for c in Front(graph, region).hull()]


def check_hull(graph: StepGraph, region: Choice) -> None:
    assert trades(graph, region) == lower_hull(every_trade(graph, region))


def check_simulation(graph: StepGraph, region: Choice) -> None:
    for choice in Front(graph, region).hull():
        sizes = [graph.storages[s].bytes for s in choice.kept]
        assert choice.kept_bytes == sum(sizes)
        again = Choice(region.start, region.end, choice.kept)
        assert choice.seconds == extra_seconds(graph, again)


@many
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8))
def test_choices_of_a_chain_are_the_corners_of_its_hull(rows):
    graph = chain_of([size for size, _ in rows], [float(cost) for _, cost in rows])
    check_hull(graph, whole(graph))


@many
@given(drafts(in_place=False))
def test_choices_are_the_corners_of_the_hull_of_all_subsets(graph):
    check_hull(graph, whole(graph))


@many
@given(drafts())
def test_choices_with_writes_in_place_are_the_corners_of_the_hull(graph):
    check_hull(graph, whole(graph))


@many
@given(drafts(in_place=False), st.data())
def test_choices_of_a_part_of_the_forward_are_the_corners_of_its_hull(graph, data):
    start = data.draw(st.integers(0, graph.backward_start))
    end = data.draw(st.integers(start, graph.backward_start))
    check_hull(graph, Choice(start, end))


@many
@given(drafts(in_place=False))
def test_each_choice_costs_what_simulation_says(graph):
    check_simulation(graph, whole(graph))


@many
@given(drafts())
def test_each_choice_with_writes_in_place_costs_what_simulation_says(graph):
    check_simulation(graph, whole(graph))


@many
@given(drafts(in_place=False))
def test_the_first_choice_runs_nothing_again_and_the_last_keeps_least(graph):
    found = Front(graph, whole(graph)).hull()
    points = every_trade(graph, whole(graph))
    assert found[0].seconds == 0
    assert found[-1].kept_bytes == min(size for size, _ in points)


@many
@given(st.data())
def test_sizes_and_seconds_of_real_steps_make_the_same_hull(data):
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(1, 1 << 33), st.floats(1e-7, 1e-1)),
            min_size=1,
            max_size=6,
        )
    )
    graph = chain_of([size for size, _ in rows], [cost for _, cost in rows])
    hull = lower_hull(every_trade(graph, whole(graph)))
    found = trades(graph, whole(graph))
    # Corners that stand out by less than rounding may come or go.
    for size, seconds in found:
        assert min(abs(s - seconds) + abs(b - size) for b, s in hull) < 1e-6 * (
            1 + size
        )
    assert found[0][0] == hull[0][0]
    assert found[-1][0] == hull[-1][0]


def two_saved(seconds: float = 1.0) -> tuple[Draft, int, int]:
    draft = Draft()
    x = draft.outside()
    (a,) = draft.run(x, makes=[4], seconds=seconds)
    (b,) = draft.run(a, makes=[2], seconds=seconds)
    draft.save(a, b)
    return draft, a, b


def test_what_is_dear_to_make_and_small_is_kept_longest():
    graph = two_saved()[0].finish()
    assert trades(graph, whole(graph)) == [(6, 0.0), (2, 1.0), (0, 2.0)]


def test_what_a_pinned_operator_makes_is_kept_in_every_choice():
    draft = Draft()
    x = draft.outside()
    (a,) = draft.run(x, makes=[4], must_keep=True)
    (b,) = draft.run(a, makes=[2])
    draft.save(b)
    graph = draft.finish()
    assert trades(graph, whole(graph)) == [(2, 0.0)]


def test_a_pinned_source_is_kept_where_what_comes_of_it_is_larger():
    draft = Draft()
    x = draft.outside()
    (a,) = draft.run(x, makes=[2], must_keep=True)
    (b,) = draft.run(a, makes=[5])
    draft.save(b)
    graph = draft.finish()
    assert trades(graph, whole(graph)) == [(5, 0.0), (2, 1.0)]


def test_an_output_that_nobody_saves_is_kept_where_that_is_cheaper():
    # Two large saved tensors come of one small one that was dear to make.
    draft = Draft()
    x = draft.outside()
    (small,) = draft.run(x, makes=[1], seconds=100.0)
    for _ in range(2):
        (large,) = draft.run(small, makes=[50])
        draft.save(large)
    graph = draft.finish()
    assert trades(graph, whole(graph)) == [(100, 0.0), (1, 2.0), (0, 102.0)]


def test_a_view_that_was_saved_keeps_its_storage():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    view = draft.view(a)
    draft.run(view, makes=[1])
    draft.save(view)
    graph = draft.finish()
    assert trades(graph, whole(graph)) == [(4, 0.0), (0, 1.0)]


def test_an_empty_region_has_one_choice_which_keeps_nothing():
    graph = two_saved()[0].finish()
    assert trades(graph, Choice(1, 1)) == [(0, 0.0)]


def test_what_was_saved_outside_of_the_region_is_not_its_own():
    graph = two_saved()[0].finish()
    assert trades(graph, Choice(0, 1)) == [(0, 0.0)]


def test_what_takes_no_time_is_dropped_without_a_trade():
    graph = two_saved(seconds=0.0)[0].finish()
    assert trades(graph, whole(graph))[-1] == (0, 0.0)


def test_what_the_user_holds_costs_no_bytes_and_no_seconds():
    draft, a, _ = two_saved()
    draft.hold(a)
    graph = draft.finish()
    check_hull_without_held(graph, {draft.values[a].storage})


def check_hull_without_held(graph: StepGraph, held: set[int]) -> None:
    """Compare seconds only: bytes of what the user holds are there in any case."""
    for choice in Front(graph, whole(graph)).hull():
        assert not choice.kept & held
    check_simulation(graph, whole(graph))


def test_what_is_saved_and_never_asked_for_costs_no_seconds():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(a, is_asked=False)
    graph = draft.finish()
    check_simulation(graph, whole(graph))


ALL_WRITERS = pytest.mark.xfail(
    strict=True,
    reason="frontier takes all writers of a storage for one: what was read before "
    "a write costs the write, too, which neither simulate nor the engine runs",
)


@ALL_WRITERS
def test_what_was_read_before_a_write_in_place_does_not_cost_the_write():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[2])
    (b,) = draft.run(a, makes=[2])
    draft.run(writes=[a], seconds=5.0)
    draft.run(b, makes=[1])
    draft.save(b)
    graph = draft.finish()
    check_simulation(graph, whole(graph))


@ALL_WRITERS
def test_a_write_into_one_of_two_outputs_is_no_cost_of_the_other():
    draft = Draft()
    a, b = draft.run(draft.outside(), makes=[2, 2])
    draft.run(writes=[a], seconds=5.0)
    draft.run(b, makes=[1])
    draft.save(b)
    graph = draft.finish()
    check_simulation(graph, whole(graph))


# What the hull jumps over.


def keep_sets(sizes: list[int], seconds: list[float]) -> list[tuple[int, float]]:
    graph = chain_of(sizes, seconds)
    return [(k.kept_bytes, k.seconds) for k in Front(graph, whole(graph)).keep_sets()]


@pytest.mark.parametrize(("count", "step"), [(3, 1), (5, 1), (9, 1), (19, 2), (28, 3)])
def test_equal_storages_are_kept_one_after_another_in_at_most_nine_steps(count, step):
    # The last output is saved by nobody, so one storage less is worth keeping.
    found = keep_sets([2] * count, [1.0] * count)
    assert found[0][0] == 2 * (count - 1)
    assert found[-1] == (0, float(count - 1))
    assert all(size + 2 * seconds == 2 * (count - 1) for size, seconds in found)
    gaps = {a - b for (a, _), (b, _) in pairwise(found[1:])}
    assert gaps == {2 * step}
    assert len(found) <= 11


def test_the_latest_storages_are_kept_first():
    graph = chain_of([2] * 5, [1.0] * 5)
    found = Front(graph, whole(graph)).keep_sets()
    births = [sorted(graph.storages[s].birth for s in k.kept) for k in found]
    assert births == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3], []]


@pytest.mark.parametrize(("corners", "is_filled"), [(12, True), (13, False)])
def test_a_hull_of_up_to_twelve_corners_is_filled(corners, is_filled):
    # Each has its own price, but the first has the same one as its neighbour.
    sizes = [2, 2, *(3 + i for i in range(corners - 2)), 1]
    seconds = [1.0, 1.0, *(float((i + 3) ** 2) for i in range(corners - 2)), 1.0]
    graph = chain_of(sizes, seconds)
    front = Front(graph, whole(graph))
    assert len(front.hull()) == corners
    assert (len(front.keep_sets()) > corners) is is_filled


def test_what_a_keep_set_holds_in_any_case_is_not_counted():
    graph = chain_of([2, 3, 4], [1.0, 1.0, 1.0])
    always = frozenset(graph.born_at[1])
    front = Front(graph, whole(graph), always)
    assert front.bytes == {graph.born_at[0][0]: 2, graph.born_at[2][0]: 4}
    assert [(k.kept_bytes, k.seconds) for k in front.hull()] == [(2, 0.0), (0, 1.0)]
    assert front.inputs(graph.born_at[2][0]) == ()
    inputs = Front(graph, whole(graph)).inputs(graph.born_at[2][0])
    assert list(inputs) == graph.born_at[1]


def test_what_must_not_run_again_may_not_be_left_out():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4], must_keep=True)
    (b,) = draft.run(a, makes=[2])
    draft.save(a, b)
    graph = draft.finish()
    assert Front(graph, whole(graph)).droppable() == [draft.values[b].storage]


def test_a_storage_may_be_free_at_a_price():
    graph = chain_of([2, 3, 4], [1.0, 1.0, 1.0])
    front = Front(graph, whole(graph))
    (first,) = graph.born_at[0]

    def at_price(price: float, *free: int) -> KeepSet:
        costs = {s: price * size for s, size in front.bytes.items()}
        return front.cheapest(costs | dict.fromkeys(free, 0.0))

    assert at_price(0.4).kept_bytes == 2
    assert at_price(0.6).kept == frozenset()
    assert at_price(0.6, first).kept == {first}
    assert at_price(0.0).kept_bytes == 5


def test_a_keep_set_that_stands_out_by_rounding_alone_is_no_corner():
    # All have one price per byte, up to the last bits.
    sizes, price = [40, 13, 94, 10], 0.8988382879679935
    graph = chain_of([*sizes, 1], [*(size * price for size in sizes), 1.0])
    assert [size for size, _ in trades(graph, whole(graph))] == [157, 0]
