"""Race the plan that was found for a step against others that fit; take the fastest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from membudget.allocation import without_shortage
from membudget.allowance import Budget
from membudget.apply import Applied
from membudget.attempt import Attempt, run_plan
from membudget.deadline import Deadline
from membudget.errors import RecomputeMismatchError, UnrepeatableWarning
from membudget.outcome import Metered
from membudget.planned import PlanRegions, put_on, take_off
from membudget.planner.schedule import Schedule
from membudget.planning import make_plan, unseen_bytes
from membudget.profile import Profile
from membudget.race import DISTURBED_ROUNDS, NEARLY, Slowdown, race
from membudget.step import Step
from membudget.terms import is_far_off, repriced

MOST_STEPS, MOST_S = 33, 1.8
"""Plain steps and seconds after which timing is as short as can be.

`fit` is to take 35 plain steps and 2 s at most. Something follows, and CPU time varies.
"""


@dataclass
class Fitting:
    """Plans that were tried, the last of which fits, and is applied.

    Attributes:
        profile: The profile that the plans are of.
        attempts: Every plan, with its measured peak.
        applied: The regions of the last.
        others: Schedules of other kinds that are predicted to fit, too.
        left_out: Why a module has no region, by its path.
    """

    profile: Profile
    attempts: list[Attempt]
    applied: Applied
    others: Sequence[Schedule]
    left_out: dict[str, str] = field(default_factory=dict)


class _Entry(NamedTuple):
    """A plan in a race, with what it warned of."""

    attempt: Attempt
    applied: Applied
    regions: PlanRegions
    warned: list[warnings.WarningMessage]


def take_fastest(
    step: Step,
    plain: Metered,
    budget: Budget,
    found: Fitting,
    others: Sequence[Schedule],
    deadline: Deadline,
) -> Slowdown | None:
    """Race the plan that was found against others that fit; apply the fastest.

    The first is applied, and nothing returned, if a plain step runs out of memory or
    the time is over.

    Warns:
        UnrepeatableWarning: Those of the fastest plan, if it is not the first.
    """
    profile, unseen = found.profile, unseen_bytes(found.profile, plain)
    entries = [_Entry(found.attempts.pop(), found.applied, take_off(step.model), [])]
    slowest = entries[0].attempt.schedule.slowdown + NEARLY
    for schedule in (other for other in others if other.slowdown <= slowest):
        if deadline.forbids("plans with other engines"):
            break
        plan = make_plan(profile, schedule, step.model, budget.step_bytes, unseen)
        wrong = suppress(RecomputeMismatchError)
        with wrong, without_shortage(), _held_back() as warned:
            attempt, applied = run_plan(step, plan, schedule, plain, len(entries) + 1)
            regions = take_off(step.model)
            if attempt.peak_bytes <= budget.step_bytes:
                entries.append(_Entry(attempt, applied, regions, warned))
    place, slowdown = 0, None
    if not deadline.forbids("timing steps"):
        with without_shortage():
            raced = [entry.regions for entry in entries]
            place, slowdown = race(step, raced, enough_s=_timing_s(profile, deadline))
    fastest = entries[place]
    priced = fastest.attempt
    if slowdown is not None:
        priced = repriced(profile, priced, slowdown)
        is_short = slowdown.rounds < DISTURBED_ROUNDS
        is_doubtful = is_short and is_far_off(priced, slowdown)
        has_time = _timing_s(profile, deadline) > 0
        if is_doubtful and has_time and not deadline.forbids("timing more steps"):
            with without_shortage():
                _, slowdown = race(step, [fastest.regions], DISTURBED_ROUNDS, slowdown)
            priced = repriced(profile, fastest.attempt, slowdown)
    for warning in fastest.warned:  # First: where it is an error, no plan stays.
        _issue(warning)
    put_on(fastest.regions)
    found.attempts.append(priced)
    found.applied = fastest.applied
    return slowdown


def _timing_s(profile: Profile, deadline: Deadline) -> float:
    """Return for how long steps may be timed, once they were the least number."""
    if profile.cost != "measured":  # The seconds may be those of another machine.
        return math.inf
    return MOST_STEPS * profile.graph.seconds + MOST_S - deadline.spent_s


@contextmanager
def _held_back() -> Iterator[list[warnings.WarningMessage]]:
    """Collect what a plan that may not be taken warns of; let other warnings pass."""
    held: list[warnings.WarningMessage] = []
    found: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UnrepeatableWarning)
            yield held
    finally:
        for warning in found:
            is_held = issubclass(warning.category, UnrepeatableWarning)
            held.append(warning) if is_held else _issue(warning)


def _issue(warning: warnings.WarningMessage) -> None:
    """Issue a recorded warning, from where it came."""
    where = warning.filename, warning.lineno
    warnings.warn_explicit(warning.message, warning.category, *where)
