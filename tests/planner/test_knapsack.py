"""The programme over held bytes against every combination of options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from membudget.graph import ModuleCall
from membudget.planner import knapsack
from membudget.planner.block_costs import ChoiceCost
from membudget.planner.choice import RERUN
from membudget.planner.knapsack import (
    QUANTA,
    Quantum,
    _distinct_cuts,
    best_quantum,
    by_block,
    cheapest_choices,
    relax,
)
from membudget.planner.overheads import Overheads
from membudget.planner.schedule import Simulator
from membudget.planner.solver import Solver
from tests.planner.drafts import chain_of

Regions = list[list[ChoiceCost]]


def seconds_of(regions: Regions, picked: Sequence[int]) -> float:
    return sum(of[i].seconds for of, i in zip(regions, picked, strict=True))


def fits(regions: Regions, picked: Sequence[int], budget: int, grain: int = 1) -> bool:
    """Return whether every moment fits, held bytes rounded up to a grain."""
    held = 0
    for options, index in zip(regions, picked, strict=True):
        option = options[index]
        if held * grain + option.peak_bytes > budget:
            return False
        held += math.ceil(option.retained_bytes / grain)
        if held * grain > budget:
            return False
    return True


def best_of_all(regions: Regions, budget: int) -> float:
    grain = max(1, math.ceil(budget / QUANTA))
    combinations = product(*(range(len(of)) for of in regions))
    fitting = [p for p in combinations if fits(regions, p, budget, grain)]
    return min((seconds_of(regions, p) for p in fitting), default=math.inf)


def problems(most_bytes: int) -> st.SearchStrategy[tuple[Regions, int]]:
    size = st.integers(0, most_bytes)
    seconds = st.integers(0, 20).map(float)
    option = st.builds(ChoiceCost, size, size, seconds)
    regions = st.lists(st.lists(option, min_size=1, max_size=4), max_size=4)
    return st.tuples(regions, st.integers(-1, 3 * most_bytes))


def check(regions: Regions, budget: int) -> None:
    picked = cheapest_choices(regions, budget)
    best = best_of_all(regions, budget) if budget > 0 else math.inf
    if picked is None:
        assert best == math.inf
        return
    assert len(picked) == len(regions)
    assert fits(regions, picked, budget)
    assert seconds_of(regions, picked) == best


@settings(max_examples=100, deadline=None)
@given(problems(20))
@example(([], 0))
@example(([], 1))
@example(([[ChoiceCost(5, 5, 0.0)]], 5))
def test_the_answer_is_the_fastest_of_all_combinations(problem):
    check(*problem)


@settings(max_examples=60, deadline=None)
@given(problems(50_000))
@example(([[ChoiceCost(4096, 4096, 0.0)], [ChoiceCost(1, 1, 0.0)]], 4097))
def test_the_answer_is_the_fastest_with_retained_bytes_rounded_up_to_a_grain(problem):
    check(*problem)


@settings(max_examples=60, deadline=None)
@given(problems(1 << 40))
def test_the_answer_fits_without_rounding(problem):
    regions, budget = problem
    picked = cheapest_choices(regions, budget)
    assert picked is None or fits(regions, picked, budget)


@settings(max_examples=40, deadline=None)
@given(problems(4000), st.integers(1, 4000))
def test_more_room_is_never_slower_where_nothing_is_rounded(problem, more):
    regions, _ = problem
    less = cheapest_choices(regions, 4096 - more)
    most = cheapest_choices(regions, 4096)
    if less is not None:
        assert most is not None
        assert seconds_of(regions, most) <= seconds_of(regions, less)


def test_an_option_whose_seconds_are_no_number_is_never_chosen():
    nan = ChoiceCost(0, 0, math.nan)
    assert cheapest_choices([[nan, ChoiceCost(0, 0, 5.0)]], 10) == [1]
    assert cheapest_choices([[nan]], 10) is None


def test_what_is_held_counts_in_the_peak_of_every_later_region():
    held, small = ChoiceCost(6, 6, 0.0), ChoiceCost(1, 6, 3.0)
    later = [ChoiceCost(0, 5, 0.0)]
    assert cheapest_choices([[held, small], later], 10) == [1, 0]
    assert cheapest_choices([[held, small], later], 11) == [0, 0]


@pytest.mark.parametrize(
    ("sizes", "finest", "coarsest", "quantum"),
    [
        ([], 10, 60, 10),
        ([7], 10, 60, 10),
        # The finest that divides all, ...
        ([100, 200, 300], 10, 60, 10),
        ([78, 156], 10, 60, 39),
        ([78, 156], 10, 80, 78),
        # ... or that rounds least in all.
        ([100, 50, 99], 30, 60, 50),
        ([100, 50, 51], 30, 60, 51),
        ([12, 24, 36], 12, 12, 12),
    ],
)
def test_the_best_quantum_rounds_least(sizes, finest, coarsest, quantum):
    assert best_quantum(sizes, finest, coarsest) == Quantum(quantum)


def test_a_size_in_quanta_is_rounded_up_and_room_down():
    quantum = Quantum(10)
    assert [quantum.need(size) for size in (0, 1, 10, 11)] == [0, 1, 1, 2]
    assert [quantum.room(left) for left in (-1, 0, 9, 10)] == [-1, 0, 0, 1]


def test_a_row_is_relaxed_where_the_choice_is_faster():
    before = np.array([0.0, 1.0, 2.0, 3.0])
    after, by = np.array([9.0, 9.0, 2.5, 2.0]), np.full(4, -1)
    relax(before, after, by, 1, 1, 1.0, 7)
    assert list(after) == [9.0, 1.0, 2.0, 2.0]
    assert list(by) == [-1, 7, 7, -1]
    # What is equally fast stays, and nothing lies beyond the row.
    relax(before, after, by, 1, 9, 0.0, 8)
    assert list(after) == [9.0, 0.0, 1.0, 2.0]
    assert list(by) == [-1, 8, 8, -1]
    for need, room in [(4, 9), (0, -1)]:
        relax(before, after, by, need, room, -5.0, 9)
    assert list(by) == [-1, 8, 8, -1]


def test_the_seconds_of_a_choice_may_depend_on_what_is_held_before():
    after, by = np.full(3, 9.0), np.full(3, -1)
    relax(np.zeros(3), after, by, 1, 1, np.array([3.0, 4.0, 5.0]), 7)
    assert list(after) == [9.0, 3.0, 4.0]
    assert list(by) == [-1, 7, 7]


def by_block_of(calls: list[tuple[str, int, int]]) -> list[Solver]:
    sizes, seconds = [4, 4, 4, 4], [1.0, 2.0, 3.0, 4.0]
    graph = replace(
        chain_of(sizes, seconds), calls=tuple(ModuleCall(*call) for call in calls)
    )
    return by_block(
        Simulator(graph, Overheads(record_s=0.5, record_cold_s=0.5, again_s=0.5))
    )


def test_each_way_to_cut_the_forward_is_solved_with_replays_and_without():
    whole, halves = ("", 0, 4), [("a", 0, 2), ("b", 2, 4)]
    assert len(by_block_of([whole])) == 2
    assert len(by_block_of([whole, *halves])) == 4
    assert by_block_of([]) == []


def test_the_forward_is_cut_by_five_shares_of_what_is_saved():
    def halves(path: str, start: int, end: int) -> list[ModuleCall]:
        middle, call = (start + end) // 2, ModuleCall(path, start, end)
        if end - start == 1:
            return [call]
        below = f"{path}." if path else ""
        first, second = ((start, middle), (middle, end))
        return [call, *halves(f"{below}0", *first), *halves(f"{below}1", *second)]

    # The last output is saved by nobody.
    graph = chain_of([4] * 65, [1.0] * 65)
    cuts = _distinct_cuts(replace(graph, calls=tuple(halves("", 0, 64))))
    # Of halves, a quarter is the largest within a quarter, 1/16 within 1/10.
    assert [len(cut) for cut in cuts] == [1, 2, 4, 16, 32]


def test_a_block_that_recomputes_nothing_is_no_region():
    solver, _ = by_block_of([("a", 0, 2), ("b", 2, 4)])
    plain = solver.schedule([0, 0])
    assert (plain.calls, plain.choices, plain.overhead_s) == ((), (), 0.0)
    some = solver.schedule([0, 1])
    assert [call.path for call in some.calls] == ["b"]
    assert [(c.start, c.end) for c in some.choices] == [(2, 4)]
    # Two operators are recorded, and what runs again is paid for in the simulation.
    assert some.overhead_s == 1.0


def test_the_second_solver_of_a_cut_reruns_blocks_or_leaves_them_alone():
    _, solver = by_block_of([("a", 0, 2), ("b", 2, 4)])
    both = solver.schedule([1, 1])
    assert {choice.engine for choice in both.choices} == {RERUN}
    assert both.simulation.replayed == ()
    assert solver.schedule([0, 0]).choices == ()
    plain_bytes = solver.schedule([0, 0]).peak_bytes
    assert solver.solve(plain_bytes) == [0, 0]
    assert solver.solve(both.peak_bytes) in ([0, 1], [1, 0], [1, 1], None)


def test_a_solver_that_finds_nothing_proposes_what_is_smallest():
    _, solver = by_block_of([("a", 0, 2), ("b", 2, 4)])
    (found,) = solver.schedules(1)
    assert found == solver.schedule(solver.smallest())


def test_the_smallest_choice_of_every_block_is_known():
    solver, _ = by_block_of([("a", 0, 2), ("b", 2, 4)])
    smallest = solver.schedule(solver.smallest())
    # What the second block saves is unpacked as soon as its backward begins.
    assert [call.path for call in smallest.calls] == ["a"]
    assert smallest.choices[0].kept == frozenset()


def test_large_blocks_are_left_out_where_there_are_smaller_ones(monkeypatch):
    assert knapsack.MOST_OPERATORS == 3000
    monkeypatch.setattr(knapsack, "MOST_OPERATORS", 12)
    graph = chain_of([1] * 13, [1.0] * 13)
    calls = (ModuleCall("", 0, 13), ModuleCall("a", 0, 1), ModuleCall("b", 1, 13))
    cuts = _distinct_cuts(replace(graph, calls=calls))
    assert [[c.path for c in cut] for cut in cuts] == [["a", "b"]]
    # The finest cut is the last resort.
    cuts = _distinct_cuts(replace(graph, calls=calls[:1]))
    assert [[c.path for c in cut] for cut in cuts] == [[""]]
