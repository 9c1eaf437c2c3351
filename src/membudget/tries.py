"""Put a plan on a model, verify and measure it; if it takes too much, plan again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from membudget.apply import Applied, apply
from membudget.errors import BudgetError, PinnedWarning, RecomputeMismatchError
from membudget.graph import StepGraph
from membudget.limit import Limit
from membudget.memory import peak
from membudget.planner.answers import Chosen
from membudget.planner.plan import Plan
from membudget.planning import choose, choose_mode, make_plan, mode_is_over, planner_of
from membudget.profile import Profile
from membudget.profile.profiling import state_kept
from membudget.step import Step

MOST_PLANS = 4
"""The first plan, and three that know better."""

FAR_OVER = 1.05
"""A choice whose predicted peak is so many times the budget is not tried out."""


@dataclass(frozen=True)
class Measured:
    """What one plan was measured to take.

    Attributes:
        plan: The plan.
        chosen: The plan as the planner sees it.
        peak_bytes: The measured peak of what a step allocates.
    """

    plan: Plan
    chosen: Chosen
    peak_bytes: int


@dataclass(frozen=True)
class Task:
    """What is to be fitted.

    Attributes:
        step: The step.
        profile: The plain step, recorded.
        limit: What it may allocate.
        exact_s: How long to search all schedules for a plan.
    """

    step: Step
    profile: Profile
    limit: Limit
    exact_s: float = 0.0

    def put_on(self, graph: StepGraph, chosen: Chosen) -> tuple[Measured, Applied]:
        """Put a choice on the model, and verify and measure a step.

        Args:
            graph: The plain step, with the seconds by which the choice was made.
            chosen: The choice.
        """
        step, budget_bytes = self.step, self.limit.budget_bytes
        plan = make_plan(self.profile, graph, chosen, step.model, budget_bytes)
        applied = apply(step.model, plan) if plan.regions else Applied({}, {})
        try:
            return Measured(plan, chosen, measured_peak(step, applied)), applied
        except BaseException:
            applied.remove()
            raise


def try_plans(task: Task) -> tuple[list[Measured], Applied]:
    """Put the planner's choice on the model; choose again while it takes too much.

    Returns:
        What was measured of each plan, and the regions of the last, which is on.

    Raises:
        BudgetError: If no plan fits, or none of several was measured to fit.
    """
    graph, chosen = choose(task.profile, task.limit, task.exact_s)
    tries: list[Measured] = []
    while True:
        measured, applied = task.put_on(graph, chosen)
        tries.append(measured)
        over = measured.peak_bytes - task.limit.budget_bytes
        if over <= 0:
            return tries, applied
        applied.remove()
        # The prediction was too low: the next one may be so, too, by as much.
        chosen = _choose_less(task, tries, measured.plan.peak_bytes - over)


def _choose_less(task: Task, tries: Sequence[Measured], budget_bytes: int) -> Chosen:
    cause = None
    if len(tries) < MOST_PLANS:
        try:
            return planner_of(task.profile).choose(budget_bytes, task.exact_s)
        except BudgetError as error:
            cause = error
    peaks = [measured.peak_bytes for measured in tries]
    raise task.limit.refused(
        f"no plan fits into {task.limit}: those that were predicted to fit took "
        f"{', '.join(f'{peak:,}' for peak in peaks)} bytes",
        min(peaks),
    ) from cause


def try_mode(task: Task, mode: str) -> tuple[list[Measured], Applied]:
    """Put the regions of a mode on the model, without planning.

    Returns:
        What was measured, and the regions.

    Raises:
        BudgetError: If the step takes more than the budget; it says the least that
            `auto` needs.
    """
    profile, limit = task.profile, task.limit
    graph, chosen = choose_mode(profile, mode)
    predicted = chosen.simulation.peak_bytes
    if predicted > FAR_OVER * limit.budget_bytes:
        raise mode_is_over(profile, limit, mode, predicted, "predicted")
    measured, applied = task.put_on(graph, chosen)
    if measured.peak_bytes > limit.budget_bytes:
        applied.remove()
        raise mode_is_over(profile, limit, mode, measured.peak_bytes, "measured")
    return [measured], applied


def measured_peak(step: Step, applied: Applied) -> int:
    """Return the measured peak of a step; the model is left as it was.

    The step before it, in which regions verify what they make again, takes no more; it
    is not measured, because its many small fingerprints would fill the meter.
    """
    with state_kept(step, has_values=True):
        _verify(step, applied)
        step.prepare()
        return peak(step.run).peak_bytes


def _verify(step: Step, applied: Applied) -> None:
    """Run steps until one in which all that is made again comes back.

    Raises:
        RecomputeMismatchError: If something differs though nothing new is kept for it.

    Warns:
        PinnedWarning: For each step in which something did not come back.
    """
    kept = -1
    while True:
        try:
            step.run()
        except RecomputeMismatchError as error:
            kept, before = sum(r.pinned for r in applied.status().regions), kept
            if kept <= before:
                raise
            text = f"in a step that was run to verify the plan, {error}"
        else:
            return
        warnings.warn(text, PinnedWarning, stacklevel=2)
        step.prepare()
