"""Find numbers and strings among the arguments that decide nothing.

Such a value may decide what runs, so that calls with another one are of another kind,
which is recorded and planned anew. That is wasted on a time, the number of a step or
the name of a sample. So recordings of equal sizes are compared:

    model(x, step=7)    recorded  ┐
    model(x, step=8)    recorded  ├─ equal, to the byte
    model(x, step=9)    recorded  │
    model(x, step=10)   recorded  ┘
    model(x, step=11)   is of the kind of the first, from now on
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from membudget.errors import BudgetWarning
from membudget.loop.situation import Situation, Sizes

ENOUGH = 4
"""Equal recordings after which values are taken to decide nothing."""

MANY = 8
"""Values in otherwise equal calls of which the user is told."""

MOST_SIZES = 64
"""Sizes of which the first recording is known."""

_VALUES = {int: "a number", float: "a number", str: "a string"}


@dataclass
class _Alike:
    """Calls that are equal but for numbers and strings.

    Attributes:
        first: The kind of the first of them.
        kinds: Hashes of their kinds, as long as they are counted.
        seen: What the first recording of each size was.
        equal: How many recordings of one size were equal, at most.
        decides: Whether the values were found to decide something.
    """

    first: Hashable
    kinds: set[int] = field(default_factory=set)
    seen: dict[Sizes, tuple[Hashable, int]] = field(default_factory=dict)
    equal: int = 0
    decides: bool = False

    def add(self, sizes: Sizes, recording: Hashable) -> None:
        """Compare a recording with the first of its size."""
        if len(self.seen) >= MOST_SIZES:
            self.seen.clear()
        known, count = self.seen.get(sizes, (recording, 0))
        self.decides |= known != recording
        self.seen[sizes] = known, count + 1
        self.equal = max(self.equal, count + 1)


class Numbers:
    """The numbers and strings with which one model is called."""

    def __init__(self) -> None:
        """Know of no call."""
        self._alike: dict[Hashable, _Alike] = {}
        self._is_told = False

    def stand_in(self, situation: Situation) -> Situation:
        """Return the situation whose plan serves, whatever the values are."""
        alike = self._alike.get(without_values(situation.kind))
        if alike is None or alike.decides or alike.equal < ENOUGH:
            return situation
        return situation._replace(kind=alike.first)

    def look(self, kind: Any) -> None:
        """Note a kind of calls.

        Warns:
            BudgetWarning: Once, if many differ in numbers or strings alone.
        """
        pattern = without_values(kind)
        if pattern == kind:
            return
        alike = self._alike.setdefault(pattern, _Alike(kind))
        if self._is_told:
            return
        alike.kinds.add(hash(kind))
        if len(alike.kinds) == MANY:
            self._is_told = True
            warnings.warn(
                f"the model was called with {MANY} different numbers or strings in "
                "otherwise equal calls, and each is recorded and planned anew: pass a "
                "number that changes from step to step as a tensor",
                BudgetWarning,
                stacklevel=2,
            )

    def compare(self, situation: Situation, recording: Hashable) -> None:
        """Note what the recording of a situation was."""
        alike = self._alike.get(without_values(situation.kind))
        if alike is not None:
            alike.add(situation.sizes, recording)

    def doubt(self, kind: Hashable) -> None:
        """Plan for each value again: a call took more than the first of its kind."""
        alike = self._alike.get(without_values(kind))
        if alike is not None:
            alike.decides = True


def without_values(kind: Any) -> Hashable:
    """Return a kind of calls whatever the numbers and strings in their arguments are.

    Example:
        >>> without_values((((int, 3), (bool, True), (str, "a")), ("step",)))
        (('a number', (<class 'bool'>, True), 'a string'), ('step',))
    """
    told, *others = kind
    leaves = (
        _VALUES.get(leaf[0], leaf) if isinstance(leaf, tuple) else leaf for leaf in told
    )
    return tuple(leaves), *others
