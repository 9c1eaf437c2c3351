"""Fit a step that is recorded already: plan, apply, verify, measure, race."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple

from membudget._torch_accelerator import can_be_limited
from membudget.allocation import without_shortage
from membudget.allowance import Budget
from membudget.apply import Applied
from membudget.attempt import Attempt, RegionsAtFaultError, try_plan
from membudget.deadline import Deadline
from membudget.errors import (
    BudgetError,
    MembudgetError,
    RecomputeMismatchError,
    UnrepeatableWarning,
)
from membudget.fitted import NOT_COMPARED, Fitted
from membudget.host import AskedHost
from membudget.limited import try_limited
from membudget.memory import storage_bytes
from membudget.memory.allocator import RESERVED, at_rest
from membudget.modes import AUTO
from membudget.outcome import Metered, plain_run
from membudget.planned import PlanRegions, put_on, take_off
from membudget.planner.schedule import Schedule
from membudget.planning import (
    make_plan,
    next_schedules,
    planner_of,
    unlike_bytes,
    unseen_bytes,
    without_calls,
)
from membudget.profile import Profile
from membudget.profile.cache import FROM_CACHE
from membudget.race import DISTURBED_ROUNDS, NEARLY, Slowdown, race
from membudget.refusal import explaining_shortage
from membudget.rehearsal import Rehearsal
from membudget.report.kept_text import kept_text
from membudget.step import Step
from membudget.terms import is_far_off, repriced

Measure = Literal["best", "one", "none"]

QUICK_S = 1.0
"""A plain step of fewer seconds is quick enough to time several plans."""


class StaleProfileError(MembudgetError):
    """A profile that was read from a cache is not that of the step."""


def fit_recorded(
    step: Step,
    profile: Profile,
    budget: Budget,
    mode: str = AUTO,
    measure: Measure | None = None,
    deadline: Deadline | None = None,
    given: AskedHost | None = None,
) -> Fitted:
    """Fit an already profiled step; see `fit` for what is raised and warned of.

    Raises:
        StaleProfileError: If the profile was read from a cache, and is of another step.
    """
    deadline = deadline or Deadline(None)
    step.optimizer = Rehearsal.of(profile.graph, budget.absent_bytes)
    plain = _measured(step, profile)
    _check_current(profile, plain)
    budget = budget_on_device(step, profile, plain, budget)
    if plain is None and profile.tensors == "real":
        profile = replace(profile, notes=(*profile.notes, NOT_COMPARED))
    left_out: dict[str, str] = {}
    while True:
        plannable = without_calls(profile, left_out)
        try:
            found = _first_that_fits(
                step, plannable, plain, budget, mode, deadline, given
            )
        except RegionsAtFaultError as error:
            left_out |= error.reasons
            warnings.warn(str(error), UnrepeatableWarning, stacklevel=3)
        except BudgetError as error:
            if plain is None and FROM_CACHE in profile.notes:
                raise StaleProfileError from error
            if left_out:
                error.add_note(str(RegionsAtFaultError(left_out)))
            raise
        else:
            break
    _check_current(profile, plain, found.applied)
    if measure is None:
        measure = "best" if profile.graph.seconds < QUICK_S else "one"
    slowdown = None
    if plain is not None and found.attempts[-1].plan.regions and measure != "none":
        others = found.others if measure == "best" else []
        slowdown = _raced(step, plannable, plain, budget, found, others, deadline)
    found.applied.left_out = left_out
    attempts, skipped = found.attempts, deadline.skipped
    return Fitted(mode, step, profile, attempts, found.applied, slowdown, skipped)


def _check_current(
    profile: Profile, plain: Metered | None, applied: Applied | None = None
) -> None:
    """Raise if a cached profile is not that of the steps that have run."""
    regions = () if applied is None else applied.status().regions
    differs = any(region.differences for region in regions)
    unseen = 0 if plain is None else unlike_bytes(profile, plain.live_bytes)
    if FROM_CACHE in profile.notes and (differs or unseen):
        if applied is not None:
            applied.remove()
        raise StaleProfileError


def budget_on_device(
    step: Step, profile: Profile, plain: Metered | None, budget: Budget
) -> Budget:
    """Return the budget for what the process reserves on the step's device."""
    if step.device.type == "cpu":
        return budget
    gradients = (leaf.grad for leaf in step.leaves() if leaf.grad is not None)
    # Every step runs with those set aside, and makes its own.
    reserved = at_rest(step.device)[RESERVED] - storage_bytes(gradients)
    plain_bytes = None if plain is None else plain.peak_bytes
    return budget.on_device(profile.graph, reserved, plain_bytes)


@dataclass
class _Fitting:
    """Plans that were tried, the last of which fits, and is applied.

    Attributes:
        attempts: Every plan, with its measured peak.
        applied: The regions of the last.
        others: Schedules of other kinds that are predicted to fit, too.
    """

    attempts: list[Attempt]
    applied: Applied
    others: Sequence[Schedule]


class _Entry(NamedTuple):
    """A plan in a race, with what it warned of."""

    attempt: Attempt
    applied: Applied
    regions: PlanRegions
    warned: list[warnings.WarningMessage]


def _raced(
    step: Step,
    profile: Profile,
    plain: Metered,
    budget: Budget,
    found: _Fitting,
    others: Sequence[Schedule],
    deadline: Deadline,
) -> Slowdown | None:
    """Race the plan that was found against others that fit; apply the fastest.

    The first is applied, and nothing returned, if a plain step runs out of memory or
    the time is over.

    Warns:
        UnrepeatableWarning: Those of the fastest plan, if it is not the first.
    """
    unseen = unseen_bytes(profile, plain)
    entries = [_Entry(found.attempts.pop(), found.applied, take_off(step.model), [])]
    slowest = entries[0].attempt.schedule.slowdown + NEARLY
    for schedule in (other for other in others if other.slowdown <= slowest):
        if deadline.forbids("plans with other engines"):
            break
        plan = make_plan(profile, schedule, step.model, budget.step_bytes, unseen)
        wrong = suppress(RecomputeMismatchError)
        with wrong, without_shortage(), _held_back() as warned:
            attempt, applied = try_plan(step, plan, schedule, plain, len(entries) + 1)
            regions = take_off(step.model)
            if attempt.peak_bytes <= budget.step_bytes:
                entries.append(_Entry(attempt, applied, regions, warned))
    place, slowdown = 0, None
    if not deadline.forbids("timing steps"):
        with without_shortage():
            place, slowdown = race(step, [entry.regions for entry in entries])
    fastest = entries[place]
    priced = fastest.attempt
    if slowdown is not None:
        priced = repriced(profile, priced, slowdown)
        is_short = slowdown.rounds < DISTURBED_ROUNDS
        is_doubtful = is_short and is_far_off(priced, slowdown)
        if is_doubtful and not deadline.forbids("timing more steps"):
            with without_shortage():
                again = race(step, [fastest.regions], DISTURBED_ROUNDS)[1]
                slowdown = slowdown.replaced_by(again)
            priced = repriced(profile, fastest.attempt, slowdown)
    for warning in fastest.warned:  # First: where it is an error, no plan stays.
        _issue(warning)
    put_on(fastest.regions)
    found.attempts.append(priced)
    found.applied = fastest.applied
    return slowdown


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


def _measured(step: Step, profile: Profile) -> Metered | None:
    """Meter the plain step; `None` if that, or recording it, runs out of memory."""
    found = None
    if profile.tensors == "real":
        with without_shortage():  # Measuring takes a little more than recording.
            found = plain_run(step)
    return found


def _first_that_fits(
    step: Step,
    profile: Profile,
    plain: Metered | None,
    budget: Budget,
    mode: str,
    deadline: Deadline,
    given: AskedHost | None,
) -> _Fitting:
    """Try plans until one is within the budget.

    Raises:
        BudgetError: If no plan fits, by prediction or by measurement.
        OutOfMemoryError: If a step finds less memory than the budget allows it.
        RegionsAtFaultError: If the step goes wrong under some regions of a plan.
    """
    attempts: list[Attempt] = []
    unseen = unseen_bytes(profile, plain)
    fits = plain is not None and plain.peak_bytes <= budget.step_bytes
    is_late = partial(deadline.forbids, "annealing")
    host = None if given is None else given.serving(profile.graph)
    planner = cache(partial(planner_of, profile, host))
    while True:
        planning = "while planning a step that takes", profile.peak_bytes
        with explaining_shortage(budget, *planning):
            schedule, *others = next_schedules(
                *(profile, budget, mode, attempts, unseen, is_late, planner, fits)
            )
            plan = make_plan(profile, schedule, step.model, budget.step_bytes, unseen)
        may_aim_lower = mode == AUTO and not schedule.is_smallest
        kept = partial(kept_text, profile.graph, schedule, budget.step_bytes)
        trying = "in a step whose plan takes", plan.peak_bytes, kept
        with explaining_shortage(budget, *trying):
            found, applied = try_plan(
                *(step, plan, schedule, plain, len(attempts) + 1),
                enough=budget.step_bytes if may_aim_lower else None,
            )
        attempts.append(found)
        if found.peak_bytes <= budget.step_bytes:
            return _Fitting(attempts, applied, others)
        applied.remove()  # Over budget: the next schedule aims lower, or raises.
        if schedule.is_smallest and can_be_limited(step.device):
            limited = try_limited(step, attempts, plain, budget.step_bytes)
            if limited is not None:
                return _Fitting([*attempts, limited[0]], limited[1], [])
