"""Live bytes of a step at each operator, without recomputation, and their peak.

The memory at operator t is the total size of all storages with birth ≤ t < death, which
include the operator's outputs, plus the operator's workspace. Memory in use before the
step is counted separately (`StepGraph.static`), so the results match those of a meter
that counts only the step's own allocations.

    op index        0    1    2    3    4
    storage a (4)   ├────┼────┼────┤                birth 0, death 3
    storage b (2)        ├────┼────┼────┤           birth 1, death 4
    live_bytes      4    6    6    2    0
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from membudget.graph import Operator, StepGraph

Interval = tuple[int, int, int]
"""A live range: first op index, op index after the last, bytes."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes of a step at each op index, and their peak.

    Attributes:
        alive_bytes: Live bytes at each operator, without its workspace.
        peak_bytes: The maximum of live bytes plus operator workspace.
        peak_moment: Index of the first operator at the peak; 0 for an empty step.
    """

    alive_bytes: tuple[int, ...]
    peak_bytes: int
    peak_moment: int


def timeline(graph: StepGraph) -> Timeline:
    """Return the timeline of the step without recomputation."""
    return of_intervals(graph, lifetimes(graph))


def lifetimes(graph: StepGraph, without: Container[int] = ()) -> list[Interval]:
    """Return the live ranges of storages made by a step, except those in `without`."""
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
    """Return the live bytes at each of `count` op indices, given live ranges.

    Example:
        >>> live_bytes(5, [(0, 3, 4), (1, 4, 2)])
        [4, 6, 6, 2, 0]
    """
    steps = [0] * (count + 1)
    for start, end, size in intervals:
        steps[start] += size
        steps[min(end, count)] -= size
    return list(accumulate(steps))[:count]


def live_and_before(
    count: int, births: np.ndarray, deaths: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the live bytes at each operator, and just before the operator allocates.

    Example:
        >>> births, deaths, sizes = np.array([(0, 3, 4), (1, 4, 2)]).T
        >>> [bytes.tolist() for bytes in live_and_before(5, births, deaths, sizes)]
        [[4, 6, 6, 2, 0], [0, 4, 6, 2, 0]]
    """
    born = np.zeros(count + 1, int)
    np.add.at(born, births, sizes)
    change = born.copy()
    np.subtract.at(change, np.minimum(deaths, count), sizes)
    alive = np.cumsum(change)
    return alive[:-1], (alive - born)[:-1]


def peak_of(operators: Iterable[Operator], alive: Iterable[int]) -> tuple[int, int]:
    """Return the peak of a run of operators with workspaces, and where it occurs."""
    peak_bytes, place = 0, 0
    for index, (operator, live) in enumerate(zip(operators, alive, strict=True)):
        if live + operator.workspace_bytes > peak_bytes:
            peak_bytes, place = live + operator.workspace_bytes, index
    return peak_bytes, place


class PlainStep:
    """The live bytes of a step without recomputation, as arrays over op indices.

    Attributes:
        workspaces: Bytes of each operator's workspace.
        begins_s: When each operator begins, in seconds since the step began.
    """

    def __init__(self, graph: StepGraph):
        """Count the bytes that are live at, and allocated by, each operator."""
        self.workspaces = np.array([o.workspace_bytes for o in graph.operators], int)
        seconds = (o.seconds for o in graph.operators)
        self.begins_s = [*accumulate(seconds, initial=0.0)]
        # What was made before the step is as if it had no bytes.
        facts = [
            (max(0, s.birth), s.death, s.bytes * (s.birth >= 0)) for s in graph.storages
        ]
        table = np.array(facts, int).reshape(-1, 3).T
        self._births, self._deaths, self._sizes = table

    def with_ends(
        self, ends: Mapping[int, int], without: Collection[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the live bytes if some storages are freed at other op indices.

        See `live_and_before`. Storages in `without` are not counted.
        """
        deaths, sizes = self._deaths.copy(), self._sizes
        deaths[[*ends]] = [*ends.values()]
        if without:
            sizes = sizes.copy()
            sizes[[*without]] = 0
        return live_and_before(len(self.workspaces), self._births, deaths, sizes)


class RangePeaks:
    """The peaks of an array over any ranges of it, by the peaks of powers of two.

    Example:
        >>> peaks = RangePeaks(np.array([3, 1, 4, 1, 5]))
        >>> peaks.over(np.array([0, 1, 2]), np.array([2, 4, 2])).tolist()
        [3, 4, 0]
    """

    def __init__(self, numbers: np.ndarray):
        """Find the peak of each range whose length is a power of two."""
        count = len(numbers)
        rows, half = [numbers], 1
        while 2 * half <= count:
            row = rows[-1].copy()  # Its end, where no range begins, is never read.
            row[:-half] = np.maximum(row[:-half], row[half:])
            rows.append(row)
            half *= 2
        self._table = np.array(rows)
        # Of each length, the number of the row with the longest ranges inside.
        self._row = np.array([max(0, n.bit_length() - 1) for n in range(count + 1)])

    def over(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the peaks from `starts` to just before `ends`; 0 for empty ranges."""
        found = np.zeros(len(starts), int)
        filled = starts < ends
        starts, ends = starts[filled], ends[filled]
        row = self._row[ends - starts]
        last = ends - (1 << row)
        found[filled] = np.maximum(self._table[row, starts], self._table[row, last])
        return found
