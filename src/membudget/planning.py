"""From a profile to a plan: the planner, the budget of the step, the plan as data."""

from __future__ import annotations

import math

from torch.nn import Module

from membudget.apply import model_fingerprint
from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.bound import least_seconds
from membudget.planner.choose import Chosen, Planner
from membudget.planner.overhead import CPU_OVERHEADS, NO_OVERHEADS, Overheads
from membudget.planner.plan import Plan, planned_region
from membudget.profile import Profile
from membudget.profile.devices import this_processor
from membudget.sizes import parse_bytes


def plan_for(profile: Profile, model: Module, budget: int | str) -> Plan:
    """Return the fastest plan whose predicted peak fits.

    Nothing runs, so the model may lie on the meta device. Where the plan is to be
    measured and put on the model, `fit` is the way.

    Args:
        profile: The plain step of the model.
        model: The model.
        budget: As for `fit`.

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
    allowed = step_budget(profile, budget)
    planner = planner_of(profile)
    chosen = planner.choose(allowed)
    return make_plan(profile, planner.graph, chosen, model, allowed)


def planner_of(profile: Profile) -> Planner:
    """Return the planner of a profile."""
    return Planner(profile.graph, overheads_of(profile))


def overheads_of(profile: Profile) -> Overheads:
    """Return what a region costs: on a CPU the engine's own time counts."""
    on_cpu = profile.cost in ("measured", this_processor().name)
    return CPU_OVERHEADS if on_cpu else NO_OVERHEADS


def step_budget(profile: Profile, budget: int | str) -> int:
    """Return what a step may allocate, of a budget as the user gives it.

    Raises:
        OptionError: If the budget is no number of bytes.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise OptionError(
                f"a budget in percent is over 0 and at most 100: {budget!r}"
            )
        return int(share * profile.peak_bytes)
    return parse_bytes(budget) - profile.graph.static.total


def make_plan(
    profile: Profile, graph: StepGraph, chosen: Chosen, model: Module, budget_bytes: int
) -> Plan:
    """Return the plan that realises what was chosen.

    Args:
        profile: The plain step.
        graph: It, with the seconds by which the choice was made; see `smoothed`.
        chosen: The choice.
        model: The model.
        budget_bytes: What the step may allocate.
    """
    return Plan(
        model=type(model).__name__,
        fingerprint=model_fingerprint(model),
        budget_bytes=budget_bytes,
        plain_peak_bytes=profile.peak_bytes,
        peak_bytes=chosen.simulation.peak_bytes,
        slowdown=chosen.slowdown,
        bound=_bound(graph, budget_bytes),
        cost=profile.cost,
        regions=tuple(
            planned_region(graph, call.path, region)
            for call, region in zip(chosen.calls, chosen.regions, strict=True)
        ),
    )


def _bound(graph: StepGraph, budget_bytes: int) -> float:
    """Return the least slowdown of any schedule, by the seconds of the graph."""
    least = least_seconds(graph, max(0, budget_bytes))
    # No schedule at all fits into some budgets, and a file holds no infinity.
    return least / graph.seconds if graph.seconds and math.isfinite(least) else 1.0
