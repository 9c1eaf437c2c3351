"""Schedules of equal steps, played action by action and counted."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membudget.errors import OptionError
from membudget.planner.revolve import (
    Action,
    beta,
    forward_steps,
    halving,
    halving_forward_steps,
    repetitions,
    schedule,
)


@dataclass
class Played:
    """What came of a schedule.

    Attributes:
        order: The steps whose backward ran, in order.
        forwards: How often each step ran forward.
        slots: How many states were stored at most.
    """

    order: list[int] = field(default_factory=list)
    forwards: Counter[int] = field(default_factory=Counter)
    slots: int = 0


def play(actions: Iterable[Action]) -> Played:
    """Play a schedule: each action must find the state that it needs."""
    played = Played()
    state: int | None = 0
    stored: dict[int, int] = {}
    for action in actions:
        if action.kind == "restore":
            assert stored[action.slot] == action.step
            state = action.step
        assert state == action.step
        if action.kind == "advance":
            assert action.end > action.step
            played.forwards.update(range(action.step, action.end))
            state = action.end
        elif action.kind == "snapshot":
            assert action.slot >= 0
            stored[action.slot] = action.step
            played.slots = max(played.slots, len(stored))
        elif action.kind == "backward":
            played.order.append(action.step)
            state = None
    return played


@functools.cache
def least(steps: int, snapshots: int) -> int:
    """Return the fewest forward steps by the recurrence."""
    if steps == 1:
        return 0
    if snapshots == 1:
        return steps * (steps - 1) // 2
    return min(
        m + least(steps - m, snapshots - 1) + least(m, snapshots)
        for m in range(1, steps)
    )


@given(st.integers(1, 300), st.integers(1, 20))
def test_a_schedule_reverses_all_steps_with_the_fewest_forward_steps(steps, snapshots):
    played = play(schedule(steps, snapshots))
    assert played.order == list(reversed(range(steps)))
    assert played.slots <= snapshots
    assert played.forwards.total() == forward_steps(steps, snapshots)
    assert max(played.forwards.values(), default=0) <= repetitions(steps, snapshots)


@given(st.integers(1, 60), st.integers(1, 60))
def test_the_closed_form_is_the_recurrence(steps, snapshots):
    assert forward_steps(steps, snapshots) == least(steps, snapshots)


@given(st.integers(1, 30), st.integers(0, 30))
def test_beta_is_the_binomial_and_obeys_its_recurrence(snapshots, times):
    assert beta(snapshots, times) == math.comb(snapshots + times, snapshots)
    assert beta(snapshots, times) == beta(snapshots - 1, times) + beta(
        snapshots, times - 1
    )


@given(st.integers(1, 12), st.integers(1, 5))
def test_beta_steps_are_the_most_with_that_many_repetitions(snapshots, times):
    most = beta(snapshots, times)
    assert repetitions(most, snapshots) == times
    assert repetitions(most + 1, snapshots) == times + 1


def test_all_steps_but_the_last_run_once_when_there_is_a_snapshot_for_each():
    assert all(forward_steps(n, n) == n - 1 for n in range(1, 50))


def test_one_snapshot_takes_all_steps_from_the_beginning_each_time():
    assert all(forward_steps(n, 1) == n * (n - 1) // 2 for n in range(1, 50))


def test_ten_steps_with_three_snapshots_are_those_of_the_paper():
    advances = [(a.step, a.end) for a in schedule(10, 3) if a.kind == "advance"]
    assert advances[:2] == [(0, 4), (4, 7)]
    assert sum(end - step for step, end in advances) == 15


@given(st.integers(1, 600))
def test_halving_reverses_all_steps_with_few_snapshots(steps):
    played = play(halving(steps))
    assert played.order == list(reversed(range(steps)))
    assert played.slots == math.ceil(math.log2(steps))
    assert played.forwards.total() == halving_forward_steps(steps)


@given(st.integers(1, 5000))
def test_halving_takes_the_ones_in_the_numbers_below_the_steps(steps):
    assert halving_forward_steps(steps) == sum(i.bit_count() for i in range(steps))


@pytest.mark.parametrize("power", range(12))
def test_halving_a_power_of_two_takes_half_a_logarithm_a_step(power):
    assert halving_forward_steps(2**power) * 2 == 2**power * power


@given(st.integers(2, 400))
def test_halving_takes_no_fewer_forward_steps_than_the_binomial_schedule(steps):
    snapshots = math.ceil(math.log2(steps))
    assert forward_steps(steps, snapshots) <= halving_forward_steps(steps)


def test_many_steps_are_scheduled_without_deep_recursion():
    assert sum(a.kind == "backward" for a in schedule(20_000, 3)) == 20_000
    assert sum(a.kind == "backward" for a in schedule(800, 800)) == 800


@pytest.mark.parametrize(
    "call", [schedule, forward_steps, repetitions, lambda n, s: halving(n)]
)
def test_no_steps_are_refused(call):
    with pytest.raises(OptionError, match="at least one step; got 0"):
        call(0, 3)


@pytest.mark.parametrize("call", [schedule, forward_steps, repetitions])
def test_no_snapshots_are_refused(call):
    with pytest.raises(OptionError, match="at least one state, the first; got 0"):
        call(3, 0)


def test_fewer_than_no_snapshots_are_refused():
    with pytest.raises(OptionError, match="0 snapshots or more; got -1"):
        beta(-1, 3)
