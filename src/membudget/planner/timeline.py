"""Bytes live at each operator, and their peak.

At operator t, every storage with birth ≤ t < death is live, the operator's own outputs
included, plus the operator's workspace. What existed before the step is counted apart
(`StepGraph.static`), so the numbers equal those of a meter that counts what the step
allocates.

    op index        0    1    2    3    4
    storage a (4)   ├────┼────┼────┤                birth 0, death 3
    storage b (2)        ├────┼────┼────┤           birth 1, death 4
    live_bytes      4    6    6    2    0
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from membudget.graph import Operator, StepGraph

Interval = tuple[int, int, int]
"""A live range: first op index, op index after the last, bytes."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes over a step.

    Attributes:
        alive_bytes: At each operator, without its workspace.
        peak_bytes: The maximum, workspaces included.
        peak_moment: The first operator at the peak; 0 for a step without operators.
    """

    alive_bytes: tuple[int, ...]
    peak_bytes: int
    peak_moment: int


def timeline(graph: StepGraph) -> Timeline:
    """Return the timeline of the plain step."""
    return of_intervals(graph, lifetimes(graph))


def lifetimes(graph: StepGraph, without: Container[int] = ()) -> list[Interval]:
    """Return the live ranges of the storages that the step allocates.

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
    """Return the timeline of storages with the given live ranges."""
    alive = live_bytes(len(graph.operators), intervals)
    peak_bytes, moment = peak_of(graph.operators, alive)
    return Timeline(tuple(alive), peak_bytes, moment)


def live_bytes(count: int, intervals: Iterable[Interval]) -> list[int]:
    """Return the sum of some live ranges at each of `count` places.

    Example:
        >>> live_bytes(5, [(0, 3, 4), (1, 4, 2)])
        [4, 6, 6, 2, 0]
    """
    steps = [0] * (count + 1)
    for start, end, size in intervals:
        steps[start] += size
        steps[min(end, count)] -= size
    return list(accumulate(steps))[:count]


def peak_of(operators: Iterable[Operator], alive: Iterable[int]) -> tuple[int, int]:
    """Return the peak of a run of operators, workspaces included, and its place.

    Args:
        operators: What runs.
        alive: Bytes live at each, without its workspace.
    """
    peak_bytes, place = 0, 0
    for index, (operator, live) in enumerate(zip(operators, alive, strict=True)):
        if live + operator.workspace_bytes > peak_bytes:
            peak_bytes, place = live + operator.workspace_bytes, index
    return peak_bytes, place


def peak_of_run(
    graph: StepGraph,
    run: Sequence[int],
    touched: Mapping[int, Iterable[int]],
    to_end: Container[int],
) -> int:
    """Return the peak of a run of operators, counting what the run itself allocates.

    Args:
        graph: The step.
        run: The operators, in order.
        touched: The storages that each of them reads or writes.
        to_end: Storages that stay live to the end of the run; others are freed after
            their last use.
    """
    last = {storage: i for i, index in enumerate(run) for storage in touched[index]}
    intervals = [
        (
            i,
            len(run) if storage in to_end else last[storage] + 1,
            graph.storages[storage].bytes,
        )
        for i, index in enumerate(run)
        for storage in graph.born_at.get(index, ())
        if storage in last
    ]
    operators = [graph.operators[index] for index in run]
    return peak_of(operators, live_bytes(len(run), intervals))[0]
