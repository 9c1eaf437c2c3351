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
beside the annealed schedules. Only small steps are annealed: of 500 operators and more
too few schedules can be simulated in a second to find anything.

The best start of each solver is filled, and the fastest result counts; so another
solver never makes a plan slower.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import StepGraph
from membudget.planner.choice import Block, Choice, made_in
from membudget.planner.frontier import Front
from membudget.planner.schedule import Schedule, Simulator

MOST_FILLED_OPERATORS = 40_000
"""How many operators the simulations of one `fill` run at most."""

MOST_ANNEALED_OPERATORS = 50_000
"""How many operators the simulations of one `anneal` run at most."""

FEWEST_TRIES = 100
"""With fewer, annealing would find little."""

TRIES_OF_EACH = 20
"""How many flips are tried at most, for each storage that may be dropped."""

TEMPERATURE = 0.005
"""The first temperature, relative to the time of the plain step."""

FIRST_PRICE = 0.5
"""Of as many bytes as the budget, relative to the time of the plain step."""

PRICES = (0.05, 50.0)
RATE = 1.03


def improved(
    simulator: Simulator,
    candidates: Sequence[Schedule],
    budget_bytes: int,
    quickly: bool,
) -> list[Schedule]:
    """Return schedules that fit, at least as fast as the fastest candidate.

    Args:
        simulator: The simulator of the step.
        candidates: Schedules; they need not fit.
        budget_bytes: The budget of what the step allocates.
        quickly: Whether to leave out annealing and fill the best candidate alone.
    """
    fitting = [c for c in candidates if c.peak_bytes <= budget_bytes]
    fastest = sorted(fitting, key=_seconds)
    better = [fill(simulator, c, budget_bytes) for c in fastest[:1]]
    if quickly or is_too_large(simulator.graph):
        return better
    better += [fill(simulator, c, budget_bytes) for c in fastest[1:3]]
    starts = sorted(better, key=_seconds)[:1]
    starts += [
        _without_stages(simulator, c)
        for c in starts
        if any(x.stages for x in c.choices)
    ]
    over = [c for c in candidates if c.peak_bytes > budget_bytes]
    starts += sorted(over, key=lambda c: _penalised(c, budget_bytes))[:1]
    for start in starts:
        plan = anneal(simulator, start, budget_bytes)
        if plan is not None:
            better.append(fill(simulator, plan, budget_bytes))
    return better


def _seconds(schedule: Schedule) -> float:
    return schedule.seconds


def _penalised(schedule: Schedule, budget_bytes: int) -> float:
    over = schedule.simulation.share_over(budget_bytes)
    return schedule.seconds + over * schedule.plain_s


def _without_stages(simulator: Simulator, schedule: Schedule) -> Schedule:
    choices = [replace(choice, stages=()) for choice in schedule.choices]
    return simulator.changed(schedule, choices)


def fill(simulator: Simulator, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Return a schedule that keeps more, fits and is no slower.

    Args:
        simulator: The simulator of the step.
        schedule: A schedule that fits.
        budget_bytes: The budget of what the step allocates.
    """
    tries = MOST_FILLED_OPERATORS // max(1, len(simulator.graph.operators))
    for place, storage in _by_worth(simulator.graph, schedule)[:tries]:
        choices = [*schedule.choices]
        choices[place] = replace(choices[place], kept=choices[place].kept | {storage})
        fuller = simulator.changed(schedule, choices)
        if fuller.peak_bytes <= budget_bytes and fuller.seconds < schedule.seconds:
            schedule = fuller
    return schedule


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


def anneal(simulator: Simulator, start: Schedule, budget_bytes: int) -> Schedule | None:
    """Return the fastest schedule found that fits; `None` if none does.

    Args:
        simulator: The simulator of the step.
        start: Where to begin; it need not fit.
        budget_bytes: The budget of what the step allocates.
    """
    graph = simulator.graph
    if is_too_large(graph) or not graph.seconds:
        return None
    free = [(i, s) for i, c in enumerate(start.choices) for s in _droppable(graph, c)]
    tries = MOST_ANNEALED_OPERATORS // len(graph.operators)
    tries = min(tries, TRIES_OF_EACH * len(free))
    generator = random.Random(0)
    price, schedule = FIRST_PRICE, start
    best = start if start.peak_bytes <= budget_bytes else None
    for number in range(tries):
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


def _droppable(graph: StepGraph, block: Block) -> list[int]:
    front = Front(graph, block)
    return [storage for storage in front.bytes if front.may_drop(storage)]


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
