"""Free parts of memory or of a file: the smallest that fits is given out."""

from __future__ import annotations

from bisect import insort
from collections import deque

Extent = tuple[int, int]
"""A piece, and where a part begins there, in bytes."""


class Extents:
    """The free parts of pieces; neighbours are merged, within a piece.

    One thread at a time may take a part, but any may give one back meanwhile, even the
    one that takes: the garbage collector may run there, and free what has a part.
    """

    def __init__(self, alignment: int):
        """Begin without pieces; parts are multiples of so many bytes."""
        self._alignment = alignment
        self._free: list[tuple[Extent, int]] = []  # With their bytes, by place.
        self._returned: deque[tuple[Extent, int]] = deque()  # Not yet among these.
        self._taken_bytes = 0  # Of parts that are not free.

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that have not been given back."""
        return self._taken_bytes - sum(size for _, size in tuple(self._returned))

    def rounded(self, size: int) -> int:
        """Return the bytes that a part of a size takes."""
        return -(-size // self._alignment) * self._alignment

    def add(self, piece: int, size: int) -> None:
        """Add a piece, all of which is free."""
        insort(self._free, ((piece, 0), size))

    def take(self, size: int) -> Extent | None:
        """Take a part; return `None` if none is large enough."""
        self._merge_returned()
        rounded = self.rounded(size)
        fitting = [part for part in self._free if part[1] >= rounded]
        if not fitting:
            return None
        best = min(fitting, key=lambda part: part[1])
        self._free.remove(best)
        (piece, offset), found = best
        if found > rounded:
            insort(self._free, ((piece, offset + rounded), found - rounded))
        self._taken_bytes += rounded
        return piece, offset

    def give_back(self, place: Extent, size: int) -> None:
        """Let the next `take` use a part of a size again."""
        self._returned.append((place, self.rounded(size)))

    def _merge_returned(self) -> None:
        if not self._returned:
            return
        while self._returned:
            part = self._returned.popleft()
            insort(self._free, part)
            self._taken_bytes -= part[1]
        merged: list[tuple[Extent, int]] = []
        for (piece, offset), found in self._free:
            if merged and merged[-1][0] == (piece, offset - merged[-1][1]):
                before_place, before = merged.pop()
                merged.append((before_place, before + found))
            else:
                merged.append(((piece, offset), found))
        self._free = merged
