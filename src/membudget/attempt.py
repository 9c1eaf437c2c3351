"""Try a plan: verify one step under it, meter another, compare that with the plain one.

Where a step goes wrong under a plan, the regions at fault are found, so that the next
plan does without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from membudget._torch_accelerator import is_on_accelerator
from membudget.apply import Applied, apply
from membudget.errors import RecomputeMismatchError, UnrepeatableWarning
from membudget.memory import Peak
from membudget.outcome import Metered, at_fault, check_equal, metered
from membudget.planner.plan import Plan, RegionPlan
from membudget.planner.schedule import Schedule
from membudget.progress import stage
from membudget.state.snapshot import State
from membudget.step import Step, state_kept

MOST_PLANS = 4
"""The first plan, and three with lower targets after measured excesses."""

SHARE_BESIDE = 12
"""Of a budget, one part in so many is taken to go to what lies beside tensors."""


@dataclass(frozen=True)
class Attempt:
    """A plan that was tried, with its measured peak.

    Attributes:
        plan: The plan that was applied.
        schedule: The schedule that the plan implements.
        peak_bytes: Measured peak bytes that a step under the plan allocates.
        memory: What the meter measured, in detail.
        unlimited_bytes: What the step reserves where nobody limits the process, if it
            was limited to the budget, which is less; else 0.
        ran_out: Whether the step ran out of memory, so that its peak is a guess.
        overhead_scale: By what the overhead of the regions was multiplied, because
            steps under the plan were timed.
    """

    plan: Plan
    schedule: Schedule
    peak_bytes: int
    memory: Peak[Any] | None = None
    unlimited_bytes: int = 0
    ran_out: bool = False
    overhead_scale: float = 1.0


class RegionsAtFaultError(RecomputeMismatchError):
    """A step goes wrong under a plan, because of some of its regions.

    Attributes:
        reasons: Why each region at fault goes wrong, keyed by its module's path.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        """Store the regions at fault."""
        super().__init__(
            "; ".join(
                f"there is no region on {path or 'the model'!r}, under which {why}"
                for path, why in reasons.items()
            )
        )
        self.reasons = reasons


def try_plan(
    step: Step,
    plan: Plan,
    schedule: Schedule,
    plain: Metered | None = None,
    number: int = 1,
    enough: int | None = None,
) -> tuple[Attempt, Applied]:
    """Apply a plan, verify one step under the plan, and measure the peak of another.

    What an allocator takes beside tensors is not known where no plain step ran. So if
    an accelerator runs out of memory, although it has `enough` bytes for the tensors,
    the plan is taken to need some more.

    Returns:
        The plan with its measured peak, and the regions, which stay attached.

    Raises:
        RegionsAtFaultError: If the step goes wrong under some regions.
        RecomputeMismatchError: If it does, and no plain step ran, so that it is not
            known whether fewer regions fit.
    """
    try:
        return run_plan(step, plan, schedule, plain, number)
    except RecomputeMismatchError as error:
        if plain is None:
            raise
        raise RegionsAtFaultError(_reasons(step, plan, plain, error)) from error
    except torch.OutOfMemoryError:
        if enough is None or not is_on_accelerator(step.device):
            raise
        guess_bytes = enough + enough // SHARE_BESIDE
        return Attempt(plan, schedule, guess_bytes, ran_out=True), Applied({}, {})


def run_plan(
    step: Step, plan: Plan, schedule: Schedule, plain: Metered | None, number: int
) -> tuple[Attempt, Applied]:
    """Try a plan as `try_plan` does, without a search for the regions at fault.

    Raises:
        RecomputeMismatchError: If the step goes wrong under the plan.
    """
    what = f"plan {number} of at most {MOST_PLANS}"
    with stage(f"trying {'the smallest plan' if schedule.is_smallest else what}"):
        found, applied = run_under(step, plan, plain)
    return Attempt(plan, schedule, found.peak_bytes, found.memory), applied


def run_under(step: Step, plan: Plan, plain: Metered | None) -> tuple[Metered, Applied]:
    """Apply a plan, verify one step, meter another and compare it with the plain one.

    Without regions the step is the plain one; what that took is known if it ran.

    Raises:
        RecomputeMismatchError: If recomputed values stay wrong with more outputs kept,
            or the step computes something else than the plain one, if that ran.
    """
    if plain is not None and not plan.regions:
        return plain, Applied({}, {})
    applied = apply(step.model, plan) if plan.regions else Applied({}, {})
    try:
        found = planned_run(step, applied)
        if plain is not None:
            check_equal(step, plain, found)
    except BaseException:
        applied.remove()
        raise
    return found, applied


def planned_run(step: Step, applied: Applied) -> Metered:
    """Verify one step, meter another, and restore all state.

    Measurement excludes the verification step, which would flood the meter with its
    many small fingerprints, and may need more at its peak: the 16 bytes per element
    that a fingerprint takes for 1/32 of one tensor. Neither is the host copy of model
    and batch counted, from which the state is restored.
    """
    with state_kept(step, has_values=True) as start:
        _verify(step, applied, start)
        return metered(step, start)


def _verify(step: Step, applied: Applied, start: State) -> None:
    """Run steps until every recomputed value matches the dropped original.

    Raises:
        RecomputeMismatchError: If a recompute differs and no more outputs can be kept.

    Warns:
        UnrepeatableWarning: For each step in which a recomputed value differed.
    """
    cured = -1
    while True:
        try:
            step.run()
        except RecomputeMismatchError as error:
            regions = applied.status().regions
            cured, before = sum(r.unrepeatable + r.switched for r in regions), cured
            if cured <= before:
                raise
            text = f"in a step that was run to verify the plan, {error}"
        else:
            return
        warnings.warn(text, UnrepeatableWarning, stacklevel=2)
        start.restore()


def _reasons(
    step: Step, plan: Plan, plain: Metered, error: RecomputeMismatchError
) -> dict[str, str]:
    """Return why each region at fault for an error goes wrong, keyed by its path."""

    def wrong(regions: Sequence[RegionPlan]) -> str:
        try:
            run_under(step, replace(plan, regions=tuple(regions)), plain)[1].remove()
        except RecomputeMismatchError as error:
            return str(error)
        return ""

    with stage("looking for the region at fault"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnrepeatableWarning)
        found = at_fault(plan.regions, str(error), wrong)
    return {region.path: why for region, why in found}
