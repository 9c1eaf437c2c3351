"""Turn a recorded step into a schedule and a plan within a budget; measure the plan.

Planning itself runs no step and needs only a profile. `try_plan` then applies the plan,
verifies one step under the plan, and measures the peak of another.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter

from torch.nn import Module

from membudget.apply import Applied, apply, model_parameters
from membudget.budget import Budget
from membudget.errors import BudgetError, RecomputeMismatchError, UnrepeatableWarning
from membudget.graph import StepGraph
from membudget.memory import peak
from membudget.modes import AUTO, check_mode, schedule_of_mode
from membudget.planner.bound import least_seconds
from membudget.planner.plan import Plan, region_plan
from membudget.planner.planner import (
    Planner,
    check_seconds,
    plain_schedule,
    smoothed,
)
from membudget.planner.schedule import (
    CPU_OVERHEADS,
    NO_OVERHEADS,
    Overheads,
    Schedule,
)
from membudget.profile import Profile
from membudget.profile.devices import this_processor
from membudget.profile.profiling import state_kept
from membudget.progress import stage
from membudget.refusal import cannot_fit, predicted_least, refused
from membudget.step import Step

MOST_PLANS = 4
"""The first plan, and three with lower targets after measured excesses."""

FAR_OVER = 1.05
"""A mode whose predicted peak is this many times the budget is not even tried."""


MOST_UNMETERED = 0.005
"""A profile may differ from the meter by this share of the plain step's peak."""


@dataclass(frozen=True)
class Attempt:
    """A plan that was tried, with its measured peak.

    Attributes:
        plan: The plan that was applied.
        schedule: The schedule that the plan implements.
        peak_bytes: Measured peak bytes that a step under the plan allocates.
    """

    plan: Plan
    schedule: Schedule
    peak_bytes: int


def unseen_bytes(step: Step, profile: Profile) -> int:
    """Return the bytes that the plain step was measured to take beyond its profile.

    It is 0 if the two agree, and for a profile on fake tensors, whose step may not fit.
    """
    if profile.tensors == "fake":
        return 0
    with state_kept(step, has_values=True):
        step.prepare()
        found = peak(step.run).peak_bytes
    unseen = found - profile.peak_bytes
    return unseen if abs(unseen) > MOST_UNMETERED * found else 0


def try_plan(
    step: Step, plan: Plan, schedule: Schedule, number: int = 1
) -> tuple[Attempt, Applied]:
    """Apply a plan, verify one step under the plan, and measure the peak of another.

    Returns:
        The plan with its measured peak, and the regions, which stay attached.

    Raises:
        RecomputeMismatchError: If recomputed values stay wrong with more outputs kept.
    """
    applied = apply(step.model, plan) if plan.regions else Applied({}, {})
    try:
        what = f"plan {number} of at most {MOST_PLANS}"
        with stage(f"trying {'the smallest plan' if schedule.is_smallest else what}"):
            return Attempt(plan, schedule, measured_peak(step, applied)), applied
    except BaseException:
        applied.remove()
        raise


def measured_peak(step: Step, applied: Applied) -> int:
    """Verify one step, return the measured peak of another, and restore all state.

    Measurement excludes the verification step, which needs no more memory but would
    flood the meter with its many small fingerprints.
    """
    with state_kept(step, has_values=True):
        _verify(step, applied)
        step.prepare()
        return peak(step.run).peak_bytes


def _verify(step: Step, applied: Applied) -> None:
    """Run steps until every recomputed value matches the dropped original.

    Raises:
        RecomputeMismatchError: If a recompute differs and no more outputs can be kept.

    Warns:
        UnrepeatableWarning: For each step in which a recomputed value differed.
    """
    kept = -1
    while True:
        try:
            step.run()
        except RecomputeMismatchError as error:
            kept, before = sum(r.unrepeatable for r in applied.status().regions), kept
            if kept <= before:
                raise
            text = f"in a step that was run to verify the plan, {error}"
        else:
            return
        warnings.warn(text, UnrepeatableWarning, stacklevel=2)
        step.prepare()


def plan_for(
    profile: Profile, model: Module, budget: int | str, mode: str = AUTO
) -> Plan:
    """Return the fastest plan found whose predicted peak fits the budget.

    No step runs, so the model may be on the meta device. See `fit` for the arguments;
    `fit` also applies and measures the plan.

    Raises:
        BudgetError: If no plan fits; the error states the smallest feasible budget.
        OptionError: If the budget is neither a number of bytes nor a percentage.

    Example:
        >>> import membudget as mb, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> found = mb.profile(model, torch.zeros(32, 64), fake=True)
        >>> plan_for(found, model, "1GiB").regions
        ()
    """
    check_mode(mode)
    limit = Budget.of(budget, profile)
    schedule = next_schedule(profile, limit, mode)
    if schedule.peak_bytes > limit.step_bytes and schedule.is_smallest:
        least_bytes = predicted_least(profile, schedule)
        raise refused(profile, limit, schedule, least_bytes)
    if schedule.peak_bytes > limit.step_bytes:
        raise _mode_is_over(profile, limit, mode, schedule.peak_bytes, "predicted")
    return make_plan(profile, schedule, model, limit.step_bytes)


def next_schedule(
    profile: Profile,
    budget: Budget,
    mode: str,
    attempts: Sequence[Attempt] = (),
    unseen: int = 0,
) -> Schedule:
    """Return the schedule to try next; in mode `auto`, the fastest predicted to fit.

    After an attempt over budget, `auto` lowers its target by the measured excess, while
    all other modes have only one schedule. Before `auto` refuses a budget, it returns
    the smallest schedule, whatever its prediction; on fake tensors, only if that is
    near the budget, because trying it may need more memory than there is.
    What the plain step takes beyond its profile (`unseen`) is assumed of plans, too.

    The planner is not kept between calls, because its tables occupy host memory, too.

    Raises:
        BudgetError: If no schedule fits; the error states the smallest feasible budget.
    """
    if mode != AUTO:
        return _schedule_of_mode(profile, budget, mode, attempts)
    target_bytes = budget.step_bytes - unseen
    if attempts:
        # The prediction was too low; the next one may be too low by as much.
        last = attempts[-1]
        if last.schedule.is_smallest:
            return _after_smallest(profile, budget, attempts, unseen)
        over_bytes = last.peak_bytes - budget.step_bytes
        target_bytes = last.schedule.peak_bytes - over_bytes
    with stage("planning"):
        planner = planner_of(profile)
        if len(attempts) < MOST_PLANS and not cannot_fit(profile.graph, budget):
            with suppress(BudgetError):
                return planner.fastest(target_bytes)
        # No search helps: try the smallest plan, whose prediction may be too high.
        smallest = planner.smallest()
    has_run = profile.tensors == "real"  # The plain step has, which takes more.
    if has_run or smallest.peak_bytes <= FAR_OVER * budget.step_bytes:
        return smallest
    took = [attempt.peak_bytes for attempt in attempts]
    least_bytes = predicted_least(profile, smallest)
    raise refused(profile, budget, smallest, least_bytes, took)


def _after_smallest(
    profile: Profile, budget: Budget, attempts: Sequence[Attempt], unseen: int
) -> Schedule:
    """Return the plain schedule if the smallest took more; else raise."""
    last = attempts[-1]
    if last.plan.regions and last.peak_bytes >= profile.peak_bytes + unseen:
        return replace(plain_schedule(profile.graph), is_smallest=True)
    tried = [a for a in attempts if a.schedule.is_smallest]
    least = min(tried, key=attrgetter("peak_bytes"))
    took = [a.peak_bytes for a in attempts if not a.schedule.is_smallest]
    raise refused(profile, budget, least.schedule, least.peak_bytes, took)


def planner_of(profile: Profile) -> Planner:
    """Create a planner for a profile's step."""
    return Planner(profile.graph, overheads_of(profile))


def _schedule_of_mode(
    profile: Profile, budget: Budget, mode: str, attempts: Sequence[Attempt]
) -> Schedule:
    """Return the schedule of a mode; raise if it is known to exceed the budget."""
    if attempts:
        took = attempts[-1].peak_bytes
        raise _mode_is_over(profile, budget, mode, took, "measured")
    check_seconds(profile.graph)
    found = schedule_of_mode(mode, smoothed(profile.graph), overheads_of(profile))
    if found.peak_bytes > FAR_OVER * budget.step_bytes:
        raise _mode_is_over(profile, budget, mode, found.peak_bytes, "predicted")
    return found


def _mode_is_over(
    profile: Profile, budget: Budget, mode: str, peak_bytes: int, how: str
) -> BudgetError:
    """Return an error that states a mode's peak and the smallest budget for `auto`."""
    return budget.refused(
        f"mode={mode!r} is {how} to allocate {peak_bytes:,} bytes, too many for",
        predicted_least(profile, planner_of(profile).smallest()),
        f"plan of mode={AUTO!r}",
    )


def overheads_of(profile: Profile) -> Overheads:
    """Return the engine's overheads; zero if operator times are for another device."""
    on_cpu = profile.cost in ("measured", this_processor().name)
    return CPU_OVERHEADS if on_cpu else NO_OVERHEADS


def make_plan(
    profile: Profile,
    schedule: Schedule,
    model: Module,
    budget_bytes: int,
    unseen: int = 0,
) -> Plan:
    """Return the plan that implements a schedule on a model."""
    graph = profile.graph
    return Plan(
        model=type(model).__name__,
        parameters=model_parameters(model),
        budget_bytes=budget_bytes,
        plain_peak_bytes=profile.peak_bytes + unseen,
        peak_bytes=schedule.peak_bytes + unseen,
        slowdown=schedule.slowdown,
        bound=_bound(smoothed(graph), budget_bytes),
        cost=profile.cost,
        regions=tuple(
            region_plan(graph, call.path, choice)
            for call, choice in zip(schedule.calls, schedule.choices, strict=True)
        ),
    )


def _bound(graph: StepGraph, budget_bytes: int) -> float:
    """Return a lower bound on the slowdown of any schedule within the budget."""
    least = least_seconds(graph, max(0, budget_bytes))
    # The bound is infinite if no schedule can fit, and JSON has no infinity.
    return least / graph.seconds if graph.seconds and math.isfinite(least) else 1.0
