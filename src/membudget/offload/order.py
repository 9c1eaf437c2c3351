"""Know from earlier steps in which order a backward pass asks for saved storages.

A storage has a number: its place among those saved since the last backward pass ended.
A step is known again by the sizes of what it saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MOST_KNOWN = 64
"""Steps of different sizes that are remembered."""


@dataclass
class Recorded:
    """What one step saved and asked for.

    Attributes:
        sizes: Bytes of each storage, by number.
        saves: How often each was saved, by number.
        asked: Numbers, in the order in which they were first asked for.
        living: Numbers of storages that somebody else keeps alive.
    """

    sizes: list[int] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    asked: dict[int, None] = field(default_factory=dict)  # An ordered set.
    living: set[int] = field(default_factory=set)

    def first(self, limit_bytes: int) -> set[int]:
        """Return the numbers that are asked for first, up to a number of bytes."""
        found: set[int] = set()
        for number in self.asked:
            if number not in self.living:
                limit_bytes -= self.sizes[number]
                if limit_bytes < 0:
                    break
                found.add(number)
        return found


class Order:
    """What steps ask for, by the sizes of what they saved.

    Attributes:
        now: What the step that is running has saved and asked for so far.
        expected: An earlier step that began like this one, if there is one.
        kept: Numbers that are asked for first in that step, to be kept on the device.
    """

    def __init__(self, keep_bytes: int) -> None:
        """Know nothing; keep so many bytes of what is asked for first."""
        self.now = Recorded()
        self.expected: Recorded | None = None
        self.kept: set[int] = set()
        self._keep_bytes = keep_bytes
        self._known: list[Recorded] = []  # The latest one is the last.
        self._coming: list[int] = []  # The next one is the last.

    def begin_step(self) -> None:
        """Remember the step that has ended, and expect another one like it."""
        if self.now.asked:
            others = [known for known in self._known if known.sizes != self.now.sizes]
            self._known = [*others[1 - MOST_KNOWN :], self.now]
        self.now = Recorded()
        self._expect(self._known[-1] if self._known else None)

    def _expect(self, step: Recorded | None) -> None:
        self.expected = step
        self.kept = step.first(self._keep_bytes) if step else set()
        self._coming = [*reversed(step.asked)] if step else []

    def save(self, size: int) -> int:
        """Note a storage that is saved; return its number."""
        number = len(self.now.sizes)
        self.now.sizes.append(size)
        self.now.saves.append(1)
        if self.expected is not None:
            expected = self.expected.sizes
            if number >= len(expected) or expected[number] != size:
                self._expect(self._beginning_like_now())
        return number

    def _beginning_like_now(self) -> Recorded | None:
        sizes = self.now.sizes
        for known in reversed(self._known):
            if known.sizes[: len(sizes)] == sizes:
                return known
        return None

    def ask(self, number: int) -> None:
        """Note that a storage is asked for; only the first time counts."""
        self.now.asked.setdefault(number)

    def coming(self) -> Iterator[int]:
        """Yield the numbers that are expected next; none if the step is unknown."""
        while self._coming and self._coming[-1] in self.now.asked:
            self._coming.pop()
        for number in reversed(self._coming):
            if number not in self.now.asked:
                yield number
