"""Say what the regions of a plan keep, for the notes of an error."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from membudget.graph import StepGraph
from membudget.planner.choice import bytes_of
from membudget.planner.schedule import Schedule
from membudget.planner.slices import useful_kept

MOST_NAMED = 4
"""Regions that are named; the bytes of all others are summed."""


def kept_text(graph: StepGraph, schedule: Schedule, limit_bytes: int) -> str:
    """Return a plan's budget, its prediction, and what its regions keep.

    Args:
        graph: The plain step.
        schedule: The schedule that the plan implements.
        limit_bytes: The budget, without what is in use before the step.
    """
    plan = "a plan" if schedule.choices else "a plan without regions"
    under = (
        f"memory ran out under {plan} for {limit_bytes:,} bytes above what is in use "
        f"before the step, of which it is predicted to take {schedule.peak_bytes:,}"
    )
    return ". ".join(filter(None, (under, _regions_text(graph, schedule))))


def _regions_text(graph: StepGraph, schedule: Schedule) -> str:
    kept: Counter[str] = Counter()
    for call, choice in zip(schedule.calls, schedule.choices, strict=True):
        kept[call.path] += bytes_of(graph, useful_kept(graph, choice))
    keeping = [(path, size) for path, size in kept.most_common() if size]
    if not keeping:
        count = len(kept)
        return f"Its regions ({count}) keep nothing inside" if count else ""
    named = ((repr(path) if path else "the model", n) for path, n in keeping)
    parts = [f"{name} {size:,}" for name, size in islice(named, MOST_NAMED)]
    others = keeping[MOST_NAMED:]
    if others:
        parts.append(f"{len(others)} others {sum(size for _, size in others):,}")
    return f"Its regions keep {kept.total():,} bytes: {', '.join(parts)}"
