"""Which outputs to keep, by minimum cuts under a price for each moment.

The problem: memory is short at some moments only, and what is kept takes its bytes only
while it would be gone otherwise: from its last use in the forward to the first need of
the backward. So a byte has a price at each moment (Lagrange multipliers, Everett 1963),
which rises while the simulated step takes more than the budget there, and falls while
it takes less. At given prices the cheapest choice is a minimum cut (`keep`).

Like layers have like prices, and would all change at once. In later rounds the prices
of storages differ a little at random, by a generator with a known seed.

No price is for the memory that making again takes. A choice that makes much at once may
not fit, however little it keeps; it is a start for `anneal` all the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import accumulate

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.answers import Answers, Chosen, simulated
from membudget.planner.keep import Problem, problem
from membudget.planner.overhead import Overheads
from membudget.planner.regions import Region, saved_in
from membudget.planner.simulate import Simulation, simulate
from membudget.planner.staged import largest_call
from membudget.planner.timeline import timeline

MOST_OPERATORS = 1000
"""A step of more operators is left out: its minimum cuts would take seconds."""

ROUNDS, STEPS = 4, 40
NOISE = 0.3
"""By how much the logarithm of a price differs at random, at most."""

RATE = 8.0
"""How fast prices follow what is over the budget, as a share of it, at first."""

_LOW_PRICE = 1e-3
"""At moments that fit in the plain step, of the price at the others, at first."""


def priced(graph: StepGraph, overheads: Overheads) -> list[Answers]:
    """Return a way to plan what the largest module keeps, if it is not too large."""
    largest = largest_call(graph)
    if largest is None or len(graph.operators) > MOST_OPERATORS:
        return []
    own_s = overheads.seconds(graph, Region(largest.start, largest.end))
    return [_Priced(graph, largest, own_s)]


class _Priced(Answers):
    """What one module keeps."""

    def __init__(self, graph: StepGraph, call: ModuleCall, own_s: float):
        super().__init__(graph)
        self._call = call
        self._own_s = own_s
        self._region = Region(call.start, call.end)
        self._problem = problem(graph, self._region)
        self._gaps = _gaps(graph, self._region, self._problem)
        self._plain_bytes = timeline(graph).alive_bytes
        self._workspaces = [o.workspace_bytes for o in graph.operators]
        # What was tried for any budget.
        self._tried: dict[frozenset[int], Simulation] = {}

    def solve(self, budget_bytes: int) -> frozenset[int] | None:
        self._try(max(1, budget_bytes))
        fitting = [k for k, s in self._tried.items() if s.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda kept: self._tried[kept].seconds, default=None)

    def least_seconds(self, budget_bytes: int) -> float:
        return math.inf  # It is no bound; the other ways have one for this class, too.

    def smallest(self) -> None:
        return None

    def simulated(self, answer: frozenset[int]) -> Chosen:
        region = Region(self._region.start, self._region.end, answer)
        return simulated(self._graph, [self._call], [region], self._own_s)

    def candidates(self, budget_bytes: int) -> list[Chosen]:
        """Return the fastest choice that fits, and one that nearly does, if faster."""
        fitting = self.solve(budget_bytes)

        def over(kept: frozenset[int]) -> float:
            found = self._tried[kept]
            return found.seconds + found.share_over(budget_bytes) * self._graph.seconds

        nearest = min(self._tried, key=over)
        return [self.simulated(k) for k in {fitting, nearest} if k is not None]

    def _try(self, budget_bytes: int) -> None:
        generator = random.Random(0)
        for round_ in range(ROUNDS):
            noise = NOISE if round_ else 0.0
            weights = {
                storage: size * math.exp(generator.uniform(-noise, noise))
                for storage, size in self._problem.bytes.items()
            }
            prices = self._first_prices(budget_bytes)
            for step in range(STEPS):
                rate = RATE / (1 + step / 20)
                found = self._at(prices, weights)
                self._follow(prices, found, budget_bytes, rate)

    def _first_prices(self, budget_bytes: int) -> list[float]:
        alive = zip(self._plain_bytes, self._workspaces, strict=True)
        over = [sum(both) > budget_bytes for both in alive]
        seconds = self._graph.seconds or 1.0
        price = seconds / max(1, *self._plain_bytes) / max(1, sum(over))
        return [price if is_over else price * _LOW_PRICE for is_over in over]

    def _at(self, prices: Sequence[float], weights: Mapping[int, float]) -> Simulation:
        """Return what comes of the cheapest choice."""
        until = list(accumulate(prices, initial=0.0))
        costs = {
            storage: weight * (until[end] - until[start])
            for storage, weight in weights.items()
            for start, end in [self._gaps[storage]]
        }
        kept = self._problem.cheapest(costs).kept
        found = self._tried.get(kept)
        if found is None:
            region = Region(self._region.start, self._region.end, kept)
            found = self._tried[kept] = simulate(self._graph, [region])
        return found

    def _follow(
        self, prices: list[float], found: Simulation, budget_bytes: int, rate: float
    ) -> None:
        for moment, alive in enumerate(found.alive_bytes):
            most = alive + self._workspaces[moment]
            if moment == found.peak_moment:
                most = found.peak_bytes
            change = rate * (most / budget_bytes - 1)
            prices[moment] *= math.exp(max(-1.0, min(1.0, change)))


def _gaps(graph: StepGraph, region: Region, cut: Problem) -> dict[int, tuple[int, int]]:
    """Return from when to when each storage is there only if it is kept."""
    first: dict[int, int] = {}
    for saved in (graph.saved[index] for index in saved_in(graph, region)):
        if saved.asked:
            storage = graph.values[saved.value].storage
            first[storage] = min(first.get(storage, saved.asked[0]), saved.asked[0])
    births = [graph.storages[storage].birth for storage in cut.bytes]
    for _, storage in sorted(zip(births, cut.bytes, strict=True), reverse=True):
        if storage in first:
            for read in cut.inputs(storage):
                first[read] = min(first.get(read, first[storage]), first[storage])
    gaps = {}
    for storage in cut.bytes:
        facts = graph.storages[storage]
        end = facts.death if facts.released is None else facts.released
        start = min(end, graph.backward_start)
        gaps[storage] = start, max(start, first.get(storage, start))
    return gaps
