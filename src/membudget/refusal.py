"""Refuse a budget: name the least that suffices, and say what holds the bytes.

The named budget is deterministic: the smallest schedule is found from bytes alone, and
on real tensors its peak is measured before a budget is refused. It is at most the peak
of the plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from membudget.allocation import is_out_of_memory, note_shortage
from membudget.allowance import Budget, gradient_bytes
from membudget.errors import BudgetError, ByteHolder, OutOfMemoryError
from membudget.graph import StepGraph
from membudget.planner.planner import least_schedules, solvers_of
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.timeline import timeline
from membudget.profile import Profile
from membudget.report.advice import floor, operator_text
from membudget.report.holders import HeldAtPeak, held_at_peak


def cannot_fit(graph: StepGraph, budget: Budget) -> bool:
    """Return whether certainly no plan fits, so that no search can help."""
    return floor(graph).peak_bytes > budget.step_bytes


def is_hopeless(graph: StepGraph, budget: Budget) -> bool:
    """Return whether even the smallest plans are predicted to exceed the budget.

    They are found from bytes alone; a full search seldom finds smaller ones.
    """
    if timeline(graph).peak_bytes <= budget.step_bytes:
        return False
    least = least_schedules(Simulator(graph), solvers_of(graph))
    return all(schedule.peak_bytes > budget.step_bytes for schedule in least)


def predicted_least(profile: Profile, smallest: Schedule) -> int:
    """Return the peak of the smallest schedule plus 1 %, at most the plain peak.

    The margin covers prediction errors: a user who retries with the budget that an
    error stated must not be refused again.
    """
    least_bytes = smallest.peak_bytes + smallest.peak_bytes // 100
    return min(least_bytes, profile.peak_bytes)


def refused(
    profile: Profile,
    budget: Budget,
    smallest: Schedule,
    least_bytes: int,
    took: Sequence[int] = (),
    beside: Sequence[ByteHolder] = (),
) -> BudgetError:
    """Return the error for a budget that no plan keeps.

    Args:
        profile: Profile of the plain step.
        budget: The budget.
        smallest: The smallest schedule, at whose peak the message says what is live.
        least_bytes: Bytes that suffice for the step.
        took: Measured peaks of the plans that were predicted to fit.
        beside: What holds the bytes in `least_bytes` beside the schedule's tensors.
    """
    found = "no plan fits in"
    if took:
        peaks = ", ".join(f"{size:,}" for size in took)
        found = f"plans predicted to fit took {peaks} bytes; none fits in"
    error = budget.refused(found, least_bytes)
    if not profile.graph.operators:
        return error
    most = gradient_bytes(profile.graph)
    if most > budget.step_bytes:
        text = (
            f"{error}\nGradients of parameters alone take {most:,} bytes, which no "
            "plan lowers: train fewer parameters, use a smaller dtype, or give a share "
            "of the rest, such as '50% of activations'"
        )
        error.args = (text,)
    what = "smallest plan" if smallest.choices else "plain step"
    name_holders(error, profile.graph, smallest, budget.before_bytes, what, beside)
    return error


def name_holders(
    error: BudgetError,
    graph: StepGraph,
    schedule: Schedule,
    before_bytes: int,
    what: str,
    beside: Sequence[ByteHolder] = (),
) -> None:
    """Say in an error what holds the bytes at the peak of a schedule.

    Args:
        error: The error.
        graph: The plain step.
        schedule: A schedule of it.
        before_bytes: Bytes in use before the step, whatever holds them.
        what: What is refused, in words.
        beside: What holds bytes beside the schedule's tensors.
    """
    peak = held_at_peak(graph, schedule, before_bytes)
    there = (holder for holder in beside if holder.bytes > 0)
    peak = peak._replace(holders=(*peak.holders, *there))
    error.holders = peak.holders
    error.args = (f"{error}\n{_peak_text(what, peak)}",)


@contextmanager
def explaining_shortage(
    budget: Budget,
    what: str,
    peak_bytes: int,
    kept: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Say of a failed allocation that the budget had allowed it.

    Args:
        budget: The budget.
        what: What is done in the context, as in "planning a step that takes".
        peak_bytes: Peak bytes that this step is predicted to allocate.
        kept: Says what the step's plan keeps, for a note of the error.

    Raises:
        OutOfMemoryError: If an allocation fails in the context.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        predicted_bytes = peak_bytes + budget.before_bytes
        explained = OutOfMemoryError(
            f"an allocation failed {what} {predicted_bytes:,} bytes, although the "
            f"budget is {budget}. So the process or device has less memory than that: "
            f"beside the step, fit needs up to {budget.before_bytes:,} bytes on the "
            "host to restore what the step changes. Raise the limit, free memory, or "
            "give a smaller budget",
            asked_bytes=budget.bytes_in_all,
            predicted_bytes=predicted_bytes,
        )
        if kept is not None:
            note_shortage(explained, kept)
        raise explained from error


def _peak_text(what: str, peak: HeldAtPeak) -> str:
    """Say what holds the bytes at a peak, a line each."""
    lines = [
        f"The {what} is predicted to take {peak.bytes:,} bytes in all, in "
        f"{operator_text(peak.operator)}:"
    ]
    width = len(f"{max(holder.bytes for holder in peak.holders):,}")
    for holder in peak.holders:
        remedy = f": {holder.remedy}" if holder.remedy else ""
        lines.append(f"  {holder.bytes:{width},}  {holder.name}{remedy}")
    return "\n".join(lines)
