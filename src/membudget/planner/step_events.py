"""What happens in a simulated step, by op index.

Storages are allocated and freed, saved tensors are unpacked and freed, and what is
moved to the host leaves and is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property

from membudget.graph import Saved
from membudget.planner.backward import ReplayBackward
from membudget.planner.choice import RERUN, Choice
from membudget.planner.ledger import Ledger
from membudget.planner.moved import Moving
from membudget.planner.second_run import RerunBackward

Event = Callable[[int], object]

_BlockBackward = ReplayBackward | RerunBackward


def _backward(ledger: Ledger, choice: Choice) -> _BlockBackward:
    if choice.engine == RERUN:
        return RerunBackward(ledger, choice)
    return ReplayBackward(ledger, choice)


class StepEvents:
    """The events of a step under some choices.

    Attributes:
        ledger: The running totals of the step.
    """

    def __init__(
        self, ledger: Ledger, choices: Sequence[Choice], moving: Moving | None = None
    ):
        """Find the events of the choices' blocks; `moving` moves what they offload."""
        self.ledger = ledger
        blocks = [_backward(ledger, choice) for choice in choices]
        for block in blocks:
            block.move_ends()
        self._births: dict[int, list[int]] = {}
        self._deaths: dict[int, list[int]] = {}
        self._unpacks: dict[int, list[tuple[_BlockBackward, int]]] = {}
        self._returns: dict[int, list[tuple[_BlockBackward, int]]] = {}
        self._frees: dict[int, list[tuple[_BlockBackward, int]]] = {}
        self._moves: dict[int, list[tuple[Event, int]]] = {}
        self._moved: frozenset[int] = frozenset()
        for block in blocks:
            self._add(block)
        if moving is not None:
            self._moved = frozenset(s for choice in choices for s in choice.offloaded)
            ledger.before_read = _asking(moving.ask, self._moved)
            for storage in sorted(self._moved):
                self._move(moving, storage)
            order: list[Event] = [moving.free, moving.release, moving.leave]
            order.append(moving.ask)
            for events in self._moves.values():
                events.sort(key=lambda event: order.index(event[0]))

    def _add(self, block: _BlockBackward) -> None:
        for copy in block.copies():
            self._births.setdefault(copy.start, []).append(copy.storage)
            self._deaths.setdefault(copy.end, []).append(copy.storage)
        for index in block.dropped_saved:
            saved = self.ledger.graph.saved[index]
            for moment in saved.asked:
                self._unpacks.setdefault(moment, []).append((block, index))
            for moment in self._returned(saved):
                self._returns.setdefault(moment, []).append((block, index))
            self._frees.setdefault(saved.freed, []).append((block, index))

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
        events = [(end, moving.free), (released, moving.release)]
        events.append((graph.last_write[storage] + 1, moving.leave))
        saved = (graph.saved[index] for index in graph.saved_on[storage])
        events += [(moment, moving.ask) for s in saved for moment in s.asked]
        for moment, event in events:
            self._moves.setdefault(moment, []).append((event, storage))

    def asked(self, storages: Collection[int]) -> list[int]:
        """Return some storages in the order in which the step asks for them first."""
        found: dict[int, None] = {}  # An ordered set.
        graph = self.ledger.graph
        self.ledger.before_read = _asking(found.setdefault, storages)
        for storage in sorted(storages):
            for saved in (graph.saved[index] for index in graph.saved_on[storage]):
                for moment in saved.asked:
                    event = found.setdefault, storage
                    self._moves.setdefault(moment, []).append(event)
        tables = self._frees, self._unpacks, self._returns, self._moves
        for moment in sorted(set().union(*tables)):
            if moment < len(graph.operators):
                self.happen(moment)
        return [*found]

    def begin(self, storage: int) -> None:
        """Let a storage be allocated by the forward."""
        birth = self.ledger.graph.storages[storage].birth
        if birth >= 0:
            self._births.setdefault(birth, []).append(storage)

    def end(self, storage: int) -> None:
        """Let a storage of the forward be freed, unless it is moved."""
        is_made = self.ledger.graph.storages[storage].birth >= 0
        if is_made and storage not in self._moved:
            self._deaths.setdefault(self.ledger.end_of(storage), []).append(storage)

    def moments(self) -> set[int]:
        """Return the op indices at which something happens."""
        tables = self._births, self._deaths, self._frees, self._unpacks, self._returns
        return set().union(*tables, self._moves)

    def happen(self, moment: int, born: Iterable[int] = ()) -> None:
        """Do what happens when an operator runs, and before; `born` is allocated."""
        ledger = self.ledger
        ledger.moment = moment
        # Storages die before the operator at their death runs: frees come first.
        for storage in self._deaths.get(moment, ()):
            ledger.release(storage)
        for block, index in self._frees.get(moment, ()):
            block.free(index)
        for block, index in self._returns.get(moment, ()):
            block.take_back(index)
        for event, storage in self._moves.get(moment, ()):
            event(storage)
        for block, index in self._unpacks.get(moment, ()):
            block.unpack(index)
        for storage in (*self._births.get(moment, ()), *born):
            ledger.allocate(storage)
        ledger.update_peak(moment)


def _asking(ask: Event, storages: Collection[int]) -> Callable[[Iterable[int]], None]:
    """Return what asks for those that are read of some storages."""

    def read(found: Iterable[int]) -> None:
        for storage in found:
            if storage in storages:
                ask(storage)

    return read
