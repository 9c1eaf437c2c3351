"""A plan for a model from a profile of its step, without putting it on the model."""

from __future__ import annotations

from torch.nn import Module

from membudget.fit import make_plan, planner_of, step_budget
from membudget.planner.plan import Plan
from membudget.profile import Profile


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
    chosen = planner_of(profile).choose(allowed)
    return make_plan(profile, chosen, model, allowed)
