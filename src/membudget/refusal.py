"""Refuse a budget: name the least that suffices, and say what holds the bytes.

The named budget is deterministic: the smallest schedule is found from bytes alone, and
on real tensors its peak is measured before a budget is refused. It is at most the peak
of the plain step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from membudget.allocation import is_out_of_memory
from membudget.allowance import Budget, gradient_bytes
from membudget.errors import BudgetError, OutOfMemoryError
from membudget.graph import StepGraph
from membudget.planner.choice import made_in
from membudget.planner.schedule import Schedule
from membudget.profile import Profile
from membudget.profile.live_ranges import touched_storages
from membudget.report.advice import floor, operator_text


def cannot_fit(graph: StepGraph, budget: Budget) -> bool:
    """Return whether certainly no plan fits, so that no search can help."""
    return floor(graph).peak_bytes > budget.step_bytes


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
) -> BudgetError:
    """Return the error for a budget that no plan keeps.

    Args:
        profile: Profile of the plain step.
        budget: The budget.
        smallest: The smallest schedule, at whose peak the message says what is live.
        least_bytes: Bytes that suffice for the step.
        took: Measured peaks of the plans that were predicted to fit.
    """
    found = "no plan fits in"
    if took:
        peaks = ", ".join(f"{size:,}" for size in took)
        found = f"plans predicted to fit took {peaks} bytes; none fits in"
    error = budget.refused(found, least_bytes)
    reasons = " ".join(_reasons(profile.graph, budget, smallest))
    error.args = (f"{error}. {reasons}",)
    return error


@contextmanager
def explaining_shortage(budget: Budget, what: str, peak_bytes: int) -> Iterator[None]:
    """Say of a failed allocation that the budget had allowed it.

    Args:
        budget: The budget.
        what: What is done in the context, as in "planning a step that takes".
        peak_bytes: Peak bytes that this step is predicted to allocate.

    Raises:
        OutOfMemoryError: If an allocation fails in the context.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        predicted_bytes = peak_bytes + budget.before_bytes
        raise OutOfMemoryError(
            f"an allocation failed {what} {predicted_bytes:,} bytes, although the "
            f"budget is {budget}. The process or its device is limited to less: fit "
            f"needs up to {budget.before_bytes:,} more on the host, to restore what "
            "the step changes. Raise the limit, free memory, or give a smaller budget",
            asked_bytes=budget.bytes_in_all,
            predicted_bytes=predicted_bytes,
        ) from error


def _reasons(graph: StepGraph, budget: Budget, smallest: Schedule) -> Iterator[str]:
    if not graph.operators:
        return
    most = gradient_bytes(graph)
    if most > budget.step_bytes:
        yield (
            f"Gradients of parameters alone take {most:,} bytes, which no plan lowers: "
            "train fewer parameters, use a smaller dtype, or give a share of the rest, "
            "such as '50% of activations'."
        )
    yield _peak_text(graph, smallest)


def _peak_text(graph: StepGraph, schedule: Schedule) -> str:
    """Say what is live at the peak of a schedule: gradients, one tensor, the rest."""
    moment = schedule.simulation.peak_moment
    live = {
        index
        for index, storage in enumerate(graph.storages)
        if 0 <= storage.birth <= moment < storage.death
    }
    gradients = {i for i in live if graph.storages[i].kind == "gradient"}
    # What a region dropped may be absent, unless the operator at the peak reads it.
    dropped = {s for c in schedule.choices for s in made_in(graph, c) - c.kept}
    certain = live - gradients - (dropped - touched_storages(graph, moment))
    parts = [(sum(graph.storages[i].bytes for i in gradients), "gradients")]
    if certain:
        largest = max(certain, key=lambda index: graph.storages[index].bytes)
        name = operator_text(graph.operators[graph.storages[largest].birth])
        parts.append((graph.storages[largest].bytes, f"the largest tensor, of {name}"))
    rest = schedule.peak_bytes - sum(size for size, _ in parts)
    parts.append((rest, "the rest of that block's working set"))
    held = "; ".join(f"{size:,} are {what}" for size, what in parts if size)
    where = operator_text(graph.operators[moment])
    what = "smallest plan" if schedule.choices else "plain step"
    size = schedule.peak_bytes
    return f"The {what} is predicted to take {size:,} bytes in {where}: {held}."
