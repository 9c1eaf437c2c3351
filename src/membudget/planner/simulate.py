"""Definition of a step's live bytes, peak and time with recomputation.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from membudget.errors import OptionError
from membudget.graph import Saved, StepGraph
from membudget.planner.backward import ReplayBackward
from membudget.planner.choice import RERUN, Choice, made_in
from membudget.planner.ledger import Ledger, ListingLedger
from membudget.planner.second_run import RerunBackward
from membudget.planner.timeline import PlainStep, Timeline


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


class BlockTimeline(NamedTuple):
    """Live bytes of one block's storages, constant between its events, as arrays.

    Attributes:
        starts: Op indices of the events, in order.
        ends: Op indices of the events that follow.
        alive_bytes: Live bytes after each event.
        peak_bytes: Maximum at each event, the operator's workspace included.
    """

    starts: np.ndarray
    ends: np.ndarray
    alive_bytes: np.ndarray
    peak_bytes: np.ndarray


def simulate(
    graph: StepGraph, choices: Iterable[Choice], plain: PlainStep | None = None
) -> Simulation:
    """Simulate a step for given choices of disjoint blocks.

    Many simulations of one step are faster if they share what is known of the `plain`
    one.

    Raises:
        OptionError: If blocks overlap or extend beyond the forward.
    """
    ordered = sorted(choices, key=lambda choice: choice.start)
    _check(graph, ordered)
    return _Machine(graph, ordered).run(plain or PlainStep(graph))


class LiveAtPeak(NamedTuple):
    """What is live at the peak of a simulated step.

    Attributes:
        operator: Index of the operator that runs, for the first time or again.
        storages: The live storages, each as often as it has copies.
    """

    operator: int
    storages: tuple[int, ...]


def live_at_peak(graph: StepGraph, choices: Iterable[Choice]) -> LiveAtPeak:
    """Return what is live at the peak of a step for given choices.

    Together, the storages and the operator's workspace have the bytes of the peak.
    """
    ordered, plain = sorted(choices, key=lambda choice: choice.start), PlainStep(graph)
    known = simulate(graph, ordered, plain)
    moment = known.peak_moment
    ledger = ListingLedger(graph, known.peak_bytes, moment)
    _Machine(graph, ordered, ledger).run(plain)
    # A recompute runs before what the step allocates at its moment.
    last = moment if ledger.operator is None else moment - 1
    others = (
        index
        for index, storage in enumerate(graph.storages)
        if index not in ledger.ends and 0 <= storage.birth <= last
        if storage.death > moment
    )
    operator = moment if ledger.operator is None else ledger.operator
    return LiveAtPeak(operator, (*others, *ledger.live.elements()))


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

    def __init__(
        self,
        graph: StepGraph,
        choices: Sequence[Choice],
        ledger: Ledger | None = None,
    ):
        self.graph = graph
        self.ledger = ledger or Ledger(graph)
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

    def run(self, plain: PlainStep) -> Simulation:
        graph, ledger = self.graph, self.ledger
        # Few live ranges change: all others are those of the plain step.
        others, before = plain.without(ledger.ends)
        for storage in ledger.ends:
            self._end(storage)
            if graph.storages[storage].birth >= 0:
                self.births.setdefault(graph.storages[storage].birth, []).append(
                    storage
                )
        count = len(graph.operators)
        moments = sorted(moment for moment in self._events() if moment < count)
        own, own_bytes = 0, np.zeros(count, int)
        for moment, other in zip(moments, before[moments].tolist(), strict=True):
            ledger.live_bytes = other + own
            self._step(moment)
            # What it takes is live until the next event.
            own_bytes[moment] = ledger.live_bytes - other - own
            own = ledger.live_bytes - other
        alive = others + np.cumsum(own_bytes)
        self._update_peak(alive + plain.workspaces)
        again = [*ledger.replayed, *ledger.reran]
        again_s = sum(graph.operators[index].seconds for index in again)
        return Simulation(
            tuple(alive.tolist()),
            ledger.peak_bytes,
            ledger.peak_moment,
            graph.seconds + again_s,
            tuple(ledger.replayed),
            tuple(ledger.reran),
        )

    def _events(self) -> set[int]:
        return {*self.births, *self.deaths, *self.frees, *self.unpacks, *self.returns}

    def _update_peak(self, totals: np.ndarray) -> None:
        """Compare the peak of recomputation with the bytes live at each operator."""
        ledger, moment = self.ledger, int(totals.argmax()) if len(totals) else 0
        most = int(totals[moment]) if len(totals) else 0
        if (most, -moment) > (ledger.peak_bytes, -ledger.peak_moment) and most > 0:
            ledger.peak_bytes, ledger.peak_moment = most, moment

    def run_block(self, choice: Choice) -> BlockTimeline:
        own, born = range(choice.start, choice.end), self.graph.born_at
        for storage in made_in(self.graph, choice):
            self._end(storage)
        # Every operator of the block is an event: its workspace counts.
        events = self._events().union(own)
        count = len(self.graph.operators)
        rows = []
        for start, end in pairwise([*sorted(e for e in events if e < count), count]):
            self.ledger.peak_bytes = 0  # The peak of this event alone.
            self._step(start, born.get(start, ()) if start in own else ())
            rows.append((start, end, self.ledger.live_bytes, self.ledger.peak_bytes))
        return BlockTimeline(*np.array(rows, int).reshape(-1, 4).T)

    def _end(self, storage: int) -> None:
        """Register when a storage of the forward is freed."""
        if self.graph.storages[storage].birth >= 0:
            self.deaths.setdefault(self.ledger.end_of(storage), []).append(storage)

    def _step(self, moment: int, born: Iterable[int] = ()) -> None:
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
