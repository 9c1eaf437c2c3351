"""Solve for a minimum cut at memory prices, one price for each op index.

Memory is short only at some operators, and keeping a storage adds live bytes only
between its last use in the forward and its first use in the backward pass. Each op
index t therefore has a price per byte λ(t), and keeping a storage s costs bytes(s) · Σ
λ(t) over the gap between its uses. At given prices, the cheapest set of storages to
keep is a minimum cut (`frontier`). The prices are Lagrange multipliers (Everett 1963,
"Generalized Lagrange multiplier method"): they rise where the simulated step exceeds
the budget and fall where it stays below.

    forward            │ backward
    s ├──uses──┤ · · · · · · · · ├──needed──┤        the gap is dotted
    λ ▁▁▁▁▁▁▂▂▃▅▇█▇▆▅▃▂▁▁▁

The storages of identical layers often have equal prices and would all be kept or
dropped at once, so later rounds multiply each size by a random factor, from a generator
with a fixed seed. The prices ignore the memory that recomputation itself needs, so a
solution that recomputes much at once may not fit, however little it keeps, but is still
a useful starting point for local search (`search`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

import numpy as np

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.blocks import largest_call
from membudget.planner.choice import Block, Choice, is_movable, made_in, saved_in
from membudget.planner.frontier import Front
from membudget.planner.moved import Host
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.simulate import Simulation
from membudget.planner.solver import Solver
from membudget.planner.timeline import timeline

MOST_OPERATORS = 1000
"""Larger steps are left out, whose minimum cuts take seconds, unless there is a host:
then this solver alone moves storages there, and does so in fewer rounds."""

ROUNDS, STEPS = 4, 40
ROUNDS_OF_LARGE, STEPS_OF_LARGE = 2, 20
NOISE = 0.3
"""Largest change of a size's logarithm by the random factors."""

RATE = 8.0
"""How fast prices follow the relative excess over the budget, at first."""

FIRST_COPY_PRICE = 0.2
"""First price of a second of the link, in seconds of the step."""

LOWER = 0.1
"""By how much of the budget each round with a host aims lower than the one before."""

FALL = 0.1
"""How fast that price falls while the device waits for no copy."""

_LOW_PRICE = 1e-3
"""First price where the plain step fits, relative to the price where it does not."""


def priced(simulator: Simulator) -> list[Solver]:
    """Return a solver for the largest module call; none if the step is too large."""
    graph = simulator.graph
    call, is_large = largest_call(graph), len(graph.operators) > MOST_OPERATORS
    if call is None or (is_large and simulator.host is None):
        return []
    return [_Priced(simulator, call)]


class _Priced(Solver):
    """Solver for one module call; a solution is its choice."""

    def __init__(self, simulator: Simulator, call: ModuleCall):
        super().__init__(simulator)
        graph = simulator.graph
        self._call = call
        block = Block(call.start, call.end)
        self._front = Front(graph, block)
        self._gaps = _gaps(graph, block, self._front)
        self._plain_bytes = timeline(graph).alive_bytes
        self._workspaces = np.array([o.workspace_bytes for o in graph.operators], int)
        self._tried: dict[Choice, Simulation] = {}  # Over all budgets.
        self._copy_s = _copy_seconds(graph, block, simulator.host)

    def solve(self, budget_bytes: int) -> Choice | None:
        self._try(max(1, budget_bytes))
        fitting = [c for c, s in self._tried.items() if s.peak_bytes <= budget_bytes]
        return min(fitting, key=self._cost, default=None)

    def _cost(self, choice: Choice) -> tuple[float, int]:
        """Return the time under a choice, and the bytes that it moves."""
        found = self._tried[choice]
        return found.seconds, found.moves.out_bytes

    def schedule(self, solution: Choice) -> Schedule:
        return self._simulator.schedule([self._call], [solution])

    @property
    def least(self) -> list[Schedule]:
        """Nothing: the prices ignore what recomputation itself needs."""
        return []

    def schedules(self, budget_bytes: int) -> Iterator[Schedule]:
        """Yield the fastest schedule that fits, and a faster one that nearly fits."""
        fitting = self.solve(budget_bytes)

        def penalised(choice: Choice) -> float:
            found = self._tried[choice]
            over = found.share_over(budget_bytes)
            return found.seconds + over * self._simulator.graph.seconds

        nearest = min(self._tried, key=penalised)
        return (self.schedule(c) for c in {fitting, nearest} if c is not None)

    def _try(self, budget_bytes: int) -> None:
        generator = random.Random(0)
        is_large = len(self._workspaces) > MOST_OPERATORS
        rounds, steps = ROUNDS, STEPS
        if is_large:
            rounds, steps = ROUNDS_OF_LARGE, STEPS_OF_LARGE
        for round_ in range(rounds):
            # The first round uses the true sizes.
            noise = NOISE if round_ else 0.0
            sizes = {
                storage: size * math.exp(generator.uniform(-noise, noise))
                for storage, size in self._front.bytes.items()
            }
            # Where copies hide, fewer bytes on the device are often as fast.
            lower = round_ * LOWER if self._copy_s else 0.0
            self._follow_prices(int(budget_bytes * (1 - lower)), sizes, steps)

    def _follow_prices(
        self, budget_bytes: int, sizes: Mapping[int, float], steps: int
    ) -> None:
        prices, copy_price = self._first_prices(budget_bytes), FIRST_COPY_PRICE
        for step in range(steps):
            rate = RATE / (1 + step / 20)
            found = self._at(prices, copy_price, sizes)
            self._follow(prices, found, budget_bytes, rate)
            # The link's price rises where the device waits for it.
            wait = found.moves.wait_s / (self._simulator.graph.seconds or 1.0)
            copy_price *= math.exp(min(1.0, rate * wait) - FALL)

    def _first_prices(self, budget_bytes: int) -> np.ndarray:
        over = np.array(self._plain_bytes, int) + self._workspaces > budget_bytes
        seconds = self._simulator.graph.seconds or 1.0
        price = seconds / max(1, *self._plain_bytes) / max(1, int(over.sum()))
        return np.where(over, price, price * _LOW_PRICE)

    def _at(
        self, prices: np.ndarray, copy_price: float, sizes: Mapping[int, float]
    ) -> Simulation:
        """Simulate the cheapest choice at the given prices."""
        until = [0.0, *np.cumsum(prices).tolist()]
        costs = {
            storage: size * (until[end] - until[start])
            for storage, size in sizes.items()
            for start, end in [self._gaps[storage]]
        }
        copies = {s: copy_price * seconds for s, seconds in self._copy_s.items()}
        moved = {s for s, cost in copies.items() if cost < costs[s]}
        costs |= {storage: copies[storage] for storage in moved}
        kept = self._front.cheapest(costs).kept
        where = self._call.start, self._call.end
        choice = Choice(*where, kept, offloaded=kept & moved)
        found = self._tried.get(choice)
        if found is None:
            found = self._tried[choice] = self._simulator.simulate([choice])
        return found

    def _follow(
        self, prices: np.ndarray, found: Simulation, budget_bytes: int, rate: float
    ) -> None:
        """Scale each price by its op index's excess over the budget, at most e-fold."""
        most = np.array(found.alive_bytes, int) + self._workspaces
        # The peak may lie inside a recomputation, above the bytes live after it.
        most[found.peak_moment] = found.peak_bytes
        prices *= np.exp(np.clip(rate * (most / budget_bytes - 1), -1.0, 1.0))


def _copy_seconds(
    graph: StepGraph, block: Block, host: Host | None
) -> dict[int, float]:
    """Return the time of the copies out and back of each storage that may be moved."""
    if host is None:
        return {}
    sizes = {
        storage: graph.storages[storage].bytes
        for storage in made_in(graph, block)
        if is_movable(graph, block, storage)
    }
    return {s: host.out_s(size) + host.in_s(size) for s, size in sizes.items()}


def _gaps(graph: StepGraph, block: Block, front: Front) -> dict[int, tuple[int, int]]:
    """Return, for each storage, the op range in which it is live only if kept."""
    needed: dict[int, int] = {}
    for saved in (graph.saved[index] for index in saved_in(graph, block)):
        if saved.asked:
            storage = graph.values[saved.value].storage
            needed[storage] = min(needed.get(storage, saved.asked[0]), saved.asked[0])
    # Latest first: recomputing a storage needs its inputs at the same time.
    births = [graph.storages[storage].birth for storage in front.bytes]
    for _, storage in sorted(zip(births, front.bytes, strict=True), reverse=True):
        if storage in needed:
            for read in front.inputs(storage):
                needed[read] = min(needed.get(read, needed[storage]), needed[storage])
    gaps = {}
    for storage in front.bytes:
        released = graph.storages[storage].released_or_dead
        start = min(released, graph.backward_start)
        gaps[storage] = start, max(start, needed.get(storage, start))
    return gaps
