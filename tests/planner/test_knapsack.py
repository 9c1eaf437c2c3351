"""The programme over held bytes against every combination of options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st

from membudget.planner.block_costs import ChoiceCost
from membudget.planner.knapsack import QUANTA, cheapest_choices

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
