"""Lower bound on the step time under a budget: how far a plan is from optimal.

In any schedule, a storage that autograd unpacks after op index t is either live at t or
recomputed later by all its writers. The budget, less the bytes live at t under every
schedule, has room for some of the storages needed later; the *excess* is recomputed:

    excess(t) = fixed(t) + Σ bytes(s) - budget             over s in wanted(t)
    again(t)  = min Σ x(s) · bytes(s) · price(s)           where 0 ≤ x(s) ≤ 1
                    such that Σ x(s) · bytes(s) ≥ excess(t)
    least     = time of the plain step + max over t of again(t)

    live at t   │ fixed │ wanted 1 │ wanted 2 │ wanted 3 │
    budget      ├───────────────────────┤                        excess: what is beyond

The minimum is that of a fractional knapsack (Dantzig 1957): recompute the storages with
the lowest price per byte first, and the last one in part. Sorting the storages by price
once serves every op index t. Recomputing a fraction of a storage is impossible, but
allowing it can only lower the bound. The time of an operator is divided among all the
storages that it writes, in proportion to their bytes, so that it is not counted twice:

    price(s) = Σ seconds(w) / Σ bytes(s')                  over the writers w of s,
                                                           s' written by w
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.choice import Block, writers_of
from membudget.planner.timeline import Interval, live_bytes


def least_seconds(graph: StepGraph, budget_bytes: int) -> float:
    """Return a lower bound on the time of the step within a budget.

    The bound holds for every schedule, whatever its blocks keep and with or without
    nested recomputation, under these assumptions:

    * an operator takes the time given in the graph each time it runs;
    * all operators of the original step run in their original order, and tensors that
      autograd does not save or that the user holds keep their live ranges;
    * a storage is either live as a whole or freed, never compressed or offloaded;
    * recomputing a storage runs all operators that wrote it before autograd saved it;
    * operators marked `must_keep` never run again.

    The bound ignores the memory that recomputation itself needs for inputs and
    intermediates, so it is loose where little else is live.

    The bound is infinity if the bytes live under every schedule exceed the budget.

    Raises:
        OptionError: If the budget is negative.
    """
    if budget_bytes < 0:
        raise OptionError(f"a budget is 0 bytes or more; got {budget_bytes:,}")
    return graph.seconds + _Excess(graph).again_s(budget_bytes)


@dataclass(frozen=True)
class _Droppable:
    """A storage of the forward that a schedule may free and recompute."""

    storage: int
    writers: tuple[int, ...]  # They have to run again if it is dropped.
    start: int  # From this op index on, only autograd holds it.
    asked: tuple[int, ...]  # Op indices from `start` on at which it must be live.
    end: int  # The op index at which autograd unpacks it for the last time.


class _Excess:
    """Fixed bytes (live under every schedule) and droppable storages, by op index.

    The arrays hold, for each droppable storage in order of price, its size, its price,
    and the start and end of the op range in which autograd still needs it.
    """

    def __init__(self, graph: StepGraph):
        found = _droppable(graph)
        pinned = {i for i, o in enumerate(graph.operators) if o.must_keep}
        must_keep = [d for d in found if not pinned.isdisjoint(d.writers)]
        free = [d for d in found if pinned.isdisjoint(d.writers)]
        prices = _prices(graph, free)
        order = sorted(free, key=lambda d: prices[d.storage])
        self._sizes = _integers(graph.storages[d.storage].bytes for d in order)
        self._prices = np.array([prices[d.storage] for d in order], dtype=np.float64)
        self._starts = _integers(d.start for d in order)
        self._ends = _integers(d.end for d in order)
        self._asked: dict[int, list[int]] = {}
        for index, droppable in enumerate(order):
            for moment in droppable.asked:
                self._asked.setdefault(moment, []).append(index)
        self._fixed = _fixed_bytes(graph, free, must_keep)

    def again_s(self, budget_bytes: int) -> float:
        """Return the largest lower bound on the recompute time over all op indices."""
        moments = range(len(self._fixed))
        return max((self._again_at(t, budget_bytes) for t in moments), default=0.0)

    def _again_at(self, moment: int, budget_bytes: int) -> float:
        room = budget_bytes - self._fixed[moment]
        if room < 0:
            return float("inf")
        wanted = (self._starts <= moment) & (moment < self._ends)
        wanted[self._asked.get(moment, [])] = False  # Counted in the fixed bytes.
        sizes, prices = self._sizes[wanted], self._prices[wanted]
        upto = np.cumsum(sizes)
        excess = (int(upto[-1]) if len(upto) else 0) - room
        if excess <= 0:
            return 0.0
        last = int(np.searchsorted(upto, excess))  # Recomputed in part.
        rest = excess - int(upto[last] - sizes[last])
        return float(sizes[:last] @ prices[:last] + rest * prices[last])


def _droppable(graph: StepGraph) -> list[_Droppable]:
    """Return the forward storages that a schedule may free and recompute."""
    writers = writers_of(graph, Block(0, graph.backward_start), graph.saved_on)
    found = []
    for index, indices in graph.saved_on.items():
        storage = graph.storages[index]
        if storage.released is None or not storage.bytes:
            continue
        if not 0 <= storage.birth < graph.backward_start:
            continue
        asking = [graph.saved[i] for i in indices if graph.saved[i].asked]
        saved_at = min((saved.moment for saved in asking), default=-1)
        # A saved tensor that is unpacked twice stays live from the first time on.
        last = max((saved.asked[0] for saved in asking), default=-1)
        released, death = storage.released, storage.death
        read = {s.asked[0] for s in asking if released <= s.asked[0] < s.freed}
        found.append(
            _Droppable(
                index,
                tuple(w for w in writers.get(index, ()) if w <= saved_at),
                max(storage.birth, released),
                tuple(sorted(moment for moment in read if moment < death)),
                min(last, death),
            )
        )
    return found


def _prices(graph: StepGraph, free: Iterable[_Droppable]) -> dict[int, float]:
    """Return the price of each storage: seconds of recomputation per byte."""
    written: Counter[int] = Counter()
    for droppable in free:
        for index in droppable.writers:
            written[index] += graph.storages[droppable.storage].bytes
    return {
        d.storage: sum(graph.operators[i].seconds / written[i] for i in d.writers)
        for d in free
    }


def _fixed_bytes(
    graph: StepGraph, free: Iterable[_Droppable], must_keep: Iterable[_Droppable]
) -> list[int]:
    """Return the bytes that are live under every schedule, at each op index."""
    until = [storage.death for storage in graph.storages]
    ranges: list[Interval] = []
    for droppable in free:
        until[droppable.storage] = droppable.start
        size = graph.storages[droppable.storage].bytes
        ranges += [(moment, moment + 1, size) for moment in droppable.asked]
    for droppable in must_keep:
        until[droppable.storage] = max(
            [droppable.start, droppable.end, *(m + 1 for m in droppable.asked)]
        )
    for storage, end in zip(graph.storages, until, strict=True):
        if storage.birth >= 0:
            ranges.append((storage.birth, end, storage.bytes))
    live = live_bytes(len(graph.operators), ranges)
    return [b + o.workspace_bytes for b, o in zip(live, graph.operators, strict=True)]


def _integers(numbers: Iterable[int]) -> np.ndarray:
    return np.array(list(numbers), dtype=np.int64)
