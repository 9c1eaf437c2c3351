"""What happens in a simulated step, by op index.

Storages are allocated and freed, saved tensors are unpacked and freed, and what is
moved to the host leaves and is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from operator import itemgetter

import numpy as np

from membudget.graph import Saved, StepGraph
from membudget.planner.backward import ReplayBackward
from membudget.planner.choice import RERUN, Choice
from membudget.planner.ledger import Ledger
from membudget.planner.moved import Moving
from membudget.planner.second_run import RerunBackward

Event = Callable[[int], object]

# The order of the events of one moment. Storages die before the operator at their death
# runs: frees come first.
_DIES, _FREED, _RETURNED, *_MOVES, _UNPACKED, _BORN = range(9)
_FREED_MOVED, _RELEASED, _LEAVES, _ASKED = _MOVES
_order = itemgetter(0)

_BlockBackward = ReplayBackward | RerunBackward


def _backward(ledger: Ledger, choice: Choice) -> _BlockBackward:
    if choice.engine == RERUN:
        return RerunBackward(ledger, choice)
    return ReplayBackward(ledger, choice)


class StepEvents:
    """The events of a step under some choices.

    Attributes:
        ledger: The running totals of the step.
        moved: The storages that are moved to the host.
    """

    def __init__(
        self, ledger: Ledger, choices: Sequence[Choice], moving: Moving | None = None
    ):
        """Find the events of the choices' blocks; `moving` moves what they offload."""
        self.ledger = ledger
        blocks = [_backward(ledger, choice) for choice in choices]
        for block in blocks:
            block.move_ends()
        self._events: dict[int, list[tuple[int, Event, int]]] = {}
        self.moved: frozenset[int] = frozenset()
        for block in blocks:
            self._add(block)
        if moving is not None:
            self.moved = frozenset(s for choice in choices for s in choice.offloaded)
            ledger.before_read = _asking(moving.ask, self.moved)
            for storage in sorted(self.moved):
                self._move(moving, storage)

    def _on(self, moment: int, order: int, event: Event, index: int) -> None:
        """Let an event happen with an index; those of a moment are put in order."""
        self._events.setdefault(moment, []).append((order, event, index))

    def _add(self, block: _BlockBackward) -> None:
        ledger, on = self.ledger, self._on
        for copy in block.copies():
            on(copy.start, _BORN, ledger.allocate, copy.storage)
            on(copy.end, _DIES, ledger.release, copy.storage)
        for index in block.dropped_saved:
            saved = ledger.graph.saved[index]
            for moment in saved.asked:
                on(moment, _UNPACKED, block.unpack, index)
            for moment in self._returned(saved):
                on(moment, _RETURNED, block.take_back, index)
            on(saved.freed, _FREED, block.free, index)
        if isinstance(block, ReplayBackward):
            for moment in _ends_inside(ledger.graph, block.dropped_saved):
                on(moment, _RETURNED, block.end_pass, 0)

    def _returned(self, saved: Saved) -> Iterator[int]:
        """Yield when backward passes that retain their graph return a saved tensor.

        The next operators of the pass ask for other tensors by then.
        """
        if len(saved.asked) == 1 and saved.asked[0] >= self.ledger.graph.backward_start:
            return  # The only pass frees what it returns.
        for moment in saved.asked:
            place = bisect_right(self._asks, moment)
            if place < len(self._asks):
                yield self._asks[place]

    @cached_property
    def _asks(self) -> list[int]:
        """Op indices at which autograd asks for saved tensors, in order."""
        return sorted({m for saved in self.ledger.graph.saved for m in saved.asked})

    def _move(self, moving: Moving, storage: int) -> None:
        """Register what happens to a storage that is moved to the host and back."""
        graph = self.ledger.graph
        released = graph.storages[storage].released
        end = self.ledger.ends[storage] = self.ledger.end_of(storage)
        assert released is not None, "as it is movable"
        self._on(graph.storages[storage].birth, _BORN, self.ledger.allocate, storage)
        self._on(end, _FREED_MOVED, moving.free, storage)
        self._on(released, _RELEASED, moving.release, storage)
        self._on(graph.last_write[storage] + 1, _LEAVES, moving.leave, storage)
        for saved in (graph.saved[index] for index in graph.saved_on[storage]):
            for moment in saved.asked:
                self._on(moment, _ASKED, moving.ask, storage)

    def asked(self, storages: Collection[int]) -> list[int]:
        """Return some storages in the order in which the step asks for them first."""
        found: dict[int, None] = {}  # An ordered set.
        graph = self.ledger.graph
        self.ledger.before_read = _asking(found.setdefault, storages)
        for storage in sorted(storages):
            for saved in (graph.saved[index] for index in graph.saved_on[storage]):
                for moment in saved.asked:
                    self._on(moment, _ASKED, found.setdefault, storage)
        for moment in self.moments():
            self._happen(moment)
        return [*found]

    def moments(self) -> list[int]:
        """Return the op indices at which something happens, in order."""
        count = len(self.ledger.graph.operators)
        return sorted(moment for moment in self._events if moment < count)

    def run(self, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Go through the events; return the bytes that they hold, and their peaks.

        `before` has the bytes of the forward that are live at each op index, before
        the operator allocates.
        """
        ledger, own, found, moments = self.ledger, 0, [], self.moments()
        for moment, other in zip(moments, before[moments].tolist(), strict=True):
            ledger.live_bytes, ledger.peak_bytes = other + own, 0
            self._happen(moment)
            own = ledger.live_bytes - other
            found.append((own, ledger.peak_bytes))
        # What is held after an event is held until the next one.
        held, peaks = np.zeros((2, len(before)), int)
        owned, peaks[moments] = np.array(found, int).reshape(-1, 2).T
        held[moments] = np.diff(owned, prepend=0)
        return np.cumsum(held), peaks

    def _happen(self, moment: int) -> None:
        """Do what happens before an operator runs, and allocate what is moved."""
        self.ledger.moment = moment
        events = self._events[moment]
        if len(events) > 1:
            events.sort(key=_order)
        for _, event, index in events:
            event(index)


def _ends_inside(graph: StepGraph, dropped: Iterable[int]) -> Iterator[int]:
    """Yield where backward passes inside the forward end that ask for what is dropped.

    A pass goes back from what was saved last.
    """
    saved = (graph.saved[index] for index in dropped)
    turn = graph.backward_start
    inside = sorted(
        (m, -s.moment, s.freed, len(s.asked))
        for s in saved
        for m in s.asked
        if m < turn
    )
    for (moment, saved_at, freed, times), following in zip_longest(inside, inside[1:]):
        if following is None or following[1] < saved_at:
            yield freed if times == 1 else moment + 1


def _asking(ask: Event, storages: Collection[int]) -> Callable[[Iterable[int]], None]:
    """Return what asks for those that are read of some storages."""

    def read(found: Iterable[int]) -> None:
        for storage in found:
            if storage in storages:
                ask(storage)

    return read
