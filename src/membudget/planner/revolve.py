"""Reversal of equal steps with few snapshots: the fewest forward steps there can be.

The problem: n steps, each of which makes the next state from the one before; the
backward wants the states in reverse, and s of them can be stored at once, the first
among them. Griewank & Walther 2000 ("Algorithm 799: revolve"): if each step runs at
most r times forward,

    β(s, r) = C(s + r, s) = β(s − 1, r) + β(s, r − 1)

steps can be reversed: the first snapshot after the beginning lies where β(s, r − 1)
steps are left of it, to run once less, and β(s − 1, r) right of it, with one snapshot
less. For n in between, the fewest forward steps are

    t(n, s) = min over 0 < m < n of  m + t(n − m, s − 1) + t(m, s)
            = r · n − β(s + 1, r − 1)      where β(s, r − 1) < n ≤ β(s, r)

with t(1, s) = 0. The backward of a step runs that step itself, to see inside of it;
those n runs, which every schedule has, are not counted.

Halving, which puts m in the middle, is the schedule with O(log n) snapshots and
O(n log n) forward steps (Griewank 1992; Chen et al. 2016 for training):

    h(n) = ⌊n/2⌋ + h(⌈n/2⌉) + h(⌊n/2⌋) = number of ones in the binary of 0, …, n − 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from membudget.errors import OptionError


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a schedule; it acts on the current state and on slots.

    Attributes:
        kind: `"advance"` runs the steps from `step` to before `end` forward;
            `"snapshot"` stores the current state, that before `step`, in `slot`, and
            replaces what was there; `"restore"` makes what is in `slot`, the state
            before `step`, the current one; `"backward"` runs the backward of `step`,
            for which the current state must be the one before it.
        step: The step before which the state lies that the action is about.
        end: Of an advance: the step before which it stops; otherwise `step`.
        slot: Of a snapshot or restore; otherwise −1.
    """

    kind: Literal["advance", "snapshot", "restore", "backward"]
    step: int
    end: int
    slot: int = -1


def beta(snapshots: int, repetitions: int) -> int:
    """Return the most steps that can be reversed.

    Args:
        snapshots: How many states can be stored, the first among them.
        repetitions: How often a step may run forward; 0 steps for fewer than none.

    Raises:
        OptionError: If there are fewer than no snapshots.

    Example:
        >>> beta(3, 2), beta(1, 4), beta(0, 7)
        (10, 5, 1)
    """
    if snapshots < 0:
        raise OptionError(f"there are 0 snapshots or more; got {snapshots}")
    return math.comb(snapshots + repetitions, snapshots) if repetitions >= 0 else 0


def repetitions(steps: int, snapshots: int) -> int:
    """Return how often a step runs forward at most: the least r with n ≤ β(s, r).

    Args:
        steps: How many steps are reversed.
        snapshots: How many states can be stored, the first among them.

    Raises:
        OptionError: If there is no step or no snapshot.

    Example:
        >>> repetitions(10, 3), repetitions(11, 3)
        (2, 3)
    """
    _check(steps, snapshots)
    found, reach = 0, 1
    while reach < steps:
        found += 1
        reach = reach * (snapshots + found) // found
    return found


def forward_steps(steps: int, snapshots: int) -> int:
    """Return the fewest forward steps, without those inside backwards.

    Args:
        steps: How many steps are reversed.
        snapshots: How many states can be stored, the first among them.

    Raises:
        OptionError: If there is no step or no snapshot.

    Example:
        >>> forward_steps(10, 3), forward_steps(10, 10), forward_steps(10, 1)
        (15, 9, 45)
    """
    r = repetitions(steps, snapshots)
    return r * steps - beta(snapshots + 1, r - 1)


def schedule(steps: int, snapshots: int) -> Iterator[Action]:
    """Yield the actions that reverse the steps with the fewest forward steps.

    The state before step 0 is the current one when it begins.

    Args:
        steps: How many steps are reversed.
        snapshots: How many states can be stored, the first among them.

    Raises:
        OptionError: If there is no step or no snapshot.

    Example:
        >>> [(a.kind, a.step, a.end) for a in schedule(2, 1)]  # doctest: +ELLIPSIS
        [('snapshot', 0, 0), ('advance', 0, 1), ('backward', 1, 1), ('restore', ...]
    """
    _check(steps, snapshots)
    return _whole(steps, snapshots, _binomial)


def halving(steps: int) -> Iterator[Action]:
    """Yield the actions that reverse the steps by halves.

    At most ⌈log₂ n⌉ states are stored at once.

    Args:
        steps: How many steps are reversed.

    Raises:
        OptionError: If there is no step.
    """
    _check(steps, 1)
    return _whole(steps, steps, _half)


def halving_forward_steps(steps: int) -> int:
    """Return the forward steps of `halving`, without those inside backwards.

    Args:
        steps: How many steps are reversed.

    Raises:
        OptionError: If there is no step.

    Example:
        >>> [halving_forward_steps(n) for n in (1, 2, 3, 4, 8)]
        [0, 1, 2, 4, 12]
    """
    _check(steps, 1)
    ones, bit = 0, 1
    while bit < steps:
        # Of each 2·bit numbers, the last `bit` have this bit.
        ones += steps // (2 * bit) * bit + max(0, steps % (2 * bit) - bit)
        bit *= 2
    return ones


def _binomial(steps: int, snapshots: int) -> int:
    """Return how many steps lie left of the next snapshot.

    Any m is best for which β(s, r − 2) ≤ m ≤ β(s, r − 1) and β(s − 1, r − 1) ≤ n − m ≤
    β(s − 1, r): then t(m, s) and t(n − m, s − 1) grow by r − 1 and r a step, so moving
    the snapshot gains nothing. This is the largest of them.
    """
    r = repetitions(steps, snapshots)
    return min(beta(snapshots, r - 1), steps - beta(snapshots - 1, r - 1))


def _half(steps: int, snapshots: int) -> int:
    del snapshots
    return steps // 2


_Split = Callable[[int, int], int]
"""How many of some steps lie left of the next snapshot, with some snapshots left."""


def _whole(steps: int, snapshots: int, split: _Split) -> Iterator[Action]:
    if steps > 1:
        yield Action("snapshot", 0, 0, 0)
    yield from _reverse(0, steps, 0, snapshots, split)


def _reverse(
    start: int, end: int, slot: int, snapshots: int, split: _Split
) -> Iterator[Action]:
    """Reverse steps; the state before them is current, and stored if they are many."""
    while end - start > 1:
        middle = start + split(end - start, snapshots)
        yield Action("advance", start, middle)
        if end - middle > 1:
            yield Action("snapshot", middle, middle, slot + 1)
        # One step alone needs no snapshot: its backward follows at once.
        yield from _reverse(middle, end, slot + 1, snapshots - 1, split)
        yield Action("restore", start, start, slot)
        end = middle
    yield Action("backward", start, start)


def _check(steps: int, snapshots: int) -> None:
    if steps < 1:
        raise OptionError(f"a reversal has at least one step; got {steps}")
    if snapshots < 1:
        raise OptionError(
            f"a reversal stores at least one state, the first; got {snapshots}"
        )
