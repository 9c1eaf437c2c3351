"""From a profile to a plan: the planner, the budget of the step, the plan as data."""

from __future__ import annotations

import math

from torch.nn import Module

from membudget.apply import model_fingerprint
from membudget.errors import BudgetError, OptionError
from membudget.graph import StepGraph
from membudget.limit import Limit
from membudget.modes import AUTO, check_mode, choose_by_mode
from membudget.planner.bound import least_seconds
from membudget.planner.costs import (
    CPU_OVERHEADS,
    NO_OVERHEADS,
    Overheads,
    check_seconds,
    smoothed,
)
from membudget.planner.plan import Plan, region_plan
from membudget.planner.planner import Planner
from membudget.planner.schedule import Schedule
from membudget.profile import Profile
from membudget.profile.devices import this_processor
from membudget.sizes import parse_bytes


def plan_for(
    profile: Profile, model: Module, budget: int | str, mode: str = AUTO
) -> Plan:
    """Return the fastest plan whose predicted peak fits.

    Nothing runs, so the model may lie on the meta device. Where the plan is to be
    measured and put on the model, `fit` is the way.

    Args:
        profile: The plain step of the model.
        model: The model.
        budget: As for `fit`; bytes or a share.
        mode: As for `fit`.

    Raises:
        BudgetError: If no plan fits; it says the least budget that one fits into.
        OptionError: If the budget is no number of bytes.

    Example:
        >>> import membudget as mb, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> found = mb.profile(model, torch.zeros(32, 64), fake=True)
        >>> plan_for(found, model, "1GiB").regions
        ()
    """
    check_mode(mode)
    limit = limit_of(profile, budget)
    if mode == AUTO:
        graph, schedule = choose(profile, limit)
    else:
        graph, schedule = choose_mode(profile, mode)
        peak_bytes = schedule.peak_bytes
        if peak_bytes > limit.budget_bytes:
            raise mode_is_over(profile, limit, mode, peak_bytes, "predicted")
    return make_plan(profile, graph, schedule, model, limit.budget_bytes)


def planner_of(profile: Profile) -> Planner:
    """Return the planner of a profile."""
    return Planner(profile.graph, overheads_of(profile))


def choose(profile: Profile, limit: Limit) -> tuple[StepGraph, Schedule]:
    """Return the planner's schedule.

    The planner is gone when this returns: its tables are the host's memory, too.

    Args:
        profile: The plain step.
        limit: What it may allocate.

    Returns:
        The plain step, with the seconds that count, and the schedule.

    Raises:
        BudgetError: If no plan fits; it says the least budget that one fits into.
    """
    planner = planner_of(profile)
    try:
        return planner.graph, planner.fastest(limit.budget_bytes)
    except BudgetError as error:
        raise limit.refused(
            f"no plan fits into {limit}", with_margin(error.least_bytes)
        ) from error


def with_margin(least_bytes: int) -> int:
    """Return the least budget, with a hundredth for what a prediction leaves out.

    A user who gives the least that an error named is not to be refused again.
    """
    return least_bytes + least_bytes // 100


def choose_mode(profile: Profile, mode: str) -> tuple[StepGraph, Schedule]:
    """Return the schedule of a mode other than `auto`, whatever it takes.

    Returns:
        The plain step, with the seconds that count, and the schedule.
    """
    check_seconds(profile.graph)
    graph = smoothed(profile.graph)
    return graph, choose_by_mode(mode, graph, overheads_of(profile))


def mode_is_over(
    profile: Profile, limit: Limit, mode: str, peak_bytes: int, how: str
) -> BudgetError:
    """Return the error that says what a mode takes, and what `auto` needs.

    Args:
        profile: The plain step.
        limit: What the step may allocate.
        mode: The mode.
        peak_bytes: What it takes.
        how: How that is known: predicted or measured.
    """
    return limit.refused(
        f"mode={mode!r} is {how} to take {peak_bytes:,} bytes, and may take {limit}",
        with_margin(planner_of(profile).least_bytes()),
        f"a plan of mode={AUTO!r}",
    )


def overheads_of(profile: Profile) -> Overheads:
    """Return what a region costs: on a CPU the engine's own time counts."""
    on_cpu = profile.cost in ("measured", this_processor().name)
    return CPU_OVERHEADS if on_cpu else NO_OVERHEADS


def check_budget(budget: int | str) -> None:
    """Refuse what is no budget, before a step is run for it.

    Raises:
        OptionError: If it is neither a number of bytes nor a share.
    """
    if _share(budget) is None:
        parse_bytes(budget)


def limit_of(profile: Profile, budget: int | str) -> Limit:
    """Return what a step may allocate, beside what is there before it."""
    return Limit(step_budget(profile, budget), profile.graph.static.total)


def step_budget(profile: Profile, budget: int | str) -> int:
    """Return what a step may allocate, of a budget as the user gives it.

    Raises:
        OptionError: If the budget is neither a number of bytes nor a share.
    """
    share = _share(budget)
    if share is not None:
        return int(share * profile.peak_bytes)
    return parse_bytes(budget) - profile.graph.static.total


def _share(budget: int | str) -> float | None:
    """Return the share that a budget in percent is; `None` if it is none."""
    if not isinstance(budget, str) or not budget.strip().endswith("%"):
        return None
    try:
        share = float(budget.strip()[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise OptionError(f"a budget in percent is over 0 and at most 100: {budget!r}")
    return share


def make_plan(
    profile: Profile,
    graph: StepGraph,
    schedule: Schedule,
    model: Module,
    budget_bytes: int,
) -> Plan:
    """Return the plan that realises a schedule.

    Args:
        profile: The plain step.
        graph: It, with the seconds by which the schedule was chosen; see `smoothed`.
        schedule: The schedule.
        model: The model.
        budget_bytes: What the step may allocate.
    """
    return Plan(
        model=type(model).__name__,
        fingerprint=model_fingerprint(model),
        budget_bytes=budget_bytes,
        plain_peak_bytes=profile.peak_bytes,
        peak_bytes=schedule.peak_bytes,
        slowdown=schedule.slowdown,
        bound=_bound(graph, budget_bytes),
        cost=profile.cost,
        regions=tuple(
            region_plan(graph, call.path, choice)
            for call, choice in zip(schedule.calls, schedule.choices, strict=True)
        ),
    )


def _bound(graph: StepGraph, budget_bytes: int) -> float:
    """Return the least slowdown of any schedule, by the seconds of the graph."""
    least = least_seconds(graph, max(0, budget_bytes))
    # No schedule at all fits into some budgets, and a file holds no infinity.
    return least / graph.seconds if graph.seconds and math.isfinite(least) else 1.0
