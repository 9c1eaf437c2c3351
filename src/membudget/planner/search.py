"""Improve schedules by local search: the simulation says what really fits.

Solvers add up peaks that need not coincide, so their schedules may leave room, and they
value a storage as if nothing else were kept. Two searches ask the simulation instead:

* `fill` tries to keep what is recomputed, one storage after the other, the most seconds
  per byte first; a storage stays kept if the step then fits and is faster;
* `anneal` is simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983, "Optimization by
  simulated annealing"): one or two storages flip at random; an improvement stays, and a
  deterioration of d stays with probability exp(-d / temperature), which falls to zero.
  Bytes over the budget are priced in seconds. The price rises while the schedule is
  over the budget and falls while it is not, so the search stays where schedules begin
  to fit. The seed is fixed: the result is deterministic.

Annealing rather than an integer programme, because the programme takes a minute for a
hundred operators and is out of reach for a thousand; it saved at most 0.022 of a step
beside the annealed schedules. Only small steps are annealed: with 500
operators or more, too few schedules can be simulated per second to find better ones.

The best starts are improved, and then the best start of each kind of solver, with the
simulations that were saved: by pruning what cannot fit or saves no time, and by giving
up hopeless runs. So a further kind of solver rarely makes a schedule slower, and costs
no more simulations. On twelve profiles (`benchmarks/solvers.py`) no result is slower
than without pruning and giving up.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from membudget.graph import StepGraph
from membudget.planner.choice import Choice, made_in
from membudget.planner.frontier import Front
from membudget.planner.schedule import Schedule, Simulator

MOST_FILLED_OPERATORS = 40_000
"""How many operators the simulations of one `fill` run at most."""

MOST_ANNEALED_OPERATORS = 50_000
"""How many operators the simulations of one `anneal` run at most."""

MOST_FILLED = 3
"""How many schedules of a small step are filled: the second may be faster then."""

FEWEST_TRIES = 100
"""With fewer, annealing would find little."""

TRIES_OF_EACH = 20
"""How many flips are tried at most, for each storage that may be dropped."""

TEMPERATURE = 0.005
"""The first temperature, relative to the time of the plain step."""

FIRST_PRICE = 0.5
"""Of as many bytes as the budget, relative to the time of the plain step."""

HOPELESS = 1.02
"""A run that is so many times as slow as the best known at half time is given up; so
is one in which nothing fits after a quarter. In `benchmarks/solvers.py` none pays."""

PRICES = (0.05, 50.0)
RATE = 1.03

_seconds = attrgetter("seconds")


def improved(
    simulator: Simulator,
    kinds: Sequence[Sequence[Schedule]],
    budget_bytes: int,
    quickly: bool,
) -> list[Schedule]:
    """Return schedules that fit, at least as fast as the fastest start.

    Starts, by the kind of solver, need not fit. `quickly` fills the fastest alone, and
    anneals none.
    """
    fitting = [[s for s in of if s.peak_bytes <= budget_bytes] for of in kinds]
    fastest = sorted((s for of in fitting for s in of), key=_seconds)
    if quickly:
        return [fill(simulator, s, budget_bytes) for s in fastest[:1]]
    best_of_kinds = [min(of, key=_seconds) for of in fitting if of]
    is_large = is_too_large(simulator.graph)
    first = fastest[: 1 if is_large else MOST_FILLED]
    found = _filled(simulator, first, best_of_kinds, budget_bytes)
    over = (s for of in kinds for s in of if s.peak_bytes > budget_bytes)
    nearest = sorted(over, key=lambda s: _penalised(s, budget_bytes))[:1]
    return found if is_large else _annealed(simulator, found, nearest, budget_bytes)


def _filled(
    simulator: Simulator,
    first: Sequence[Schedule],
    others: Sequence[Schedule],
    budget_bytes: int,
) -> list[Schedule]:
    """Fill some schedules; others with the simulations that pruning saved."""
    each = len(simulator.graph.operators)
    most = sum(len(_by_worth(simulator.graph, schedule)) for schedule in first)
    limit = simulator.operators + min(most * each, len(first) * MOST_FILLED_OPERATORS)
    starts = _distinct([*first, *others])
    found = [fill(simulator, schedule, budget_bytes, limit) for schedule in starts]
    return sorted(found, key=_seconds)


def _annealed(
    simulator: Simulator,
    found: Sequence[Schedule],
    nearest: Sequence[Schedule],
    budget_bytes: int,
) -> list[Schedule]:
    """Anneal the best schedule, with and without stages, and the nearest to fit.

    Others follow with the simulations that hopeless runs saved.
    """
    flat = [
        simulator.changed(s, [replace(choice, stages=()) for choice in s.choices])
        for s in found
    ]
    first = _distinct([*found[:1], *flat[:1], *nearest])
    each = MOST_ANNEALED_OPERATORS
    limit = simulator.operators + len(first) * each
    results = list(found)
    for place, start in enumerate(_distinct([*first, *found[1:], *flat[1:]])):
        if place >= len(first) and simulator.operators + each > limit:
            break
        known_s = min((s.seconds for s in results), default=math.inf)
        annealed = anneal(simulator, start, budget_bytes, known_s)
        if annealed is not None:
            results.append(fill(simulator, annealed, budget_bytes))
    return results


def _distinct(schedules: Iterable[Schedule]) -> list[Schedule]:
    return list({schedule.choices: schedule for schedule in schedules}.values())


def _penalised(schedule: Schedule, budget_bytes: int) -> float:
    over = schedule.simulation.share_over(budget_bytes)
    return schedule.seconds + over * schedule.plain_s


def fill(
    simulator: Simulator, schedule: Schedule, budget_bytes: int, limit: float = math.inf
) -> Schedule:
    """Return a schedule that keeps more than one that fits, fits and is no slower.

    It stops at the limit of operators that the simulator ran in all.
    """
    graph = simulator.graph
    tries = MOST_FILLED_OPERATORS // max(1, len(graph.operators))
    for place, storage in _by_worth(graph, schedule)[:tries]:
        if simulator.operators >= limit:
            break
        if not _may_pay(graph, schedule, storage, budget_bytes):
            continue
        choices = [*schedule.choices]
        choices[place] = replace(choices[place], kept=choices[place].kept | {storage})
        fuller = simulator.changed(schedule, choices)
        if fuller.peak_bytes <= budget_bytes and fuller.seconds < schedule.seconds:
            schedule = fuller
    return schedule


def _may_pay(
    graph: StepGraph, schedule: Schedule, storage: int, budget_bytes: int
) -> bool:
    """Tell whether keeping a storage may save time, and may fit.

    It saves none if nothing recomputes it any more. It does not fit if it is dropped
    before the end of the forward and its bytes do not fit there.
    """
    facts, turn = graph.storages[storage], graph.backward_start - 1
    if facts.birth not in schedule.simulation.recomputed:
        return False
    is_live = (facts.death if facts.released is None else facts.released) > turn
    turn_bytes = schedule.simulation.alive_bytes[turn]
    return is_live or turn_bytes + facts.bytes <= budget_bytes


def _by_worth(graph: StepGraph, schedule: Schedule) -> list[tuple[int, int]]:
    """Return what is recomputed, the most seconds per byte first, by its choice."""
    times = Counter(schedule.simulation.recomputed)
    found = []
    for place, choice in enumerate(schedule.choices):
        for storage in made_in(graph, choice) - choice.kept:
            facts = graph.storages[storage]
            seconds = times[facts.birth] * graph.operators[facts.birth].seconds
            if seconds and facts.bytes:
                found.append((seconds / facts.bytes, place, storage))
    return [(place, storage) for _, place, storage in sorted(found, reverse=True)]


def is_too_large(graph: StepGraph) -> bool:
    """Tell whether too few schedules of a step can be simulated for annealing."""
    return FEWEST_TRIES * len(graph.operators) > MOST_ANNEALED_OPERATORS


def anneal(
    simulator: Simulator,
    start: Schedule,
    budget_bytes: int,
    known_s: float = math.inf,
) -> Schedule | None:
    """Return the fastest schedule found that fits; `None` if none does.

    The start need not fit; `known_s` is the time of the fastest that is known to.
    """
    graph = simulator.graph
    if is_too_large(graph) or not graph.seconds:
        return None
    fronts = [Front(graph, choice) for choice in start.choices]
    free = [(i, s) for i, front in enumerate(fronts) for s in front.droppable()]
    tries = MOST_ANNEALED_OPERATORS // len(graph.operators)
    tries = min(tries, TRIES_OF_EACH * len(free))
    generator = random.Random(0)
    price, schedule = FIRST_PRICE, start
    best = start if start.peak_bytes <= budget_bytes else None
    for number in range(tries):
        if number == tries // 4 and best is None:
            break
        if number == tries // 2 and (best is None or best.seconds > HOPELESS * known_s):
            break
        temperature = TEMPERATURE * (1 - number / tries)
        flipped = _flipped(schedule.choices, free, generator)
        other = simulator.changed(schedule, flipped)
        worse = _cost(other, budget_bytes, price) - _cost(schedule, budget_bytes, price)
        if worse <= 0 or generator.random() < math.exp(-worse / temperature):
            schedule = other
        is_over = schedule.peak_bytes > budget_bytes
        if not is_over and (best is None or schedule.seconds < best.seconds):
            best = schedule
        price = price * RATE if is_over else price / RATE
        price = min(max(price, PRICES[0]), PRICES[1])
    return best


def _flipped(
    choices: Sequence[Choice],
    free: Sequence[tuple[int, int]],
    generator: random.Random,
) -> list[Choice]:
    """Return the choices with one or two storages kept or dropped."""
    flipped = list(choices)
    for _ in range(generator.choice((1, 2))):
        place, storage = generator.choice(free)
        kept = flipped[place].kept ^ {storage}
        flipped[place] = replace(flipped[place], kept=kept)
    return flipped


def _cost(schedule: Schedule, budget_bytes: int, price: float) -> float:
    over = schedule.simulation.share_over(budget_bytes)
    return schedule.simulation.seconds / schedule.plain_s + price * over
