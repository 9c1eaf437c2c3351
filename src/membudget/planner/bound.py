"""The least seconds of any schedule that fits: how far from the best a plan can be.

The problem: a planner finds a plan and says nothing of those that it did not find. Take
any schedule and any moment t. A storage that autograd asks for later is there at t, or
every operator that writes it runs again. What is alive at t in any case leaves the room
for some of those storages only; the others, the *excess*, are paid for:

    excess(t) = fixed(t) + Σ bytes(s) − budget             over s in wanted(t)
    again(t)  = min Σ x(s) · bytes(s) · price(s)           where 0 ≤ x(s) ≤ 1
                    such that Σ x(s) · bytes(s) ≥ excess(t)
    least     = seconds of the plain step + max over t of again(t)

The minimum is the fractional knapsack (Dantzig 1957): the storages with the lowest
price are made again first, the last of them in part, after one sort for all moments.
That no schedule does half of a storage only makes the bound lower. An operator that
writes several storages would be paid several times if all are made again; so it is
divided among them by their bytes, and their shares never sum to more than it takes:

    price(s) = Σ seconds(w) / Σ bytes(s')                  over the writers w of s,
                                                           s' written by w
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from membudget.errors import OptionError
from membudget.graph import Saved, StepGraph


def least_seconds(graph: StepGraph, budget_bytes: int) -> float:
    """Return seconds that no schedule of the step within a budget goes below.

    It holds for every set of regions and of what they keep, nested and repeated ones
    too, and is assumed to be of schedules in which:

    * operators take the seconds in the graph, each time that they run;
    * those of the plain step all run, in its order, and what autograd does not keep, or
      the user holds, is alive when it is in the plain step;
    * a storage is there whole or not at all, neither compressed nor in other memory;
    * a storage is made again by all operators that wrote it before autograd kept it;
    * pinned operators do not run again.

    What making things again holds meanwhile, inputs and intermediates, is left out: the
    bound is low where little else is alive.

    Args:
        graph: The plain step.
        budget_bytes: For what the step allocates, as in `Simulation.peak_bytes`.

    Returns:
        Seconds of the whole step; infinity if no schedule fits.

    Raises:
        OptionError: If the budget is negative.
    """
    if budget_bytes < 0:
        raise OptionError(f"a budget is 0 bytes or more; got {budget_bytes:,}")
    return graph.seconds + _Moments(graph).again(budget_bytes)


@dataclass(frozen=True)
class _Candidate:
    """A storage of the forward that can be there or not while nothing asks for it.

    Attributes:
        storage: Which.
        writers: The operators that have to run again if it is not.
        start: The first moment at which nothing but autograd needs it.
        asked: The moments at which it must be there, those before `start` left out.
        end: The first moment after which nothing asks for it.
    """

    storage: int
    writers: tuple[int, ...]
    start: int
    asked: tuple[int, ...]
    end: int


class _Moments:
    """What is fixed and what is wanted at each moment of a step."""

    def __init__(self, graph: StepGraph):
        found = _candidates(graph)
        pinned = [c for c in found if _is_pinned(graph, c)]
        free = [c for c in found if not _is_pinned(graph, c)]
        prices = _prices(graph, free)
        order = sorted(free, key=lambda c: prices[c.storage])
        self._sizes = _integers(graph.storages[c.storage].bytes for c in order)
        self._prices = np.array([prices[c.storage] for c in order], dtype=np.float64)
        self._starts = _integers(c.start for c in order)
        self._ends = _integers(c.end for c in order)
        self._asked: dict[int, list[int]] = {}
        for index, candidate in enumerate(order):
            for moment in candidate.asked:
                self._asked.setdefault(moment, []).append(index)
        self._fixed = _fixed_bytes(graph, free, pinned)

    def again(self, budget_bytes: int) -> float:
        """Return the most that some moment asks to be paid."""
        return max(
            (self._again_at(t, budget_bytes) for t in range(len(self._fixed))),
            default=0.0,
        )

    def _again_at(self, moment: int, budget_bytes: int) -> float:
        room = budget_bytes - self._fixed[moment]
        if room < 0:
            return float("inf")
        wanted = (self._starts <= moment) & (moment < self._ends)
        wanted[self._asked.get(moment, [])] = False
        sizes, prices = self._sizes[wanted], self._prices[wanted]
        upto = np.cumsum(sizes)
        excess = (int(upto[-1]) if len(upto) else 0) - room
        if excess <= 0:
            return 0.0
        last = int(np.searchsorted(upto, excess))
        rest = excess - int(upto[last] - sizes[last])
        return float(sizes[:last] @ prices[:last] + rest * prices[last])


def _candidates(graph: StepGraph) -> list[_Candidate]:
    """Return the storages that a schedule may drop."""
    writers = _writers(graph)
    found = []
    for index, indices in graph.saved_on.items():
        storage = graph.storages[index]
        if storage.released is None or not storage.bytes:
            continue
        if not 0 <= storage.birth < graph.backward_start:
            continue
        asking = [graph.saved[i] for i in indices if graph.saved[i].asked]
        kept_at = min((saved.moment for saved in asking), default=-1)
        # A saved tensor that is asked for twice is there from the first time on.
        last = max((saved.asked[0] for saved in asking), default=-1)
        found.append(
            _Candidate(
                index,
                tuple(w for w in writers.get(index, ()) if w <= kept_at),
                max(storage.birth, storage.released),
                _must_be_there(asking, storage.released, storage.death),
                min(last, storage.death),
            )
        )
    return found


def _must_be_there(
    asking: Iterable[Saved], released: int, death: int
) -> tuple[int, ...]:
    """Return the moments at which a storage is asked for and then read."""
    moments = {s.asked[0] for s in asking if released <= s.asked[0] < s.freed}
    return tuple(sorted(moment for moment in moments if moment < death))


def _writers(graph: StepGraph) -> dict[int, list[int]]:
    """Return the operators of the forward that write each storage, in order."""
    table: dict[int, list[int]] = {}
    for index, operator in enumerate(graph.operators[: graph.backward_start]):
        if not operator.is_view:
            for storage in {graph.values[value].storage for value in operator.outputs}:
                table.setdefault(storage, []).append(index)
    return table


def _is_pinned(graph: StepGraph, candidate: _Candidate) -> bool:
    return any(graph.operators[index].is_pinned for index in candidate.writers)


def _prices(graph: StepGraph, free: Iterable[_Candidate]) -> dict[int, float]:
    """Return seconds per byte of each storage, operators divided by bytes."""
    written: Counter[int] = Counter()
    for candidate in free:
        for index in candidate.writers:
            written[index] += graph.storages[candidate.storage].bytes
    return {
        c.storage: sum(graph.operators[i].seconds / written[i] for i in c.writers)
        for c in free
    }


def _fixed_bytes(
    graph: StepGraph, free: Iterable[_Candidate], pinned: Iterable[_Candidate]
) -> list[int]:
    """Return the bytes at each moment that are alive under any schedule."""
    count = len(graph.operators)
    until = [storage.death for storage in graph.storages]
    steps = [0] * (count + 1)
    for candidate in free:
        until[candidate.storage] = candidate.start
        for moment in candidate.asked:
            steps[moment] += graph.storages[candidate.storage].bytes
            steps[moment + 1] -= graph.storages[candidate.storage].bytes
    for candidate in pinned:
        until[candidate.storage] = max(
            [candidate.start, candidate.end, *(m + 1 for m in candidate.asked)]
        )
    for storage, end in zip(graph.storages, until, strict=True):
        if storage.birth >= 0:
            steps[storage.birth] += storage.bytes
            steps[min(end, count)] -= storage.bytes
    alive = accumulate(steps[:count])
    operators = graph.operators
    return [a + o.workspace_bytes for a, o in zip(alive, operators, strict=True)]


def _integers(numbers: Iterable[int]) -> np.ndarray:
    return np.array(list(numbers), dtype=np.int64)
