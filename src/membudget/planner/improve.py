"""Keep more, as long as it fits.

The problem: a programme adds up bytes that are not there at once, so that its answer
may leave room. What runs again is tried one storage after the other, the most seconds
for a byte first: kept, it is simulated, and stays kept if the step fits and is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import StepGraph
from membudget.planner.regions import Region, made_in
from membudget.planner.simulate import Simulation, simulate

MOST_OPERATORS = 40_000
"""How many operators are simulated at most, over all that is tried."""


def improved(
    graph: StepGraph, regions: Sequence[Region], budget_bytes: int
) -> tuple[list[Region], Simulation]:
    """Return the regions with more kept, and what comes of them.

    Args:
        graph: The step.
        regions: Regions under which it fits.
        budget_bytes: For what the step allocates.
    """
    best, found = list(regions), simulate(graph, regions)
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
