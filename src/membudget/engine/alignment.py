"""Align the operators of a call with the sequence of operators that a plan names.

A plan numbers the operators of one recorded call. Another call may run fewer or more:
a layer is dropped at random, an expert gets no token, a loop takes another turn. Each
operator then gets the number of its counterpart in the plan, so that what the plan says
of one layer holds for another that is alike.

    plan      embed  a b c d  a b c d  norm
    numbers       1  2 3 4 5  6 7 8 9    10
    a call    embed  a b c d  norm
    numbers       1  2 3 4 5    10
    a call    embed  a b c d  a b c d  a b c d  norm
    numbers       1  2 3 4 5  6 7 8 9  6 7 8 9    10

Where an operator is not the next of the sequence, its number is that of the place whose
operators before it are like the latest ones of the call for the longest stretch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from membudget.operator_names import common_name

_LEAST = 4  # Operators that must be alike before a place is taken for a counterpart,
_FAR = 16  # and before one that is further back than this.
_MOST = 64  # Operators back to which places are compared.


class OperatorSequence:
    """The operators of a recorded call, in order.

    Attributes:
        names: The common name of each.
    """

    def __init__(self, names: Iterable[str]):
        """Create a sequence from names of overloads."""
        self.names = tuple(map(common_name, names))

    @cached_property
    def _ends(self) -> dict[tuple[str, ...], list[int]]:
        """Where each short run of operators ends, counted from 1."""
        found: dict[tuple[str, ...], list[int]] = {}
        for end in range(_LEAST, len(self.names) + 1):
            found.setdefault(self.names[end - _LEAST : end], []).append(end)
        return found

    def place_after(self, latest: Sequence[str], near: int) -> int | None:
        """Return the number of the operator that stands where the latest one does.

        Of places that are equally alike, it is the next one from `near` on, or else
        the last one before; `None` if no place is alike.
        """
        ends = self._ends.get(tuple(latest[-_LEAST:]), ())
        best, longest = None, 0
        for end in sorted(ends, key=lambda end: (end < near, abs(end - near))):
            alike = self._alike(latest, end)
            if alike > longest and (alike >= _FAR or end > near - _FAR):
                best, longest = end, alike
            if longest == len(latest):
                break
        return best

    def _alike(self, latest: Sequence[str], end: int) -> int:
        """Return how many operators before a place are like the latest ones."""
        most = min(len(latest), end)
        for count in range(most):
            if latest[-1 - count] is not self.names[end - 1 - count]:
                return count
        return most


class Alignment:
    """How far the operators of one call have come in a sequence.

    Attributes:
        names: The common names of the sequence.
        has_left: Whether the call has skipped operators of the sequence or gone back.
        returns: Each time that it has gone back: how many operations had been recorded,
            and to which number. A *turn* begins there: operators from that number on
            have a counterpart once more.
        lost: Which operator of the call was the first with a number that may be wrong.
    """

    __slots__ = (
        *("_begin", "_is_lost", "_sequence", "_tail", "has_left", "lost", "names"),
        "returns",
    )

    def __init__(self, sequence: OperatorSequence):
        """Begin at the start of a sequence."""
        self._sequence = sequence
        self.names = sequence.names
        self.has_left = False
        self.returns: list[tuple[int, int]] = []
        self._tail: tuple[str, ...] = ()  # Operators before the current stretch.
        self.lost = 0
        self._is_lost = False
        self._begin = 0  # Where the stretch began that has followed the sequence since.

    def number_of(self, name: str, place: int, count: int, recorded: int) -> int:
        """Return the number of an operator that is not the next of the sequence.

        Args:
            name: The operator's common name.
            place: The number of the operator before it.
            count: How many operators the call has run, with this one.
            recorded: How many operations have been recorded.
        """
        stretch = self.names[max(self._begin, place - _MOST) : place]
        self._tail = (*self._tail, *stretch, name)[-_MOST:]
        found = self._sequence.place_after(self._tail, place)
        if not self._is_lost or self.lost <= count - _FAR:
            self.lost = count
        # It may stand in for the next one: numbers go on until more is known.
        self._is_lost = found is None
        number = place + 1 if found is None else found
        self.has_left |= number != place + 1
        if number <= place:
            self.returns.append((recorded, number))
        self._begin = number
        return number
