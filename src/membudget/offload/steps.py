"""The storages of the step that is running, and what earlier steps tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from weakref import WeakValueDictionary

from membudget._torch import current_graph_task_id
from membudget.offload.order import Order
from membudget.offload.saved_storage import SavedStorage

OUTSIDE_BACKWARD = -1

Fate = Literal["living", "first", "unknown"]
"""What earlier steps tell of a storage: others keep it alive, or it is asked for first.
"""


def is_backward() -> bool:
    """Return whether this thread runs a part of a backward pass.

    Outside of one, regions ask that verify what they have recorded.
    """
    return current_graph_task_id() != OUTSIDE_BACKWARD


class Steps:
    """Numbers the storages of each step, and knows steps again by their sizes."""

    def __init__(self, first_bytes: int):
        """Know nothing; let so many bytes of what is asked for first stay."""
        self._order = Order(first_bytes)
        self._by_number: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()

    def enter(self, entry: SavedStorage, is_alone: bool) -> Fate:
        """Number a storage; return its fate.

        A step begins with the first storage of a forward after some were asked for, or
        where no other is left.
        """
        order = self._order
        if not is_backward() and (order.now.asked or is_alone):
            order.begin_step()
            self._by_number.clear()
        entry.number = order.save(entry.size)
        self._by_number[entry.number] = entry
        if order.expected is not None:
            entry.awaited = order.expected.saves[entry.number] - 1
            if entry.number in order.expected.living:
                return "living"
        return "first" if entry.number in order.kept else "unknown"

    def ask(self, entry: SavedStorage) -> None:
        """Note that a backward pass asks for a storage, and who keeps it alive."""
        if self._by_number.get(entry.number) is entry and is_backward():
            self._order.ask(entry.number)
            if entry.lives_anyway():
                self._order.now.living.add(entry.number)

    def save_again(self, entry: SavedStorage) -> None:
        """Note that a storage is saved once more."""
        entry.awaited -= 1
        if self._by_number.get(entry.number) is entry:
            self._order.now.saves[entry.number] += 1

    def saved(self) -> Iterator[SavedStorage]:
        """Yield the storages of this step, in the order of saving."""
        numbers = range(len(self._order.now.sizes))
        found = (self._by_number.get(number) for number in numbers)
        return (entry for entry in found if entry is not None)

    def coming(self) -> Iterator[SavedStorage]:
        """Yield what is expected to be asked for next, if it is known."""
        for number in self._order.coming():
            entry = self._by_number.get(number)
            if entry is not None:
                yield entry
