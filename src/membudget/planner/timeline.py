"""The bytes alive at each moment of a step, and the most of them.

At the moment of an operator are alive: every storage that is born by then and not dead,
its own outputs included, and its workspace. What was there before the step is counted
apart (`StepGraph.static`), so the figures are those that a meter reads which counts
what the step allocates.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import accumulate

from membudget.graph import StepGraph

Interval = tuple[int, int, int]
"""First moment, first moment after, bytes."""


@dataclass(frozen=True)
class Timeline:
    """Bytes over the moments of a step.

    Attributes:
        alive_bytes: At each moment, without the workspace of its operator.
        peak_bytes: The most at any moment, with the workspace.
        peak_moment: The first moment at which it is reached; 0 for a step without
            operators.
    """

    alive_bytes: tuple[int, ...]
    peak_bytes: int
    peak_moment: int


def timeline(graph: StepGraph) -> Timeline:
    """Return the timeline of the plain step."""
    return of_intervals(graph, lifetimes(graph))


def lifetimes(graph: StepGraph, without: Container[int] = ()) -> list[Interval]:
    """Return when the storages that the step makes are alive.

    Args:
        graph: The step.
        without: Storages to leave out, by index.
    """
    return [
        (storage.birth, storage.death, storage.bytes)
        for index, storage in enumerate(graph.storages)
        if storage.birth >= 0 and index not in without
    ]


def of_intervals(graph: StepGraph, intervals: Iterable[Interval]) -> Timeline:
    """Return the timeline of storages that are alive in the given intervals."""
    count = len(graph.operators)
    steps = [0] * (count + 1)
    for start, end, size in intervals:
        steps[start] += size
        steps[min(end, count)] -= size
    alive = tuple(accumulate(steps))[:count]
    most, moment = 0, 0
    for index, operator in enumerate(graph.operators):
        if alive[index] + operator.workspace_bytes > most:
            most, moment = alive[index] + operator.workspace_bytes, index
    return Timeline(alive, most, moment)
