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

If this one is not equal, the mode decides: the step differed in equal recordings. Then
calls with mode "b" are compared with each other alone.
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
"""Sizes of which recordings are known."""

MOST_VALUES = 64
"""Recordings of one size that are known, and modes; the oldest goes first."""

_VALUES = {int: "a number", float: "a number", str: "a string"}


@dataclass
class _SameMode:
    """Calls that are equal but for values that decide nothing, as far as is known.

    Attributes:
        first: The kind of the first of them.
        seen: The first values of each size that were recorded.
        equal: At each place, values whose recordings were equal; of each no more than
            are enough.
    """

    first: Hashable
    seen: dict[Sizes, Values] = field(default_factory=dict)
    equal: dict[int, set[Hashable]] = field(default_factory=dict)

    def add(self, sizes: Sizes, values: Values) -> None:
        """Note the values of a recording, which equals the others of its size."""
        first = self.seen.setdefault(sizes, values)
        if first == values:
            return
        for place, of_both in enumerate(zip(first, values, strict=True)):
            equal = self.equal.setdefault(place, set())
            if len(equal) < ENOUGH:
                equal.update(of_both)

    def has(self, place: int, value: Hashable) -> bool:
        """Return whether a value was compared, or enough others were."""
        equal = self.equal.get(place, ())
        return value in equal or len(equal) >= ENOUGH


@dataclass
class _Alike:
    """Calls that are equal but for numbers and strings.

    Attributes:
        kinds: Hashes of their kinds, as long as they are counted.
        seen: What was recorded of each size, and of which kind, by the values.
        idle: Places at which values of equal recordings differ.
        unequal: The places at which those of two unequal ones do, for each such pair.
        deciding: Places at which values are found to decide something.
        modes: Calls with the same values at these places, by those.
        is_any: Whether any value may decide something.
    """

    kinds: set[int] = field(default_factory=set)
    seen: dict[Sizes, dict[Values, tuple[Hashable, Hashable]]] = field(
        default_factory=dict
    )
    idle: frozenset[int] = frozenset()
    unequal: set[frozenset[int]] = field(default_factory=set)
    deciding: frozenset[int] = frozenset()
    modes: dict[Values, _SameMode] = field(default_factory=dict)
    is_any: bool = False

    def add(self, situation: Situation, recording: Hashable) -> None:
        """Compare a recording with the others of its size."""
        sizes, values = situation.sizes, values_of(situation.kind)
        if len(self.seen) >= MOST_SIZES:
            self.seen.clear()
        known = self.seen.setdefault(sizes, {})
        for others, (of_others, _) in known.items():
            pairs = enumerate(zip(values, others, strict=True))
            places = frozenset(place for place, (a, b) in pairs if a != b)
            if of_others == recording:
                self.idle |= places
            elif places:
                self.unequal.add(places)
            else:
                self.is_any = True  # What is not among the arguments decides, too.
        known[values] = recording, situation.kind
        if len(known) > MOST_VALUES:
            del known[next(iter(known))]
        self._put_in_mode(sizes, values, situation.kind)
        found = ((places - self.idle) or places for places in self.unequal)
        deciding = frozenset[int]().union(*found)
        if deciding != self.deciding:
            self.deciding, self.modes = deciding, {}
            for size, of_size in self.seen.items():
                for value, (_, kind) in of_size.items():
                    self._put_in_mode(size, value, kind)

    def _put_in_mode(self, sizes: Sizes, values: Values, kind: Hashable) -> None:
        self.modes.setdefault(self._key(values), _SameMode(kind)).add(sizes, values)
        if len(self.modes) > MOST_VALUES:
            del self.modes[next(iter(self.modes))]

    def _key(self, values: Values) -> Values:
        return tuple(values[place] for place in sorted(self.deciding))

    def first(self, values: Values) -> Hashable | None:
        """Return the kind whose plan serves such calls; `None` if none is known to."""
        mode = None if self.is_any else self.modes.get(self._key(values))
        others = set(range(len(values))) - self.deciding
        if mode is None or not others:
            return None
        return mode.first if all(mode.has(p, values[p]) for p in others) else None

    def count(self, kind: Hashable) -> bool:
        """Count a kind; return whether there are so many that the user is told.

        Where a mode decides and a step does not, there may be as many of each mode.
        """
        self.kinds.add(hash(kind))
        is_mixed = 0 < len(self.deciding) < len(values_of(kind))
        has_modes = is_mixed and len(self.modes) < MANY
        return len(self.kinds) >= MANY * (len(self.modes) if has_modes else 1)


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
        alike = self._alike.get(without_values(called.kind)) if is_measured else None
        first = None if alike is None else alike.first(values_of(called.kind))
        if first is None or first == called.kind:
            return called
        self._served = alike
        return called._replace(kind=first)

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
        alike = self._alike.setdefault(pattern, _Alike())
        if not self._is_told and alike.count(kind):
            self._is_told = True
            warnings.warn(
                f"the model was called with {len(alike.kinds)} different numbers or "
                "strings in otherwise equal calls, and each is recorded and planned "
                "anew: pass a number that changes from step to step as a tensor",
                BudgetWarning,
                stacklevel=2,
            )

    def compare(self, situation: Situation, content: Callable[[], Hashable]) -> None:
        """Note what was recorded of a situation; `content` is called if it matters."""
        alike = self._alike.get(without_values(situation.kind))
        if alike is not None:
            alike.add(situation, content())

    def doubt(self) -> bool:
        """Plan for each value again, as the newest call takes more than was expected.

        Returns:
            Whether the plan of another kind served that call.
        """
        if self._served is not None:
            self._served.is_any = True
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
