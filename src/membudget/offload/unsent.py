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

    def taken(self) -> list[SavedStorage]:
        """Return what this thread has saved and somebody still needs, and forget it."""
        found = self._of_thread.pop(get_ident(), None)
        entries = found.entries if found else []
        return [e for e in entries if e.views and e.source is not None]
