"""Find numbers and strings among the arguments that decide nothing.

Such a value may decide what runs, so that calls with another one are of another kind,
which is recorded and planned anew. That is wasted on a time, the number of a step or
the name of a sample. So recordings of equal sizes are compared:

    model(x, step=7, mode="a")    recorded  ┐
    model(x, step=8, mode="a")    recorded  ├─ equal, to the byte
    model(x, step=9, mode="a")    recorded  │
    model(x, step=10, mode="a")   recorded  ┘
    model(x, step=11, mode="a")   is of the kind of the first, from now on
    model(x, step=12, mode="b")   recorded: another mode was never compared
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from membudget.errors import BudgetWarning
from membudget.loop.situation import Situation, Sizes

Values = tuple[Hashable, ...]

ENOUGH = 4
"""Values with equal recordings after which others are taken to decide nothing, too."""

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
        seen: What the first recording of each size was, and its values.
        equal: At each place, values whose recordings were equal; of each no more than
            are enough.
        decides: Whether the values were found to decide something.
    """

    first: Hashable
    kinds: set[int] = field(default_factory=set)
    seen: dict[Sizes, tuple[Hashable, Values]] = field(default_factory=dict)
    equal: list[set[Hashable]] = field(default_factory=list)
    decides: bool = False

    def add(self, sizes: Sizes, recording: Hashable, values: Values) -> None:
        """Compare a recording with the first of its size."""
        if len(self.seen) >= MOST_SIZES:
            self.seen.clear()
        if sizes not in self.seen:
            self.seen[sizes] = recording, values
            return
        known, first = self.seen[sizes]
        self.decides |= known != recording
        self.equal = self.equal or [set() for _ in values]
        for equal, *of_both in zip(self.equal, first, values, strict=True):
            if len(equal) < ENOUGH:
                equal.update(of_both)

    def may_be_any(self, values: Values) -> bool:
        """Return whether each value was compared, or is one of many that may be any."""
        if self.decides or not self.equal:
            return False
        pairs = zip(self.equal, values, strict=True)
        return all(len(equal) >= ENOUGH or v in equal for equal, v in pairs)


class Numbers:
    """The numbers and strings with which one model is called."""

    def __init__(self) -> None:
        """Know of no call."""
        self._alike: dict[Hashable, _Alike] = {}
        self._served: _Alike | None = None  # Of the newest call.
        self._is_told = False

    def stand_in(self, called: Situation, is_measured: bool) -> Situation:
        """Return the situation whose plan serves a call, whatever its values are.

        Args:
            called: The situation of the call.
            is_measured: Whether it would be noticed if the call takes more.
        """
        self._served = None
        alike = self._alike.get(without_values(called.kind))
        if alike is None or alike.first == called.kind or not is_measured:
            return called
        if not alike.may_be_any(values_of(called.kind)):
            return called
        self._served = alike
        return called._replace(kind=alike.first)

    @property
    def has_stood_in(self) -> bool:
        """Whether the plan of another kind serves the newest call."""
        return self._served is not None

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

    def compare(self, situation: Situation, content: Callable[[], Hashable]) -> None:
        """Note what was recorded of a situation; `content` is called if it matters."""
        alike = self._alike.get(without_values(situation.kind))
        if alike is not None:
            alike.add(situation.sizes, content(), values_of(situation.kind))

    def doubt(self) -> bool:
        """Plan for each value again, as the newest call takes more than was expected.

        Returns:
            Whether the plan of another kind served that call.
        """
        if self._served is not None:
            self._served.decides = True
        return self._served is not None


def without_values(kind: Any) -> Hashable:
    """Return a kind of calls whatever the numbers and strings in their arguments are.

    Example:
        >>> without_values((((int, 3), (bool, True), (str, "a")), ("step",)))
        (('a number', (<class 'bool'>, True), 'a string'), ('step',))
    """
    told, *others = kind
    return tuple(_word_of(leaf) or leaf for leaf in told), *others


def values_of(kind: Any) -> Values:
    """Return these numbers and strings, in order.

    Example:
        >>> values_of((((int, 3), (bool, True), (str, "a")), ("step",)))
        (3, 'a')
    """
    return tuple(leaf[1] for leaf in kind[0] if _word_of(leaf))


def _word_of(leaf: Any) -> str:
    """Return what a number or string is called; nothing for any other argument."""
    if not isinstance(leaf, tuple) or not isinstance(leaf[0], type):
        return ""
    kind = leaf[0]
    if kind.__module__ == "numpy":  # Its classes derive from these.
        kind = next((of for of in _VALUES if issubclass(kind, of)), kind)
    return _VALUES.get(kind, "")
