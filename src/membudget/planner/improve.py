"""Make plans better than the programmes could: simulation says what really fits.

The problem: a programme adds up bytes that are not there at once, so that its answer
may leave room. First, what runs again is tried one storage after the other, the most
seconds for a byte first: kept, it is simulated, and stays kept if the step fits and is
faster. Then `anneal` changes what is kept at random; it begins from the best plan, from
that without its stages, and from the nearest one that does not fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import StepGraph
from membudget.planner.anneal import annealed, is_too_large
from membudget.planner.answers import Chosen, simulated
from membudget.planner.regions import Region, made_in
from membudget.planner.simulate import Simulation, simulate

MOST_OPERATORS = 40_000
"""How many operators are simulated at most, over all that is tried to be kept."""

MOST_FILLED = 3
"""How many plans of a small step: one that is slower before may be faster after."""


def improved(
    graph: StepGraph, candidates: Sequence[Chosen], budget_bytes: int, quickly: bool
) -> list[Chosen]:
    """Return plans that fit, the best of the candidates made better among them.

    Args:
        graph: The step.
        candidates: Plans, which need not fit.
        budget_bytes: For what the step allocates.
        quickly: Whether to leave out what takes a second for each budget.
    """
    fitting = [c for c in candidates if c.simulation.peak_bytes <= budget_bytes]
    fastest = sorted(fitting, key=_seconds)
    better = [_filled(graph, c, budget_bytes) for c in fastest[:1]]
    if quickly or is_too_large(graph):
        return better
    better += [_filled(graph, c, budget_bytes) for c in fastest[1:MOST_FILLED]]
    starts = sorted(better, key=_seconds)[:1]
    starts += [_without_stages(graph, c) for c in starts if c.stages]
    over = [c for c in candidates if c.simulation.peak_bytes > budget_bytes]
    starts += sorted(over, key=lambda c: _seconds_and_over(c, budget_bytes))[:1]
    for start in starts:
        plan = annealed(graph, start.regions, start.simulation, budget_bytes)
        if plan is not None:
            found = replace(start, regions=tuple(plan[0]), simulation=plan[1])
            better.append(_filled(graph, found, budget_bytes))
    return better


def _filled(graph: StepGraph, chosen: Chosen, budget_bytes: int) -> Chosen:
    plan = filled(graph, chosen.regions, chosen.simulation, budget_bytes)
    return replace(chosen, regions=tuple(plan[0]), simulation=plan[1])


def _seconds(chosen: Chosen) -> float:
    return chosen.seconds


def _seconds_and_over(chosen: Chosen, budget_bytes: int) -> float:
    share = chosen.simulation.share_over(budget_bytes)
    return chosen.seconds + share * chosen.plain_seconds


def _without_stages(graph: StepGraph, chosen: Chosen) -> Chosen:
    regions = [replace(region, stages=()) for region in chosen.regions]
    return simulated(graph, chosen.calls, regions, chosen.own_s)


def filled(
    graph: StepGraph,
    regions: Sequence[Region],
    simulation: Simulation,
    budget_bytes: int,
) -> tuple[list[Region], Simulation]:
    """Return the regions with more kept, and what comes of them.

    Args:
        graph: The step.
        regions: Regions under which it fits.
        simulation: What comes of them.
        budget_bytes: For what the step allocates.
    """
    best, found = list(regions), simulation
    tries = MOST_OPERATORS // max(1, len(graph.operators))
    for place, storage in _worth(graph, best, found)[:tries]:
        region = best[place]
        candidate = [*best]
        candidate[place] = replace(region, kept=region.kept | {storage})
        more = simulate(graph, candidate)
        if more.peak_bytes <= budget_bytes and more.seconds < found.seconds:
            best, found = candidate, more
    return best, found


def _worth(
    graph: StepGraph, regions: Sequence[Region], found: Simulation
) -> list[tuple[int, int]]:
    """Return what may be kept, the most seconds for a byte first, by its region."""
    times = Counter(found.recomputed)
    worth = []
    for place, region in enumerate(regions):
        for storage in made_in(graph, region) - region.kept:
            facts = graph.storages[storage]
            seconds = times[facts.birth] * graph.operators[facts.birth].seconds
            if seconds and facts.bytes:
                worth.append((seconds / facts.bytes, place, storage))
    return [(place, storage) for _, place, storage in sorted(worth, reverse=True)]
