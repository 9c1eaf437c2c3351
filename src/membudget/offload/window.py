"""Bytes of the device that offloading takes, beside what the running operator uses.

They are those of storages that are on their way out, were loaded, or are kept because
they are asked for first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from membudget.offload.link import has_happened
from membudget.offload.saved_storage import SavedStorage


class Window:
    """Counts storages against a number of bytes.

    Attributes:
        limit_bytes: The number.
        held_bytes: Bytes of the storages that count now.
    """

    def __init__(self, limit_bytes: int):
        """Begin without storages."""
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._leaving: deque[SavedStorage] = deque()  # By the end of their copies.

    def count(self, entry: SavedStorage) -> None:
        """Count a storage, once."""
        self.held_bytes += 0 if entry.is_counted else entry.size
        entry.is_counted = True

    def discount(self, entry: SavedStorage) -> None:
        """Count a storage no more."""
        self.held_bytes -= entry.size if entry.is_counted else 0
        entry.is_counted = False

    def has_room(self, entry: SavedStorage) -> bool:
        """Return whether a storage fits beside those that count."""
        return self.held_bytes + entry.size <= self.limit_bytes

    def send(self, entry: SavedStorage) -> None:
        """Count a storage until its copy out has ended."""
        self.count(entry)
        self._leaving.append(entry)

    def drop(self, entry: SavedStorage) -> None:
        """Count a storage no more that nobody needs; its copy out may not have ended.

        The stream that saved it then waits for that, before it uses the memory again.
        """
        if entry in self._leaving:
            self._leaving.remove(entry)
            if not has_happened(entry.copied):
                entry.saved_on.wait_event(entry.copied)
        self.discount(entry)

    def left(self) -> Iterator[SavedStorage]:
        """Yield the storages whose copy out has ended.

        Over the limit, the stream that saved one waits for that.
        """
        while self._leaving:
            entry = self._leaving[0]
            if not has_happened(entry.copied):
                if self.held_bytes <= self.limit_bytes:
                    return
                entry.saved_on.wait_event(entry.copied)
            self._leaving.popleft()
            self.discount(entry)
            yield entry
