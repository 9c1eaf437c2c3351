"""Tell the user of numbers that make ever new kinds of calls.

A number among the arguments may decide what runs, so that calls with another one are
recorded and planned anew. That is wasted on a number that changes from step to step and
decides nothing, such as a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

from membudget.errors import BudgetWarning

MANY = 8
"""Numbers in otherwise equal calls of which the user is told."""


class Numbers:
    """The numbers with which one model is called."""

    def __init__(self) -> None:
        """Know of no call."""
        self._kinds: dict[Hashable, set[Hashable]] = {}
        self._is_told = False

    def look(self, kind: Any) -> None:
        """Note a kind of calls.

        Warns:
            BudgetWarning: Once, if many differ in numbers alone.
        """
        alike = without_numbers(kind)
        if self._is_told or alike == kind:
            return
        kinds = self._kinds.setdefault(alike, set())
        kinds.add(hash(kind))
        if len(kinds) == MANY:
            self._is_told = True
            self._kinds.clear()
            warnings.warn(
                f"the model was called with {MANY} different numbers in otherwise "
                "equal calls, and each is recorded and planned anew: pass a number "
                "that changes from step to step as a tensor",
                BudgetWarning,
                stacklevel=2,
            )


def without_numbers(kind: Any) -> Hashable:
    """Return a kind of calls whatever the numbers among their arguments are.

    Example:
        >>> without_numbers((((int, 3), (bool, True)), ("step",)))
        (('a number', (<class 'bool'>, True)), ('step',))
    """
    told, *others = kind
    leaves = (
        "a number" if isinstance(leaf, tuple) and leaf[0] in (int, float) else leaf
        for leaf in told
    )
    return tuple(leaves), *others
