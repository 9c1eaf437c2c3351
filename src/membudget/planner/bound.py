"""Lower bound on the step time under a budget: how far a plan is from optimal.

In any schedule, a storage that autograd unpacks after op index t is either live at t or
recomputed later by all its writers. The budget, less the bytes live at t under every
schedule, has room for some of the storages needed later; the *excess* is recomputed:

    excess(t) = fixed(t) + Σ bytes(s) - budget             over s in wanted(t)
    again(t)  = min Σ x(s) · bytes(s) · price(s)           where 0 ≤ x(s) ≤ 1
                    such that Σ x(s) · bytes(s) ≥ excess(t)

    live at t   │ fixed │ wanted 1 │ wanted 2 │ wanted 3 │
    budget      ├───────────────────────┤                        excess: what is beyond

The minimum is that of a fractional knapsack (Dantzig 1957): recompute the storages with
the lowest price per byte first, and the last one in part. Sorting the storages by price
once serves every op index t. Recomputing a fraction of a storage is impossible, but
allowing it can only lower the bound. The time of an operator is divided among all the
storages that it writes, in proportion to their bytes, so that it is not counted twice:

    price(s) = Σ seconds(w) / Σ bytes(s')                  over the writers w of s,
                                                           s' written by w

Writers read other storages, which must be live or recomputed, too. Where the knapsack
takes longest, minimum cuts count these: see `dependency_cuts`. What is unpacked after t
and up to u is recomputed between t and u, in at least `again(t, u)` seconds, by
operators that run there. Therefore the seconds of consecutive op ranges add up:

    most(t) = max over u > t of again(t, u) + most(u)      0 at the end of the step
    least   = time of the plain step + max over t of most(t)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.dependency_cuts import DependencyCuts
from membudget.planner.droppable import Droppable, LiveAlways, droppables

MOST_MOMENTS = 16
"""Number of op indices at which minimum cuts are tried."""


def least_seconds(graph: StepGraph, budget_bytes: int) -> float:
    """Return a lower bound on the time of the step within a budget.

    The bound holds for every schedule, whatever its blocks keep and with or without
    nested recomputation, under these assumptions:

    * an operator takes the time given in the graph each time it runs;
    * all operators of the original step run in their original order, and tensors that
      autograd does not save or that the user holds keep their live ranges;
    * a storage is either live as a whole or freed, never compressed or offloaded;
    * recomputing a storage runs all operators that wrote it before autograd saved it,
      or before a recomputed operator reads it;
    * operators marked `must_keep` never run again.

    The bound ignores the memory that recomputation takes while it runs, so it is loose
    where little else is live.

    The bound is infinity if the bytes live under every schedule exceed the budget.

    Raises:
        OptionError: If the budget is negative.
    """
    if budget_bytes < 0:
        raise OptionError(f"a budget is 0 bytes or more; got {budget_bytes:,}")
    return graph.seconds + _Excess(graph).again_s(budget_bytes)


class _Excess:
    """Droppable storages that are unpacked, and what no schedule frees, by op index.

    The arrays hold, for each droppable storage in order of price, its size, its price,
    and the start and end of the op range in which autograd still needs it.
    """

    def __init__(self, graph: StepGraph):
        found = droppables(graph)
        self._cuts = DependencyCuts(graph, {d.storage: d.saved_at for d in found})
        writers = {d.storage: self._cuts.writers_of(d.storage) for d in found}
        pinned = {i for i, o in enumerate(graph.operators) if o.must_keep}
        must_keep = [d for d in found if not pinned.isdisjoint(writers[d.storage])]
        free = [d for d in found if pinned.isdisjoint(writers[d.storage])]
        self._live = LiveAlways(graph, free, must_keep)
        unpacked = [d for d in free if d.held]
        prices = _prices(graph, {d.storage: writers[d.storage] for d in unpacked})
        self._order = sorted(unpacked, key=lambda d: prices[d.storage])
        self._sizes = _integers(graph.storages[d.storage].bytes for d in self._order)
        self._prices = np.array([prices[d.storage] for d in self._order], np.float64)
        self._starts = _integers(d.start for d in self._order)
        self._ends = _integers(d.end for d in self._order)
        self._held = _held_at(self._order)
        self._moments = _fullest(self._order, self._live.bytes)

    def again_s(self, budget_bytes: int) -> float:
        """Return a lower bound on the recompute time of the whole step."""
        room = {t: budget_bytes - self._live.bytes[t] for t in self._moments}
        if min(room.values(), default=0) < 0:
            return math.inf
        again = {t: self._knapsack(t, room[t]) for t in self._moments}
        most = max(again.values(), default=0.0)
        largest = sorted(again, key=again.__getitem__, reverse=True)[:MOST_MOMENTS]
        end = len(self._live.bytes)
        cuts = {
            t: max(again[t], self._dependency_cut(t, end, room[t])) for t in largest
        }
        after: dict[int, float] = {}
        for t in sorted(cuts, reverse=True):
            after[t] = cuts[t]
            for u in [u for u in after if u > t and cuts[t] + after[u] > after[t]]:
                both = self._dependency_cut(t, u, room[t]) + after[u]
                after[t] = max(after[t], both)
        return max([most, *after.values()])

    def _wanted(self, moment: int) -> np.ndarray:
        """Return the places of the storages that are live, or recomputed later."""
        wanted = (self._starts <= moment) & (moment < self._ends)
        wanted[self._held.get(moment, [])] = False  # Counted in the fixed bytes.
        return np.flatnonzero(wanted)

    def _knapsack(self, moment: int, room: int) -> float:
        """Return the seconds in which what exceeds the room is recomputed."""
        wanted = self._wanted(moment)
        sizes, prices = self._sizes[wanted], self._prices[wanted]
        upto = np.cumsum(sizes)
        excess = (int(upto[-1]) if len(upto) else 0) - room
        if excess <= 0:
            return 0.0
        last = int(np.searchsorted(upto, excess))  # Recomputed in part.
        rest = excess - int(upto[last] - sizes[last])
        return float(sizes[:last] @ prices[:last] + rest * prices[last])

    def _dependency_cut(self, moment: int, end: int, room: int) -> float:
        """Return the seconds in which what is unpacked until `end` is recomputed.

        What the operators read that run again counts, too.
        """
        if self._cuts.is_spent:
            return 0.0
        wanted = [
            droppable.storage
            for droppable in map(self._order.__getitem__, self._wanted(moment))
            if any(moment < asked <= end for asked, _ in droppable.held)
        ]
        is_live = partial(self._live.has, moment=moment)
        return self._cuts.least_s(wanted, is_live, room)


def _prices(graph: StepGraph, writers: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """Return the price of each storage: seconds of recomputation per byte."""
    written: Counter[int] = Counter()
    for storage, indices in writers.items():
        for index in indices:
            written[index] += graph.storages[storage].bytes
    return {
        storage: sum(graph.operators[i].seconds / written[i] for i in indices)
        for storage, indices in writers.items()
    }


def _held_at(order: Sequence[Droppable]) -> dict[int, list[int]]:
    """Return the places of the storages that the backward pass holds at op indices."""
    found: dict[int, list[int]] = {}
    for place, droppable in enumerate(order):
        for start, end in droppable.held:
            for moment in range(start, end):
                found.setdefault(moment, []).append(place)
    return found


def _fullest(order: Iterable[Droppable], fixed: Sequence[int]) -> list[int]:
    """Return where most bytes are fixed in each op range that wants the same."""
    borders = {0, len(fixed)}
    for droppable in order:
        borders |= {droppable.start, *(i for held in droppable.held for i in held)}
    ranges = pairwise(sorted(borders))
    return [max(range(*ends), key=fixed.__getitem__) for ends in ranges]


def _integers(numbers: Iterable[int]) -> np.ndarray:
    return np.array(list(numbers), dtype=np.int64)
