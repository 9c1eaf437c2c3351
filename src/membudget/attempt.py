"""One attempt of `fit`: apply a plan, verify a step under it, and measure another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from membudget.apply import Applied, apply
from membudget.errors import RecomputeMismatchError, UnrepeatableWarning
from membudget.memory import peak
from membudget.planner.plan import Plan
from membudget.planner.schedule import Schedule
from membudget.profile.profiling import state_kept
from membudget.step import Step


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

    The verifying step before it needs no more memory. It is not the one measured,
    because its many small fingerprints would fill the meter.
    """
    with state_kept(step, has_values=True):
        _verify(step, applied)
        step.prepare()
        return peak(step.run).peak_bytes


def _verify(step: Step, applied: Applied) -> None:
    """Run steps until every recomputed value is the dropped one.

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
