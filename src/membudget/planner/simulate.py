"""Definition of a step's live bytes, peak and time, with or without recomputation.

The memory at operator t is the total size of all storages with birth ≤ t < death, which
include the operator's outputs, plus the operator's workspace. Memory in use before the
step is counted separately (`StepGraph.static`), so the results match those of a meter
that counts only the step's own allocations.

    op index        0    1    2    3    4
    storage a (4)   ├────┼────┼────┤                birth 0, death 3
    storage b (2)        ├────┼────┼────┤           birth 1, death 4
    live_bytes      4    6    6    2    0

Tests compare every solver with this simulation, and the simulation with the memory
meter. A tensor that a block makes and autograd saves is dropped unless the block's
choice keeps it; the engine of the choice recomputes a dropped tensor when the backward
pass first unpacks it: see `second_run` for the rerun engine, and `backward` for the
replay engine (`engine.replay`), whose rules are:

1. A storage is live while user code holds it, while autograd holds a saved tensor in it
   that is not dropped, or while it is the source (a kept storage or an input of the
   block) for recomputing a dropped tensor that autograd still holds.
2. When the backward pass unpacks a dropped tensor that is not live, the missing part of
   its recompute slice runs in forward order, each operator at most once per stage.
3. A recomputed storage stays live while the current stage needs it for another saved
   tensor or for an operator yet to run; a storage that the stage retains stays live
   until the next stage begins.
4. Views cost no memory. A storage that is written in place is recomputed by all
   operators that write it.
5. Autograd may overwrite an unpacked tensor, so autograd gets a copy if an operator of
   the stage has yet to read the tensor, or if the stage retains it for another to read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from membudget.errors import OptionError
from membudget.graph import Operator, Saved, StepGraph
from membudget.planner.backward import ReplayBackward
from membudget.planner.choice import RERUN, Choice, made_in
from membudget.planner.ledger import Ledger
from membudget.planner.second_run import RerunBackward

Interval = tuple[int, int, int]
"""A live range: first op index, op index after the last, bytes."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes of a step at each op index, and their peak.

    Attributes:
        alive_bytes: Live bytes at each operator, without its workspace.
        peak_bytes: The maximum of live bytes plus operator workspace.
        peak_moment: Index of the first operator at the peak; 0 for an empty step.
    """

    alive_bytes: tuple[int, ...]
    peak_bytes: int
    peak_moment: int


def timeline(graph: StepGraph) -> Timeline:
    """Return the timeline of the step without recomputation."""
    return of_intervals(graph, lifetimes(graph))


def lifetimes(graph: StepGraph, without: Container[int] = ()) -> list[Interval]:
    """Return the live ranges of storages made by a step, except those in `without`."""
    return [
        (storage.birth, storage.death, storage.bytes)
        for index, storage in enumerate(graph.storages)
        if storage.birth >= 0 and index not in without
    ]


def of_intervals(graph: StepGraph, intervals: Iterable[Interval]) -> Timeline:
    """Return the timeline of storages with the given live ranges."""
    alive = live_bytes(len(graph.operators), intervals)
    peak_bytes, moment = peak_of(graph.operators, alive)
    return Timeline(tuple(alive), peak_bytes, moment)


def live_bytes(count: int, intervals: Iterable[Interval]) -> list[int]:
    """Return the live bytes at each of `count` op indices, given live ranges.

    Example:
        >>> live_bytes(5, [(0, 3, 4), (1, 4, 2)])
        [4, 6, 6, 2, 0]
    """
    steps = [0] * (count + 1)
    for start, end, size in intervals:
        steps[start] += size
        steps[min(end, count)] -= size
    return list(accumulate(steps))[:count]


def peak_of(operators: Iterable[Operator], alive: Iterable[int]) -> tuple[int, int]:
    """Return the peak of a run of operators with workspaces, and where it occurs."""
    peak_bytes, place = 0, 0
    for index, (operator, live) in enumerate(zip(operators, alive, strict=True)):
        if live + operator.workspace_bytes > peak_bytes:
            peak_bytes, place = live + operator.workspace_bytes, index
    return peak_bytes, place


@dataclass(frozen=True)
class Simulation(Timeline):
    """The simulated timeline and duration of a step for a given set of choices.

    Attributes:
        seconds: Time of the step, including recomputation.
        replayed: Indices of the operators run by replays, in execution order.
        reran: Indices of the operators run by reruns, in execution order.
    """

    seconds: float
    replayed: tuple[int, ...]
    reran: tuple[int, ...] = ()

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Indices of all operators that run again."""
        return self.replayed + self.reran

    def share_over(self, budget_bytes: int) -> float:
        """Return the excess of the peak over a budget, as a fraction of the budget."""
        return max(0, self.peak_bytes - budget_bytes) / max(1, budget_bytes)


class BlockStep(NamedTuple):
    """Live bytes of one block's storages, constant over a range of op indices."""

    start: int
    end: int
    alive_bytes: int  # After the event.
    peak_bytes: int  # The maximum at the event, the operator's workspace included.


BlockTimeline = list[BlockStep]


def simulate(graph: StepGraph, choices: Iterable[Choice]) -> Simulation:
    """Simulate a step for given choices of disjoint blocks.

    Raises:
        OptionError: If blocks overlap or extend beyond the forward.
    """
    ordered = sorted(choices, key=lambda choice: choice.start)
    _check(graph, ordered)
    return _Machine(graph, ordered).run()


def simulate_block(graph: StepGraph, choice: Choice) -> BlockTimeline:
    """Simulate one block alone, counting only the storages that it allocates."""
    return _Machine(graph, [choice]).run_block(choice)


def _check(graph: StepGraph, choices: Sequence[Choice]) -> None:
    end_before = 0
    for choice in choices:
        if not end_before <= choice.start <= choice.end <= graph.backward_start:
            raise OptionError(
                f"the block of operators {choice.start} to {choice.end} overlaps the "
                f"one before it or leaves the forward, which ends at "
                f"{graph.backward_start}"
            )
        end_before = choice.end


_BlockBackward = ReplayBackward | RerunBackward


def _backward(ledger: Ledger, choice: Choice) -> _BlockBackward:
    if choice.engine == RERUN:
        return RerunBackward(ledger, choice)
    return ReplayBackward(ledger, choice)


class _Machine:
    """Event-driven simulation of a step, operator by operator."""

    def __init__(self, graph: StepGraph, choices: Sequence[Choice]):
        self.graph = graph
        self.ledger = Ledger(graph)
        blocks = [_backward(self.ledger, choice) for choice in choices]
        for block in blocks:
            block.move_ends()
        # Events by op index: storages allocated and freed, saved tensors unpacked and
        # freed.
        self.births: dict[int, list[int]] = {}
        self.deaths: dict[int, list[int]] = {}
        self.unpacks: dict[int, list[tuple[_BlockBackward, int]]] = {}
        self.returns: dict[int, list[tuple[_BlockBackward, int]]] = {}
        self.frees: dict[int, list[tuple[_BlockBackward, int]]] = {}
        for block in blocks:
            for copy in block.copies():
                self.births.setdefault(copy.start, []).append(copy.storage)
                self.deaths.setdefault(copy.end, []).append(copy.storage)
            for index in block.dropped_saved:
                saved = graph.saved[index]
                for moment in saved.asked:
                    self.unpacks.setdefault(moment, []).append((block, index))
                for moment in self._returns(saved):
                    self.returns.setdefault(moment, []).append((block, index))
                self.frees.setdefault(saved.freed, []).append((block, index))

    def _returns(self, saved: Saved) -> Iterator[int]:
        """Yield when backward passes that retain their graph return a saved tensor.

        The next operators of the pass ask for other tensors by then.
        """
        if len(saved.asked) == 1 and saved.asked[0] >= self.graph.backward_start:
            return  # The only pass frees what it returns.
        for moment in saved.asked:
            place = bisect_right(self._asks, moment)
            if place < len(self._asks):
                yield self._asks[place]

    @cached_property
    def _asks(self) -> list[int]:
        """Op indices at which autograd asks for saved tensors, in order."""
        return sorted({m for saved in self.graph.saved for m in saved.asked})

    def run(self) -> Simulation:
        graph, ledger = self.graph, self.ledger
        # Few live ranges change: the others are those of the plain step.
        for storage in ledger.ends:
            self._end(storage)
        alive_bytes = []
        for moment in range(len(graph.operators)):
            for storage in graph.died_at.get(moment, ()):
                if storage not in ledger.ends:
                    ledger.release(storage)
            self._step(moment, graph.born_at.get(moment, ()))
            alive_bytes.append(ledger.live_bytes)
        again = [*ledger.replayed, *ledger.reran]
        again_s = sum(graph.operators[index].seconds for index in again)
        return Simulation(
            tuple(alive_bytes),
            ledger.peak_bytes,
            ledger.peak_moment,
            graph.seconds + again_s,
            tuple(ledger.replayed),
            tuple(ledger.reran),
        )

    def run_block(self, choice: Choice) -> BlockTimeline:
        own, born = range(choice.start, choice.end), self.graph.born_at
        for storage in made_in(self.graph, choice):
            self._end(storage)
        events = {*self.births, *self.deaths, *self.frees, *self.unpacks, *self.returns}
        # Every operator of the block is an event: its workspace counts.
        events |= set(own)
        count = len(self.graph.operators)
        steps = []
        for start, end in pairwise([*sorted(e for e in events if e < count), count]):
            self.ledger.peak_bytes = 0  # The peak of this event alone.
            self._step(start, born.get(start, ()) if start in own else ())
            live_bytes, peak_bytes = self.ledger.live_bytes, self.ledger.peak_bytes
            steps.append(BlockStep(start, end, live_bytes, peak_bytes))
        return steps

    def _end(self, storage: int) -> None:
        """Register when a storage of the forward is freed."""
        if self.graph.storages[storage].birth >= 0:
            self.deaths.setdefault(self.ledger.end_of(storage), []).append(storage)

    def _step(self, moment: int, born: Iterable[int]) -> None:
        ledger = self.ledger
        ledger.moment = moment
        # Storages die before the operator at their death runs: frees come first.
        for storage in self.deaths.get(moment, ()):
            ledger.release(storage)
        for block, index in self.frees.get(moment, ()):
            block.free(index)
        for block, index in self.returns.get(moment, ()):
            block.take_back(index)
        for block, index in self.unpacks.get(moment, ()):
            block.unpack(index)
        for storage in (*self.births.get(moment, ()), *born):
            ledger.allocate(storage)
        ledger.update_peak(moment)
