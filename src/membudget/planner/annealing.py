"""Improve a schedule by simulated annealing.

Simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983, "Optimization by simulated
annealing") changes one or two random storages between kept, dropped and moved to the
host, accepts every improvement, and accepts a deterioration d with probability exp(-d /
temperature) while the temperature falls to zero. Bytes over the budget are penalised at
a price that rises while the schedule exceeds the budget and falls while it fits, so the
search stays near the limit of what fits. A fixed seed makes the result deterministic.

Annealing replaced an integer programme, which took a minute for a hundred operators,
was out of reach for a thousand, and gave steps at most 2.2 % faster than annealing.
Only steps of up to 500 operators are annealed: for larger steps, too few schedules can
be simulated per second to find a better one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Sequence
from dataclasses import replace

from membudget.graph import StepGraph
from membudget.planner.choice import RERUN, Choice, is_movable
from membudget.planner.frontier import Front
from membudget.planner.schedule import Schedule, Simulator

MOST_ANNEALED_OPERATORS = 35_000
"""Maximum number of operators that the simulations of one `anneal` run."""

FEWEST_TRIES = 70
"""With fewer simulations, annealing would find little."""

TRIES_OF_EACH = 20
"""Maximum number of flips tried, for each storage that may be dropped."""

MORE_TRIES = 2
"""Factor by which a run has more of both if others started from better schedules.

The best schedule is near an optimum: twice the tries from there found nothing, and from
the others a schedule of DLRM that is 0.11 of a step faster. Most of their runs are
given up early.
"""

TEMPERATURE = 0.005
"""The first temperature, relative to the time of the plain step."""

FIRST_PRICE = 0.5
"""First price of as many bytes as the budget, relative to the plain step's time."""

HOPELESS = 1.02
"""A run is given up if it is slower than the best by this factor at half time, or if
nothing fits after a quarter. No such run pays off in `benchmarks/solvers.py`."""

PRICES = (0.05, 50.0)  # Limits of the price.
RATE = 1.03  # By which each flip changes the price.


def is_too_large(graph: StepGraph) -> bool:
    """Return whether a step has too many operators for annealing to pay off."""
    return FEWEST_TRIES * len(graph.operators) > MOST_ANNEALED_OPERATORS


def anneal(
    simulator: Simulator,
    start: Schedule,
    budget_bytes: int,
    known_s: float = math.inf,
    is_far: bool = False,
) -> Schedule | None:
    """Return the fastest fitting schedule that annealing finds; `None` if none fits.

    `start` may exceed the budget; `known_s` is the time of the best schedule that fits.
    The run has more tries if `start` is far from that (`is_far`).
    """
    graph = simulator.graph
    if is_too_large(graph) or not graph.seconds:
        return None
    free = [
        (place, storage)
        for place, choice in enumerate(start.choices)
        if choice.engine != RERUN
        for storage in Front(graph, choice).droppable()
    ]
    if not free:
        return None
    movable = {
        (place, storage)
        for place, storage in free
        if simulator.host is not None
        and is_movable(graph, start.choices[place], storage)
    }
    tries = MOST_ANNEALED_OPERATORS // len(graph.operators)
    tries = min(tries, TRIES_OF_EACH * len(free)) * (MORE_TRIES if is_far else 1)
    generator = random.Random(0)
    price, schedule = FIRST_PRICE, start
    best = start if start.peak_bytes <= budget_bytes else None
    for number in range(tries):
        if number == tries // 4 and best is None:
            break
        if number == tries // 2 and (best is None or best.seconds > HOPELESS * known_s):
            break
        temperature = TEMPERATURE * (1 - number / tries)
        flipped = _flipped(schedule.choices, free, movable, generator)
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
    movable: Container[tuple[int, int]],
    generator: random.Random,
) -> list[Choice]:
    """Return the choices with one or two random storages kept, dropped or moved."""
    flipped = list(choices)
    for _ in range(generator.choice((1, 2))):
        place, storage = generator.choice(free)
        before = flipped[place]
        kept, moved = before.kept | {storage}, before.offloaded | {storage}
        options = [
            replace(before, kept=kept - {storage}, offloaded=moved - {storage}),
            replace(before, kept=kept, offloaded=moved - {storage}),
        ]
        if (place, storage) in movable:
            options.append(replace(before, kept=kept, offloaded=moved))
        options.remove(before)
        flipped[place] = options[0] if len(options) == 1 else generator.choice(options)
    return flipped


def _cost(schedule: Schedule, budget_bytes: int, price: float) -> float:
    over = schedule.simulation.share_over(budget_bytes)
    return schedule.simulation.seconds / schedule.plain_s + price * over
