"""What the operator saves that a thread runs now: it is copied once that has run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from threading import get_ident

from membudget.offload.saved_storage import SavedStorage


@dataclass
class _OfThread:
    node: int = -1  # Of autograd; numbers rise in each thread.
    entries: list[SavedStorage] = field(default_factory=list)


class Unsent:
    """Storages that were saved, and are yet to be copied, by thread."""

    def __init__(self) -> None:
        """Know of none."""
        self._of_thread: defaultdict[int, _OfThread] = defaultdict(_OfThread)

    def is_of_another(self, node: int) -> bool:
        """Return whether an operator other than the last one of this thread saves."""
        return self._of_thread[get_ident()].node != node

    def begin(self, node: int) -> None:
        """Note which operator of this thread saves now."""
        self._of_thread[get_ident()].node = node

    def add(self, entry: SavedStorage) -> None:
        """Add what the operator of this thread saves."""
        self._of_thread[get_ident()].entries.append(entry)

    def take(self, entry: SavedStorage) -> bool:
        """Forget a storage; return whether it is to be copied now."""
        entries = self._of_thread[get_ident()].entries
        if entry.awaited > 0 or entry not in entries:
            return False
        entries.remove(entry)
        return True

    def taken(self, awaited: bool) -> list[SavedStorage]:
        """Return what this thread has saved and somebody still needs, and forget it.

        What the step is expected to save again is left, if that is still `awaited`.
        """
        found = self._of_thread.pop(get_ident(), _OfThread())
        needed = [e for e in found.entries if e.views and e.source is not None]
        left = [e for e in needed if e.awaited > 0] if awaited else []
        if left:
            self._of_thread[get_ident()].entries = left
        return [e for e in needed if e not in left]
