"""Choose which calls to verify among those that run the same code on other data.

A loop over sequences calls a region with a new length in almost every step, and a model
that drops layers at random runs other layers. If each of these calls were verified, few
steps would be plain ones. Verified are: the 1st, 2nd, 4th, 8th, ... length and choice
of layers, and a share of all calls, for operators that turn out not to be reproducible
later on.
"""

from __future__ import annotations

from typing import Any

from membudget.engine.controls import SWITCHES

_MOST_SIZES = 4096


class Sampling:
    """The calls that differ in sizes alone, counted.

    Attributes:
        is_due: Whether the latest call is to be verified.
    """

    __slots__ = ("_calls", "_every", "_seen", "is_due")

    def __init__(self, share: float):
        """Choose the share of all calls that is verified whatever their sizes are."""
        self.is_due = False
        self._every = round(1 / share)
        self._calls = 0
        self._seen: set[int] = set()

    def count(self, signature: Any) -> None:
        """Count a call, given its signature with sizes, and decide whether it is due.

        While verification is postponed, nothing is counted.
        """
        self.is_due = False
        if SWITCHES.postponed:
            return
        self._calls += 1
        key, seen = hash(signature), self._seen
        is_new = key not in seen and len(seen) < _MOST_SIZES
        if is_new:
            seen.add(key)
        is_due_as_new = is_new and is_due_as(len(seen))
        self.is_due = is_due_as_new or self._calls % self._every == 0


def is_due_as(number: int) -> bool:
    """Return whether the n-th new size or sequence is verified: n = 1, 2, 4, 8, ...

    Example:
        >>> [number for number in range(1, 20) if is_due_as(number)]
        [1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0
