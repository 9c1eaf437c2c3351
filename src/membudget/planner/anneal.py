"""Change what is kept at random, and keep to what is better.

The problem: whether a storage is worth its bytes depends on what else is kept, and on
what is made again at the same time; the programmes add up as if it did not. Simulated
annealing (Kirkpatrick, Gelatt, Vecchi 1983) asks simulation instead: one or two
storages are kept or dropped at random; what is better stays, and what is worse stays
with a probability that goes to nought. Bytes over the budget have a price in seconds,
which rises while the plan is over and falls while it is not, so that the search stays
where plans begin to fit. The generator's seed is known: the answer is always the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import StepGraph
from membudget.planner.keep import problem
from membudget.planner.regions import Region
from membudget.planner.simulate import Simulation, simulate

MOST_OPERATORS = 50_000
"""How many operators are simulated, over all that is tried."""

FEWEST_TRIES = 100
"""With fewer, little would be found."""

TRIES_OF_EACH = 20
"""How many changes are tried at most, for each storage that may change."""

TEMPERATURE = 0.005
"""At first, as a share of the plain step's seconds."""

FIRST_PRICE = 0.5
"""Of bytes as many as the budget, as a share of the plain step's seconds."""

PRICES = (0.05, 50.0)
RATE = 1.03

Plan = tuple[list[Region], Simulation]


def is_too_large(graph: StepGraph) -> bool:
    """Tell whether a step is too large for enough to be tried in a second."""
    return FEWEST_TRIES * len(graph.operators) > MOST_OPERATORS


def annealed(
    graph: StepGraph,
    regions: Sequence[Region],
    simulation: Simulation,
    budget_bytes: int,
) -> Plan | None:
    """Return the fastest plan found that fits, and what comes of it; `None` for none.

    Args:
        graph: The step.
        regions: Where to begin; it need not fit.
        simulation: What comes of them.
        budget_bytes: For what the step allocates.
    """
    if is_too_large(graph) or not graph.seconds:
        return None
    free = [(i, s) for i, r in enumerate(regions) for s in _free(graph, r)]
    tries = min(MOST_OPERATORS // len(graph.operators), TRIES_OF_EACH * len(free))
    generator = random.Random(0)
    price = FIRST_PRICE
    plan: Plan = list(regions), simulation
    best = plan if simulation.peak_bytes <= budget_bytes else None
    for number in range(tries):
        temperature = TEMPERATURE * (1 - number / tries)
        changed = _changed(plan[0], free, generator)
        other = changed, simulate(graph, changed)
        worse = _cost(graph, other[1], budget_bytes, price)
        worse -= _cost(graph, plan[1], budget_bytes, price)
        if worse <= 0 or generator.random() < math.exp(-worse / temperature):
            plan = other
        is_over = plan[1].peak_bytes > budget_bytes
        if not is_over and (best is None or plan[1].seconds < best[1].seconds):
            best = plan
        price = price * RATE if is_over else price / RATE
        price = min(max(price, PRICES[0]), PRICES[1])
    return best


def _free(graph: StepGraph, region: Region) -> list[int]:
    """Return the storages of a region that may be kept or not."""
    cut = problem(graph, Region(region.start, region.end))
    return [storage for storage in cut.bytes if not cut.is_pinned(storage)]


def _changed(
    regions: Sequence[Region],
    free: Sequence[tuple[int, int]],
    generator: random.Random,
) -> list[Region]:
    changed = list(regions)
    for _ in range(generator.choice((1, 2))):
        place, storage = generator.choice(free)
        kept = changed[place].kept ^ {storage}
        changed[place] = replace(changed[place], kept=kept)
    return changed


def _cost(
    graph: StepGraph, found: Simulation, budget_bytes: int, price: float
) -> float:
    return found.seconds / graph.seconds + price * found.share_over(budget_bytes)
