"""What the operator saves that a thread runs now: it is copied once that has run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from threading import get_ident

from torch import UntypedStorage

from membudget.offload.saved_storage import SavedStorage

Unsettled = tuple[SavedStorage, UntypedStorage | None]
"""A saved storage, and its memory if that is to be compared with its copy."""


@dataclass
class _OfThread:
    node: int = -1  # Of autograd; numbers rise in each thread.
    entries: dict[SavedStorage, UntypedStorage | None] = field(default_factory=dict)


class Unsent:
    """Storages that were saved, and are yet to be copied or compared, by thread."""

    def __init__(self) -> None:
        """Know of none."""
        self._of_thread: defaultdict[int, _OfThread] = defaultdict(_OfThread)

    def begins(self, node: int) -> bool:
        """Note which operator of this thread saves; return whether it is another."""
        of_thread = self._of_thread[get_ident()]
        before, of_thread.node = of_thread.node, node
        return before != node

    def add(self, entry: SavedStorage, storage: UntypedStorage | None = None) -> None:
        """Add what the operator of this thread saves."""
        self._of_thread[get_ident()].entries[entry] = storage

    def take(self, entries: list[SavedStorage]) -> list[Unsettled]:
        """Return those of some that are to be copied or compared now; forget these."""
        known = self._of_thread[get_ident()].entries
        due = [entry for entry in entries if entry in known and entry.awaited <= 0]
        return [(entry, known.pop(entry)) for entry in due]

    def taken(self, awaited: bool) -> list[Unsettled]:
        """Return what this thread has saved, and forget it.

        What the step is expected to save again is left, if that is still `awaited`.
        """
        of_thread = self._of_thread[get_ident()]
        found = of_thread.entries
        left = {e: s for e, s in found.items() if awaited and e.awaited > 0}
        of_thread.entries = left
        return [pair for pair in found.items() if pair[0] not in left]

    def forget(self, entry: SavedStorage) -> None:
        """Forget a storage that nobody needs, whichever thread has saved it."""
        for of_thread in list(self._of_thread.values()):
            of_thread.entries.pop(entry, None)
