"""Free parts of memory or of a file: the smallest that fits is given out."""

from __future__ import annotations

from bisect import insort

Place = tuple[int, int]
"""A piece, and where a part begins there, in bytes."""


class Extents:
    """The free parts of pieces; neighbours are merged, within a piece."""

    def __init__(self, alignment: int):
        """Begin without pieces; parts are multiples of so many bytes."""
        self._alignment = alignment
        self._free: list[tuple[Place, int]] = []  # With their bytes, by place.

    def rounded(self, size: int) -> int:
        """Return the bytes that a part of a size takes."""
        return -(-size // self._alignment) * self._alignment

    def add(self, piece: int, size: int) -> None:
        """Add a piece, all of which is free."""
        insort(self._free, ((piece, 0), size))

    def take(self, size: int) -> Place | None:
        """Take a part; return `None` if none is large enough."""
        rounded = self.rounded(size)
        fitting = [part for part in self._free if part[1] >= rounded]
        if not fitting:
            return None
        best = min(fitting, key=lambda part: part[1])
        self._free.remove(best)
        (piece, offset), found = best
        if found > rounded:
            insort(self._free, ((piece, offset + rounded), found - rounded))
        return piece, offset

    def give_back(self, place: Place, size: int) -> None:
        """Take a part of a size back."""
        insort(self._free, (place, self.rounded(size)))
        merged: list[tuple[Place, int]] = []
        for (piece, offset), found in self._free:
            if merged and merged[-1][0] == (piece, offset - merged[-1][1]):
                before_place, before = merged.pop()
                merged.append((before_place, before + found))
            else:
                merged.append(((piece, offset), found))
        self._free = merged
