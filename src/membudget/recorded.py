"""Fit a step that is recorded already: plan, apply, verify, measure, race."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from membudget._torch_accelerator import can_be_limited
from membudget.allocation import without_shortage
from membudget.allowance import Budget
from membudget.apply import Applied
from membudget.attempt import Attempt, RegionsAtFaultError, try_plan
from membudget.deadline import Deadline
from membudget.errors import (
    BudgetError,
    MembudgetError,
    UnrepeatableWarning,
)
from membudget.fastest import Fitting, take_fastest
from membudget.fitted import NOT_COMPARED, Fitted
from membudget.host import AskedHost
from membudget.limited import try_limited
from membudget.memory import storage_bytes
from membudget.memory.allocator import RESERVED, at_rest
from membudget.modes import AUTO
from membudget.outcome import Metered, plain_run
from membudget.planning import (
    make_plan,
    next_schedules,
    planner_of,
    unlike_bytes,
    unseen_bytes,
    without_calls,
    without_regions,
)
from membudget.profile import Profile
from membudget.profile.cache import FROM_CACHE
from membudget.profile.chosen_draws import REGIONS_OF_CHANCE
from membudget.refusal import explaining_shortage, is_hopeless
from membudget.rehearsal import Rehearsal
from membudget.report.kept_text import kept_text
from membudget.step import Step

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
    fitting = partial(_in_turns, step, plain, budget, mode, deadline, given)
    found = None
    if profile.chance:
        steady = without_regions(profile, profile.chance)
        if given is not None or not is_hopeless(steady.graph, budget):
            with suppress(BudgetError):
                found = fitting(steady)
        if found is None:  # Better a plan that chance may break than none.
            profile = replace(profile, notes=(*profile.notes, REGIONS_OF_CHANCE))
    found = found or fitting(profile)
    _check_current(profile, plain, found.applied)
    if measure is None:
        measure = "best" if profile.graph.seconds < QUICK_S else "one"
    slowdown = None
    if plain is not None and found.attempts[-1].plan.regions and measure != "none":
        others = found.others if measure == "best" else []
        slowdown = take_fastest(step, plain, budget, found, others, deadline)
    found.applied.left_out = found.left_out
    attempts, skipped = found.attempts, deadline.skipped
    return Fitted(mode, step, profile, attempts, found.applied, slowdown, skipped)


def _in_turns(
    step: Step,
    plain: Metered | None,
    budget: Budget,
    mode: str,
    deadline: Deadline,
    given: AskedHost | None,
    profile: Profile,
) -> Fitting:
    """Fit a step again and again, each time without the regions at fault before.

    Warns:
        UnrepeatableWarning: If regions are at fault.
    """
    left_out: dict[str, str] = {}
    while True:
        plannable = without_calls(profile, left_out)
        try:
            found = _first_that_fits(
                step, plannable, plain, budget, mode, deadline, given
            )
        except RegionsAtFaultError as error:
            left_out |= error.reasons
            warnings.warn(str(error), UnrepeatableWarning, stacklevel=4)
        except BudgetError as error:
            if plain is None and FROM_CACHE in profile.notes:
                raise StaleProfileError from error
            if left_out:
                error.add_note(str(RegionsAtFaultError(left_out)))
            raise
        else:
            return replace(found, left_out=left_out)


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
) -> Fitting:
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
            return Fitting(profile, attempts, applied, others)
        applied.remove()  # Over budget: the next schedule aims lower, or raises.
        if schedule.is_smallest and can_be_limited(step.device):
            limited = try_limited(step, attempts, plain, budget.step_bytes)
            if limited is not None:
                return Fitting(profile, [*attempts, limited[0]], limited[1], [])
