"""Which schedules local search starts from, in which order, and when it gives up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from membudget.graph import StepGraph
from membudget.planner import annealing, search
from membudget.planner.annealing import anneal, is_too_large
from membudget.planner.choice import Choice, Stage
from membudget.planner.overheads import Overheads
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.search import fill, improved
from tests.planner.drafts import Draft, chain_of

SIZES, SECONDS = [3, 1, 4, 1, 5, 9, 2, 6], [2.0, 7, 1, 8, 2, 8, 1, 8]
GRAPH = chain_of(SIZES, SECONDS)
MADE = [s for i in range(8) for s in GRAPH.born_at[i]]


def schedules(*kept: Sequence[int]) -> list[Schedule]:
    """Return schedules of one region, which keeps what some operators make."""
    simulator = Simulator(GRAPH)
    return [
        simulator.schedule((), [Choice(0, 8, frozenset(MADE[i] for i in of))])
        for of in kept
    ]


class Started:
    """Notes from which schedules `fill` and `anneal` start, and changes none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.filled: list[Schedule] = []
        self.annealed: list[Schedule] = []
        self.limits: list[float] = []
        self.known: list[float] = []
        self.far: list[bool] = []
        self.runs = 0
        monkeypatch.setattr(search, "fill", self.fill)
        monkeypatch.setattr(search, "anneal", self.anneal)

    def fill(
        self, simulator: Any, schedule: Schedule, budget: int, limit: float = math.inf
    ) -> Schedule:
        self.filled.append(schedule)
        self.limits.append(limit)
        return schedule

    def anneal(
        self,
        simulator: Simulator,
        start: Schedule,
        budget: int,
        known_s: float,
        is_far: bool,
    ) -> None:
        simulator.operators += self.runs
        self.annealed.append(start)
        self.known.append(known_s)
        self.far.append(is_far)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


ALL = schedules([], [1], [1, 3], [1, 3, 5], [1, 3, 5, 7], range(8))


def by_seconds(found: Sequence[Schedule]) -> list[Schedule]:
    return sorted(found, key=lambda s: s.seconds)


def test_in_a_hurry_only_the_fastest_that_fits_is_filled(started):
    budget = ALL[2].peak_bytes
    fitting = by_seconds([s for s in ALL if s.peak_bytes <= budget])
    assert improved(Simulator(GRAPH), [ALL[:3], ALL[3:]], budget, True) == fitting[:1]
    assert started.filled == fitting[:1]
    assert started.annealed == []
    assert improved(Simulator(GRAPH), [ALL], 1, True) == []


def test_the_three_fastest_are_filled_and_the_best_of_each_kind(started):
    budget = max(s.peak_bytes for s in ALL)
    fastest = by_seconds(ALL)
    kinds = [fastest[:3], [fastest[5], fastest[4]], []]
    found = improved(Simulator(GRAPH), kinds, budget, False)
    assert started.filled == [*fastest[:3], fastest[4]]
    # What was not improved comes last.
    assert found == [*fastest[:3], fastest[4], fastest[5]]
    # As many operators as filling the first three would run.
    again = sum(len(search._by_worth(GRAPH, s)) for s in fastest[:3])
    assert started.limits == [again * len(GRAPH.operators)] * 4
    # Annealing the first used up nothing, so that the others are, too.
    assert started.annealed == found[:4]
    assert started.far == [False, True, True, True]
    assert started.known == [fastest[0].seconds] * 4


@pytest.mark.parametrize(("spared", "annealed"), [(0, 1), (34_999, 1), (35_000, 3)])
def test_further_schedules_are_annealed_with_what_a_run_has_spared(
    started, spared, annealed
):
    started.runs = annealing.MOST_ANNEALED_OPERATORS - spared
    improved(Simulator(GRAPH), [ALL], max(s.peak_bytes for s in ALL), False)
    assert len(started.annealed) == annealed


def test_the_limit_of_filling_is_that_of_so_many_schedules(started, monkeypatch):
    monkeypatch.setattr(search, "MOST_FILLED_OPERATORS", 10)
    improved(Simulator(GRAPH), [ALL[:2]], ALL[0].peak_bytes + 99, False)
    assert started.limits == [20, 20]


def test_the_nearest_of_those_that_do_not_fit_is_annealed(started):
    budget = min(s.peak_bytes for s in ALL) - 1
    assert improved(Simulator(GRAPH), [ALL[:1], ALL[1:]], budget, False) == []

    def penalised(schedule: Schedule) -> float:
        over = (schedule.peak_bytes - budget) / budget
        return schedule.seconds + over * schedule.plain_s

    assert started.filled == []
    assert started.annealed == [min(ALL, key=penalised)]
    assert started.known == [math.inf]


def test_a_large_step_is_filled_once_for_each_kind_and_not_annealed(
    started, monkeypatch
):
    monkeypatch.setattr(search, "is_too_large", lambda graph: True)
    fastest = by_seconds(ALL)
    budget = max(s.peak_bytes for s in ALL)
    found = improved(Simulator(GRAPH), [fastest[:3], fastest[3:]], budget, False)
    assert started.filled == found[:2] == [fastest[0], fastest[3]]
    assert started.annealed == []


def chain(operators: int) -> StepGraph:
    """Return a step of so many operators, of both passes."""
    return replace(GRAPH, operators=GRAPH.operators[:1] * operators)


def test_steps_of_more_than_500_operators_are_too_large():
    assert not is_too_large(chain(500))
    assert is_too_large(chain(501))


def test_filling_stops_at_a_number_of_operators():
    whole = [Choice(0, 8)]
    budget = ALL[-1].peak_bytes
    for limit, candidates in [(0, 1), (1, 1), (17, 1), (50, 3)]:
        simulator = Simulator(GRAPH)
        start = simulator.schedule((), whole)
        fill(simulator, start, budget, limit)
        # The first simulation ran 16 operators and 7 again.
        assert (simulator.candidates, limit <= 23) == (candidates, candidates == 1)


def test_filling_tries_as_many_as_its_operators_allow(monkeypatch):
    for most, tries in [(15, 0), (16, 1), (48, 3)]:
        monkeypatch.setattr(search, "MOST_FILLED_OPERATORS", most)
        simulator = Simulator(GRAPH)
        fill(simulator, simulator.schedule((), [Choice(0, 8)]), 10**6)
        assert simulator.candidates == 1 + tries
    monkeypatch.undo()
    assert (search.MOST_FILLED_OPERATORS, annealing.MOST_ANNEALED_OPERATORS) == (
        40_000,
        35_000,
    )


def test_what_saves_most_seconds_per_byte_is_tried_first():
    (start,) = schedules([])
    worth = search._by_worth(GRAPH, start)
    # The last output is saved by nobody, so it does not run again.
    order = sorted(range(7), key=lambda i: -SECONDS[i] / SIZES[i])
    assert [storage for _, storage in worth] == [MADE[i] for i in order]
    two = Simulator(GRAPH).schedule((), [Choice(0, 4), Choice(4, 8)])
    assert {place for place, _ in search._by_worth(GRAPH, two)} == {0, 1}


def test_nothing_is_kept_that_does_not_fit_at_the_end_of_the_forward():
    (start,) = schedules([])
    live = start.simulation.alive_bytes[7]
    assert search._may_pay(GRAPH, start, MADE[1], live + SIZES[1])
    assert not search._may_pay(GRAPH, start, MADE[1], live + SIZES[1] - 1)
    (kept,) = schedules([1])
    assert not search._may_pay(GRAPH, kept, MADE[1], 10**6)


def test_what_is_live_then_anyway_may_pay_at_any_budget():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    (b,) = draft.run(a, makes=[2])
    draft.save(a, b)
    graph = draft.finish()
    storage = graph.storages[1]
    assert storage.released == graph.backward_start
    start = Simulator(graph).schedule((), [Choice(0, 2)])
    assert search._may_pay(graph, start, 1, 0)


def flips(
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    known_s: float = math.inf,
    is_far: bool = False,
) -> int:
    """Return how many flips annealing tries, none of which changes anything."""
    tried = []

    def same(choices: Any, free: Any, *others: Any) -> Any:
        tried.append(free)
        return list(choices)

    monkeypatch.setattr(annealing, "_flipped", same)
    (start,) = schedules([1, 3])
    anneal(Simulator(GRAPH), start, budget, known_s, is_far)
    return len(tried)


def test_annealing_gives_up_what_is_hopeless(monkeypatch):
    (start,) = schedules([1, 3])
    fits, tries = start.peak_bytes, 20 * 8  # Twenty for each droppable storage.
    assert flips(monkeypatch, fits) == tries
    assert flips(monkeypatch, fits - 1) == tries // 4
    assert flips(monkeypatch, fits, start.seconds / 1.021) == tries // 2
    assert flips(monkeypatch, fits, start.seconds / 1.019) == tries
    monkeypatch.setattr(annealing, "MOST_ANNEALED_OPERATORS", 16 * 100 + 15)
    assert flips(monkeypatch, fits) == 100


def test_annealing_has_twice_the_tries_where_it_starts_far_from_the_best(monkeypatch):
    (start,) = schedules([1, 3])
    fits, tries = start.peak_bytes, 20 * 8
    assert flips(monkeypatch, fits, is_far=True) == 2 * tries
    assert flips(monkeypatch, fits - 1, is_far=True) == 2 * tries // 4
    monkeypatch.setattr(annealing, "MOST_ANNEALED_OPERATORS", 16 * 100)
    assert flips(monkeypatch, fits, is_far=True) == 200


def test_one_or_two_storages_are_flipped_at_a_time():
    choices = [Choice(0, 4, frozenset({1})), Choice(4, 8)]
    free = [(0, 1), (0, 2), (1, 5), (1, 6), (1, 7)]
    generator = random.Random(3)
    counts = []
    for _ in range(40):
        found = annealing._flipped(choices, free, (), generator)
        changed = [a.kept ^ b.kept for a, b in zip(choices, found, strict=True)]
        assert all((i, s) in free for i, of in enumerate(changed) for s in of)
        counts.append(sum(map(len, changed)))
    # Twice the same is none.
    assert {*counts} == {0, 1, 2}
    assert choices[0].kept == {1}


def test_the_cost_of_a_schedule_is_its_time_and_the_price_of_what_it_is_over():
    (start,) = schedules([])
    slowdown, peak = start.simulation.seconds / start.plain_s, start.peak_bytes
    assert annealing._cost(start, peak, 3.0) == slowdown
    assert annealing._cost(start, peak // 2, 3.0) == slowdown + 3.0 * (
        (peak - peak // 2) / (peak // 2)
    )


def test_stages_are_given_up_only_where_that_helps(started):
    simulator = Simulator(GRAPH, Overheads())
    staged = simulator.schedule((), [Choice(0, 8, stages=(Stage(0), Stage(4)))])
    improved(simulator, [[staged]], staged.peak_bytes, False)
    assert started.annealed[0] == staged
    assert started.annealed[1].choices == (Choice(0, 8),)


class Costs:
    """Lets every flip cost so much more, and notes the prices that it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worse: float) -> None:
        self.prices: list[float] = []
        self.exponents: list[float] = []
        self.total, self.worse = 0.0, worse
        monkeypatch.setattr(annealing, "_cost", self.cost)
        functions = SimpleNamespace(inf=math.inf, exp=self.exp)
        monkeypatch.setattr(annealing, "math", functions)

    def cost(self, schedule: Schedule, budget: int, price: float) -> float:
        self.prices.append(price)
        # The flipped schedule is asked for first.
        return self.worse if len(self.prices) % 2 else 0.0

    def exp(self, exponent: float) -> float:
        self.exponents.append(exponent)
        return 0.0


def test_the_temperature_falls_from_half_a_hundredth_to_zero(monkeypatch):
    (start,) = schedules([1, 3])
    costs = Costs(monkeypatch, 1e-3)
    anneal(Simulator(GRAPH), start, start.peak_bytes)
    tries = 20 * 8
    assert costs.exponents == [
        pytest.approx(-1e-3 / (0.005 * (1 - n / tries))) for n in range(tries)
    ]


def test_what_is_no_worse_is_accepted(monkeypatch):
    (start,) = schedules([1, 3])
    costs = Costs(monkeypatch, 0.0)
    anneal(Simulator(GRAPH), start, start.peak_bytes)
    assert costs.exponents == []


def test_the_price_falls_while_a_schedule_fits_and_rises_while_it_does_not(
    monkeypatch,
):
    (start,) = schedules([1, 3])
    costs = Costs(monkeypatch, 1.0)
    anneal(Simulator(GRAPH), start, start.peak_bytes)
    expected = [max(0.5 / 1.03**n, 0.05) for n in range(160)]
    assert costs.prices[::2] == costs.prices[1::2] == pytest.approx(expected)

    over = Costs(monkeypatch, 1.0)
    monkeypatch.setattr(annealing, "TRIES_OF_EACH", 80)
    anneal(Simulator(GRAPH), start, start.peak_bytes - 1)
    # Given up after a quarter of the tries.
    expected = [min(0.5 * 1.03**n, 50.0) for n in range(160)]
    assert over.prices[::2] == pytest.approx(expected)
    assert over.prices[-1] == 50.0
