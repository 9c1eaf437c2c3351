"""From a recorded step to a schedule that fits, to a plan, and to what it measures.

Planning itself runs nothing: a recording is all that it needs. `try_plan` then applies
the plan, verifies a step under it, and measures another.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import Module

from membudget.apply import Applied, apply, model_fingerprint
from membudget.budget import Budget
from membudget.errors import BudgetError, RecomputeMismatchError, UnrepeatableWarning
from membudget.graph import StepGraph
from membudget.memory import peak
from membudget.modes import AUTO, check_mode, schedule_of_mode
from membudget.planner.bound import least_seconds
from membudget.planner.plan import Plan, region_plan
from membudget.planner.planner import Planner, check_seconds, smoothed
from membudget.planner.schedule import (
    CPU_OVERHEADS,
    NO_OVERHEADS,
    Overheads,
    Schedule,
)
from membudget.profile import Profile
from membudget.profile.devices import this_processor
from membudget.profile.profiling import state_kept
from membudget.step import Step

MOST_PLANS = 4
"""The first plan, and three that know what those before them took."""

FAR_OVER = 1.05
"""A mode whose predicted peak is this many times the budget is not even tried."""


MOST_UNMETERED = 0.005
"""A profile may differ from the meter by this share of the plain step's peak."""


@dataclass(frozen=True)
class Attempt:
    """One plan, and what a step under it takes.

    Attributes:
        plan: The plan.
        schedule: The schedule that it realises.
        peak_bytes: The measured peak of what a step allocates.
    """

    plan: Plan
    schedule: Schedule
    peak_bytes: int


def unseen_bytes(step: Step, profile: Profile) -> int:
    """Return how many bytes the plain step was measured to take beyond its profile.

    It is 0 if the two agree, and for a profile on fake tensors, whose step may not fit.
    """
    if profile.tensors == "fake":
        return 0
    with state_kept(step, has_values=True):
        step.prepare()
        found = peak(step.run).peak_bytes
    unseen = found - profile.peak_bytes
    return unseen if abs(unseen) > MOST_UNMETERED * found else 0


def try_plan(step: Step, plan: Plan, schedule: Schedule) -> tuple[Attempt, Applied]:
    """Apply a plan and run two steps: one verifies, one is measured.

    Returns:
        What was measured, and the regions, which stay on the model.

    Raises:
        RecomputeMismatchError: If a recomputed value differs, whatever is kept for it.
    """
    applied = apply(step.model, plan) if plan.regions else Applied({}, {})
    try:
        return Attempt(plan, schedule, measured_peak(step, applied)), applied
    except BaseException:
        applied.remove()
        raise


def measured_peak(step: Step, applied: Applied) -> int:
    """Return the measured peak of a step; the model is left as it was.

    The verification step that precedes it needs no additional memory. That step is not
    measured, because its many small fingerprints would fill the meter.
    """
    with state_kept(step, has_values=True):
        _verify(step, applied)
        step.prepare()
        return peak(step.run).peak_bytes


def _verify(step: Step, applied: Applied) -> None:
    """Run steps until every recomputed value matches the one that was dropped.

    Raises:
        RecomputeMismatchError: If one differs though nothing more is kept for it.

    Warns:
        UnrepeatableWarning: For each step in which one differed.
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
    """Return the fastest plan whose predicted peak fits; see `fit` for the arguments.

    Nothing runs, so the model may be on the meta device. `fit` also applies the plan
    and measures it.

    Raises:
        BudgetError: If no plan fits; it has the smallest feasible budget.
        OptionError: If the budget is neither a number of bytes nor a share.

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
    """Return the schedule to try next: of a mode, or the fastest predicted to fit.

    What the plain step takes beyond its profile (`unseen`), a plan takes, too. An
    `auto` plan after an attempt aims lower by what that took too much. A rule has one
    schedule.

    The planner is gone when this returns: its tables take the host's memory, too.

    Raises:
        BudgetError: If nothing is left to try; it has the smallest feasible budget.
    """
    if mode != AUTO:
        return _schedule_of_mode(profile, budget, mode, attempts)
    target_bytes, cause = budget.step_bytes - unseen, None
    if attempts:
        # The prediction was too low; the next one may be too low by as much.
        last = attempts[-1]
        over_bytes = last.peak_bytes - budget.step_bytes
        target_bytes = last.schedule.peak_bytes - over_bytes
    if len(attempts) < MOST_PLANS:
        try:
            return planner_of(profile).fastest(target_bytes)
        except BudgetError as error:
            cause = error
    if cause is not None and not attempts:
        least_bytes = with_margin(cause.least_bytes + unseen)
        raise budget.refused("no plan fits in", least_bytes) from cause
    took = [a.peak_bytes for a in attempts]
    raise budget.refused(
        f"plans predicted to fit took {', '.join(f'{n:,}' for n in took)} bytes; none "
        "fits in",
        min(took),
    ) from cause


def planner_of(profile: Profile) -> Planner:
    """Return the planner of a profile."""
    return Planner(profile.graph, overheads_of(profile))


def with_margin(least_bytes: int) -> int:
    """Return the least budget, plus a hundredth for what a prediction leaves out.

    A user who gives the least that an error named must not be refused again.
    """
    return least_bytes + least_bytes // 100


def _schedule_of_mode(
    profile: Profile, budget: Budget, mode: str, attempts: Sequence[Attempt]
) -> Schedule:
    """Return the schedule of a mode, unless it is known to take too much."""
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
    """Return the error that says what a mode takes, and what `auto` needs."""
    return budget.refused(
        f"mode={mode!r} is {how} to allocate {peak_bytes:,} bytes, too many for",
        with_margin(planner_of(profile).least_bytes()),
        f"plan of mode={AUTO!r}",
    )


def overheads_of(profile: Profile) -> Overheads:
    """Return what a region costs: on a CPU, the engine's own time counts."""
    on_cpu = profile.cost in ("measured", this_processor().name)
    return CPU_OVERHEADS if on_cpu else NO_OVERHEADS


def make_plan(
    profile: Profile,
    schedule: Schedule,
    model: Module,
    budget_bytes: int,
    unseen: int = 0,
) -> Plan:
    """Return the plan that realises a schedule on a model."""
    graph = profile.graph
    return Plan(
        model=type(model).__name__,
        fingerprint=model_fingerprint(model),
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
    """Return the least slowdown of any schedule, by the times of the graph."""
    least = least_seconds(graph, max(0, budget_bytes))
    # No schedule at all fits into some budgets, and a file holds no infinity.
    return least / graph.seconds if graph.seconds and math.isfinite(least) else 1.0
