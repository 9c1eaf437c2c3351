"""Turn a recorded step into a schedule and a plan within a budget; no step runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter

from torch.nn import Module

from membudget.allowance import Budget
from membudget.attempt import MOST_PLANS, Attempt
from membudget.engine import native
from membudget.errors import BudgetError
from membudget.graph import StepGraph
from membudget.host import AskedHost
from membudget.modes import AUTO, check_mode, schedule_of_mode
from membudget.outcome import Metered
from membudget.planned import device_type, model_parameters
from membudget.planner.bound import least_seconds
from membudget.planner.moved import Host, Moves
from membudget.planner.overheads import (
    CPU_OVERHEADS,
    NATIVE_OVERHEADS,
    NO_OVERHEADS,
    Overheads,
)
from membudget.planner.plan import NO_HOST, HostPlan, Plan
from membudget.planner.planner import (
    Planner,
    check_seconds,
    plain_schedule,
    smoothed,
)
from membudget.planner.region_plans import region_plans
from membudget.planner.schedule import Schedule
from membudget.planner.search import never
from membudget.profile import Profile
from membudget.profile.devices import launch_seconds, this_processor
from membudget.progress import stage
from membudget.refusal import cannot_fit, predicted_least, refused
from membudget.sharding import unwrapped_model

FAR_OVER = 1.05
"""A mode whose predicted peak is this many times the budget is not even tried."""

MOST_UNMETERED = 0.005
"""A profile may differ from the meter by this share of the plain step's peak."""


def unseen_bytes(profile: Profile, plain: Metered | None) -> int:
    """Return the bytes that the plain step was measured to take beyond its profile.

    On an accelerator, that is the margin that its allocator needs beside the tensors.
    It is 0 if the two agree, and if no plain step ran, because it may not fit.
    """
    return 0 if plain is None else unlike_bytes(profile, plain.peak_bytes)


def unlike_bytes(profile: Profile, peak_bytes: int) -> int:
    """Return by how much a measured peak differs from a profile's; 0 if they agree."""
    unseen = peak_bytes - profile.peak_bytes
    return unseen if abs(unseen) > MOST_UNMETERED * peak_bytes else 0


def without_calls(profile: Profile, paths: Container[str]) -> Profile:
    """Return a profile whose plans put no region on the modules at these paths.

    Their calls stay as empty ones: the numbers of others are counted from the model's.
    """
    calls = enumerate(profile.graph.calls)
    return without_regions(profile, {n for n, call in calls if call.path in paths})


def without_regions(profile: Profile, numbers: Container[int]) -> Profile:
    """Return a profile whose plans put no region on the calls with these numbers."""
    graph = profile.graph
    calls = tuple(
        replace(call, end=call.start) if number in numbers else call
        for number, call in enumerate(graph.calls)
    )
    return replace(profile, graph=replace(graph, calls=calls))


def plan_for(
    profile: Profile,
    model: Module,
    budget: int | str,
    mode: str = AUTO,
    given: AskedHost | None = None,
) -> Plan:
    """Return the fastest plan found whose predicted peak fits the budget.

    No step runs, so the model may be on the meta device. See `fit` for the arguments;
    `fit` also applies and measures the plan. What is `given` of the host, if anything,
    it may use.

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
    host = None if given is None else given.serving(profile.graph)
    planner = partial(planner_of, profile, host)
    schedule = next_schedules(profile, limit, mode, planner=planner)[0]
    if schedule.peak_bytes > limit.step_bytes and schedule.is_smallest:
        least_bytes = predicted_least(profile, schedule)
        raise refused(profile, limit, schedule, least_bytes)
    if schedule.peak_bytes > limit.step_bytes:
        raise _mode_is_over(profile, limit, mode, schedule.peak_bytes, "predicted")
    return make_plan(profile, schedule, model, limit.step_bytes)


def next_schedules(
    profile: Profile,
    budget: Budget,
    mode: str,
    attempts: Sequence[Attempt] = (),
    unseen: int = 0,
    is_late: Callable[[], bool] = never,
    planner: Callable[[], Planner] | None = None,
    plain_fits: bool = False,
) -> list[Schedule]:
    """Return the schedule to try next; in mode `auto`, the fastest predicted to fit.

    Schedules with other engines, which may be faster after all, follow it. After an
    attempt over budget, `auto` lowers its target by the measured excess, while all
    other modes have only one schedule. Before `auto` refuses a budget, it returns the
    smallest schedule, whatever its prediction; on fake tensors, only if that is near
    the budget, because trying it may need more memory than there is. What the plain
    step takes beyond its profile (`unseen`) is assumed of plans, too. If `is_late`, no
    annealing begins, unless nothing fits without it. Where the plain step was measured
    to fit (`plain_fits`), `auto` needs no regions, whatever the profile predicts. Calls
    for one profile may share a `planner`.

    Raises:
        BudgetError: If no schedule fits; the error states the smallest feasible budget.
    """
    if mode != AUTO:
        return [_schedule_of_mode(profile, budget, mode, attempts)]
    if plain_fits:
        check_seconds(profile.graph)
        return [plain_schedule(smoothed(profile.graph))]
    target_bytes = budget.step_bytes - unseen
    if attempts:
        # The prediction was too low; the next one may be too low by as much.
        last = attempts[-1]
        if last.schedule.is_smallest:
            return [_after_smallest(profile, budget, attempts, unseen)]
        over_bytes = last.peak_bytes - budget.step_bytes
        target_bytes = last.schedule.peak_bytes - over_bytes
    with stage("planning"):
        made = planner_of(profile) if planner is None else planner()
        if len(attempts) < MOST_PLANS and not cannot_fit(profile.graph, budget):
            with suppress(BudgetError):
                return made.candidates(target_bytes, is_late=is_late)
        # No search helps: try the smallest plan, whose prediction may be too high.
        smallest = made.smallest()
    has_run = profile.tensors == "real"  # The plain step has, which takes more.
    if has_run or smallest.peak_bytes <= FAR_OVER * budget.step_bytes:
        return [smallest]
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
    others = (a for a in attempts if not (a.schedule.is_smallest or a.ran_out))
    took = [a.peak_bytes for a in others]
    raise refused(profile, budget, least.schedule, least.peak_bytes, took)


def planner_of(profile: Profile, host: Host | None = None) -> Planner:
    """Create a planner for a profile's step, which may move storages to a host."""
    return Planner(profile.graph, overheads_of(profile), host=host)


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
    # Its name is asked for last, because it is measured then.
    if profile.cost != "measured" and profile.cost != this_processor().name:
        return NO_OVERHEADS
    fitted = NATIVE_OVERHEADS if native.is_available() else CPU_OVERHEADS
    return fitted.on_a_processor(launch_seconds())


def make_plan(
    profile: Profile,
    schedule: Schedule,
    model: Module,
    budget_bytes: int,
    unseen: int = 0,
    absent: Collection[int] = (),
) -> Plan:
    """Return the plan that implements a schedule on a model.

    Args:
        profile: The step.
        schedule: The schedule.
        model: The model.
        budget_bytes: The budget.
        unseen: Bytes that the step takes beyond its profile.
        absent: Op indices of operators that were recorded, but do not run.
    """
    graph = profile.graph
    return Plan(
        model=type(unwrapped_model(model)).__name__,
        parameters=model_parameters(model),
        budget_bytes=budget_bytes,
        plain_peak_bytes=profile.peak_bytes + unseen,
        peak_bytes=schedule.peak_bytes + unseen,
        slowdown=schedule.slowdown,
        bound=_known_bound(profile, budget_bytes),
        cost=profile.cost,
        regions=region_plans(graph, schedule.calls, schedule.choices, absent),
        device=device_type(model),
        host=_host_plan(schedule.simulation.moves, schedule.host),
    )


def _host_plan(moves: Moves, host: Host | None) -> HostPlan:
    if host is None or not moves.out_bytes:
        return NO_HOST
    return HostPlan(
        host.allocated_bytes(moves.host_bytes, moves.largest_bytes),
        host.window_bytes,
        moves.out_bytes,
        moves.link_s,
        moves.wait_s,
    )


def _known_bound(profile: Profile, budget_bytes: int) -> float:
    """Return the bound of a recorded step, which all its plans for a budget share."""
    known = profile.graph.known.setdefault(f"{__name__}.bound", {})
    if budget_bytes not in known:
        share = overheads_of(profile).again_share
        known[budget_bytes] = _bound(smoothed(profile.graph), budget_bytes, share)
    found: float = known[budget_bytes]
    return found


def _bound(graph: StepGraph, budget_bytes: int, again_share: float = 1.0) -> float:
    """Return a lower bound on the slowdown of any schedule within the budget.

    What runs again takes `again_share` of its time in the forward.
    """
    least_s = least_seconds(graph, max(0, budget_bytes))
    # The bound is infinite if no schedule can fit, and JSON has no infinity.
    if not graph.seconds or not math.isfinite(least_s):
        return 1.0
    return 1.0 + again_share * (least_s / graph.seconds - 1.0)
