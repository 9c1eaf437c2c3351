"""Storages that a schedule may free and recompute, and what no schedule can free.

What the user's code holds, and what a running operator needs, is live under every
schedule. Of a storage that autograd saved, that is only the time until autograd alone
holds it, and each time from the operator at which autograd unpacks it to the last one
that reads it, before autograd goes on to unpack another tensor:

    op index       0      1      2      3   ...  7      8      9      10
    storage        ├──────┼──────┤               ├──────┼──────┤
                   birth         start           unpacked, read at 8

A tensor that is read was unpacked before, and the operators that read it hold it since:
it cannot be freed and recomputed in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from membudget.graph import Saved, StepGraph
from membudget.planner.timeline import Interval, live_bytes


@dataclass(frozen=True)
class Droppable:
    """A storage of the forward that a schedule may free and recompute.

    Attributes:
        storage: Its index.
        saved_at: Op index at which autograd first saves a tensor in it that it unpacks;
            the start of the backward pass if it unpacks none.
        start: Op index from which on only autograd holds it.
        held: Op ranges, disjoint and in order, in which the backward pass holds it; the
            first op index of each is that at which autograd unpacks it.
    """

    storage: int
    saved_at: int
    start: int
    held: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """Op index at which autograd unpacks it for the last time."""
        return max((moment for moment, _ in self.held), default=-1)


def droppables(graph: StepGraph) -> list[Droppable]:
    """Return the forward storages that a schedule may free and recompute."""
    unpacked = sorted({moment for saved in graph.saved for moment in saved.asked})
    found = []
    for index, indices in graph.saved_on.items():
        storage = graph.storages[index]
        if storage.released is None or not storage.bytes:
            continue
        if not 0 <= storage.birth < graph.backward_start:
            continue
        asking = [graph.saved[i] for i in indices if graph.saved[i].asked]
        moments = (saved.moment for saved in asking)
        saved_at = min(moments, default=graph.backward_start)
        held: dict[int, int] = {}
        for saved in asking:
            # A saved tensor that is unpacked twice stays live from the first time on.
            moment = saved.asked[0]
            last = min(saved.freed, storage.death)
            if storage.released <= moment < last:
                until = _read_until(graph, index, saved, unpacked)
                held[moment] = max(until, held.get(moment, 0))
        start = max(storage.birth, storage.released)
        found.append(Droppable(index, saved_at, start, tuple(sorted(held.items()))))
    return found


def _read_until(
    graph: StepGraph, storage: int, saved: Saved, unpacked: list[int]
) -> int:
    """Return the op index after the last read of what was unpacked first."""
    moment = saved.asked[0]
    place = bisect_right(unpacked, moment)
    end = unpacked[place] if place < len(unpacked) else len(graph.operators)
    reads = range(min(end, saved.freed) - 1, moment, -1)
    return 1 + next((i for i in reads if storage in graph.reads[i]), moment)


class LiveAlways:
    """What is live under every schedule, at each op index.

    Attributes:
        bytes: The bytes at each op index, operators' workspaces included.
    """

    def __init__(
        self, graph: StepGraph, free: Iterable[Droppable], kept: Iterable[Droppable]
    ):
        """Count storages, of which some are `free` to be dropped, and some are not."""
        self._until = [storage.death for storage in graph.storages]
        self._held: dict[int, tuple[tuple[int, int], ...]] = {}
        ranges: list[Interval] = []
        for droppable in free:
            self._until[droppable.storage] = droppable.start
            self._held[droppable.storage] = droppable.held
            size = graph.storages[droppable.storage].bytes
            ranges += [(start, end, size) for start, end in droppable.held]
        for droppable in kept:
            ends = [droppable.start, *(end for _, end in droppable.held)]
            self._until[droppable.storage] = max(ends)
        for storage, end in zip(graph.storages, self._until, strict=True):
            if storage.birth >= 0:
                ranges.append((storage.birth, end, storage.bytes))
        live = live_bytes(len(graph.operators), ranges)
        operators = zip(live, graph.operators, strict=True)
        self.bytes = [own + operator.workspace_bytes for own, operator in operators]

    def has(self, storage: int, moment: int) -> bool:
        """Return whether a storage that was made before is live at an op index."""
        held = self._held.get(storage, ())
        return moment < self._until[storage] or any(a <= moment < b for a, b in held)
