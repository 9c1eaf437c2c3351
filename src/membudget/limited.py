"""Try plans where a device has no more than the budget.

An allocator keeps the blocks that are freed, and counts them as reserved, until the
device has no more: then it gives back what it can. So a plan that reserves more than
the budget where nobody limits the process may train where the device ends there.
Giving back takes time, so plans that need not are tried first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from membudget.allocation import without_shortage
from membudget.apply import Applied
from membudget.attempt import Attempt, try_plan
from membudget.outcome import Metered
from membudget.step import Step

MOST_TRIES = 4
"""How often the least limit is halved towards what blocks need."""

NEAR = 0.02
"""The limit is near enough to that when this share of it is left."""


def try_limited(
    step: Step, attempts: list[Attempt], plain: Metered | None, step_bytes: int
) -> tuple[Attempt, Applied] | None:
    """Try plans that were over budget again, each limited to the budget.

    Args:
        step: The step.
        attempts: The plans, the smallest last. If none fits, the last gets the peak
            that suffices for it where it is limited to that.
        plain: What the plain step took, if it ran.
        step_bytes: The budget.

    Returns:
        The first plan that fits, which is applied.
    """
    for attempt in attempts:
        if found := _within(step, attempt, plain, step_bytes):
            return found
    attempts[-1] = _least(step, attempts[-1], plain, step_bytes)
    return None


def _least(
    step: Step, smallest: Attempt, plain: Metered | None, step_bytes: int
) -> Attempt:
    """Return the attempt with the least limit over the budget under which it runs."""
    # Its blocks need these bytes; how many more only trying tells.
    too_few = max(_allocated(smallest), step_bytes)
    for _ in range(MOST_TRIES):
        if smallest.peak_bytes - too_few <= NEAR * smallest.peak_bytes:
            break
        middle = (too_few + smallest.peak_bytes) // 2
        found = _within(step, smallest, plain, middle)
        if found is None:
            too_few = middle
        else:
            found[1].remove()
            smallest = replace(smallest, peak_bytes=middle)
    return smallest


def _within(
    step: Step, attempt: Attempt, plain: Metered | None, limit_bytes: int
) -> tuple[Attempt, Applied] | None:
    """Try a plan with the step limited; return nothing if memory runs out."""
    tried: list[tuple[Attempt, Applied]] = []
    # Without regions it is the plain step, which ran, but not under this limit.
    known = plain if attempt.plan.regions else None
    if _allocated(attempt) <= limit_bytes:
        with without_shortage(), _limited(step, limit_bytes):
            tried.append(try_plan(step, attempt.plan, attempt.schedule, known))
    for found, applied in tried:
        return replace(found, unlimited_bytes=attempt.peak_bytes), applied
    return None


@contextmanager
def _limited(step: Step, limit_bytes: int) -> Iterator[None]:
    step.limit_bytes = limit_bytes
    try:
        yield
    finally:
        step.limit_bytes = None


def _allocated(attempt: Attempt) -> int:
    """Return the bytes of a plan's blocks, below which no limit is enough."""
    memory = attempt.memory
    if memory is None:
        return attempt.peak_bytes
    found = (d.allocated_bytes for d in memory.devices if d.device == memory.device)
    return next(found, 0)
