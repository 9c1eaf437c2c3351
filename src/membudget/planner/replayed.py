"""One region's way back, on paper: what is there, what is made again and when it goes.

The problem: to say which operators run again, and how long what they make stays, for
any choice of what a region keeps and any division of its way back into stages. The
counts are those of the engine (`engine.replay.replayer`): when the backward asks for
the first saved tensor of a stage, the operators on the way to all that the stage will
serve are found, from what is there then, and each storage on the way gets a count of
the operators and saved tensors that need it. It goes when the count is nought.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from membudget.graph import StepGraph
from membudget.planner.regions import Region, made_in, saved_in
from membudget.planner.ways import ways_back


class Timeline(Protocol):
    """The step around a region."""

    def is_first_life(self, storage: int) -> bool:
        """Tell whether what the forward made is still there."""

    def take(self, storage: int) -> None:
        """A storage is made."""

    def let_go(self, storage: int) -> None:
        """A storage goes."""

    def run_again(self, operator: int) -> None:
        """An operator runs for another time."""

    def note(self, operator: int) -> None:
        """What is alive while an operator runs is a peak or not."""


@dataclass
class _Memory:
    """What was made again, and who holds it: the region, and autograd."""

    holders: int = 0


class Replay:
    """The state of one region in the backward.

    Attributes:
        dropped_saved: The saved tensors that have to be made again, by index.
    """

    def __init__(self, graph: StepGraph, region: Region, timeline: Timeline):
        """Find what the region drops, and what that comes of."""
        self._graph = graph
        self._timeline = timeline
        self._starts = [stage.start for stage in region.stages]
        self._held = [stage.held for stage in region.stages] or [frozenset[int]()]
        candidates = made_in(graph, region) - region.kept
        self.dropped_saved = [
            index
            for index in saved_in(graph, region)
            if graph.values[graph.saved[index].value].storage in candidates
        ]
        self._wanted: dict[int, list[int]] = {}
        for index in self.dropped_saved:
            self._wanted.setdefault(self._storage(index), []).append(index)
        self._ways = ways_back(graph, region, candidates)
        self._writers, self._reads = self._ways.writers, self._ways.reads
        self._by_stage = self._saved_by_stage()
        self._served: set[int] = set()
        self._freed: set[int] = set()
        self._there: dict[int, _Memory] = {}
        self._lent: dict[int, _Memory] = {}
        self._begin(-1)

    def _storage(self, saved: int) -> int:
        return self._graph.values[self._graph.saved[saved].value].storage

    def _saved_by_stage(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index in self.dropped_saved:
            found.setdefault(self._stage_of(index), []).append(index)
        return found

    def _stage_of(self, saved: int) -> int:
        moment = self._graph.saved[saved].moment
        return max(0, bisect_right(self._starts, moment) - 1)

    def move_ends(self, ends: dict[int, int]) -> None:
        """Say until when storages live in a step with this region.

        Args:
            ends: The moment after the last of storages, where it is another than in
                the plain step; it is added to.
        """
        graph = self._graph
        for storage, indices in self._wanted.items():
            released = graph.storages[storage].released
            if released is not None:
                others = [i for i in graph.saved_on[storage] if i not in indices]
                ends[storage] = max(
                    [released, *(graph.saved[index].freed for index in others)]
                )
        for storage, moment in self._ways.until.items():
            if storage not in self._writers:
                end = ends.get(storage, graph.storages[storage].death)
                ends[storage] = max(end, moment)

    # The backward.

    def ask(self, saved: int) -> None:
        """Autograd asks for a saved tensor."""
        if self._stage_of(saved) != self._stage:
            self._begin(self._stage_of(saved))
        storage = self._storage(saved)
        if self._is_missing(storage):
            path = self._path_to(storage)
            if not self._ran.isdisjoint(path):
                # The stage had done with something that is needed after all.
                self._begin(self._stage)
            for operator in sorted(path):
                self._run(operator)
        self._served.add(saved)
        self._uses[storage] -= 1
        memory = self._there.get(storage)
        if memory is not None:
            if self._reads_to_come[storage] or self._is_read_later(storage):
                memory = _Memory()
                self._timeline.take(storage)
            memory.holders += 1
            self._lent[saved] = memory
        self._go_if_done([storage])

    def free(self, saved: int) -> None:
        """Autograd frees a saved tensor."""
        storage = self._storage(saved)
        self._freed.add(saved)
        if saved not in self._served:
            self._served.add(saved)
            if self._stage_of(saved) == self._stage:
                self._uses[storage] -= 1
                self._go_if_done([storage])
        memory = self._lent.pop(saved, None)
        if memory is not None:
            self._drop(storage, memory)

    def _begin(self, stage: int) -> None:
        """Count who needs what in a stage, from what is there."""
        self._stage = stage
        self._ran: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._reads_to_come: Counter[int] = Counter()
        pending = []
        for index in self._by_stage.get(stage, ()):
            if index not in self._served:
                self._uses[self._storage(index)] += 1
                pending.append(self._storage(index))
        planned: set[int] = set()
        while pending:
            storage = pending.pop()
            if not self._is_missing(storage):
                continue
            for operator in self._writers[storage]:
                if operator not in planned:
                    planned.add(operator)
                    for read in self._reads[operator]:
                        self._uses[read] += 1
                        self._reads_to_come[read] += 1
                        pending.append(read)
        if stage >= 0:
            for storage in self._held[stage]:
                self._uses[storage] += 1
        self._go_if_done(list(self._there))

    def _is_read_later(self, storage: int) -> bool:
        """Tell whether another stage runs what reads a storage that this one holds."""
        held = self._held[self._stage]
        if storage not in held:
            return False
        pending = [
            self._storage(index)
            for stage, indices in self._by_stage.items()
            if stage != self._stage
            for index in indices
            if index not in self._freed
        ]
        seen: set[int] = set()
        while pending:
            wanted = pending.pop()
            if wanted in seen or (wanted in held and wanted in self._there):
                continue
            seen.add(wanted)
            for operator in self._writers.get(wanted, ()):
                if storage in self._reads[operator]:
                    return True
                pending += self._reads[operator]
        return False

    def _is_missing(self, storage: int) -> bool:
        return (
            storage in self._writers
            and storage not in self._there
            and not self._timeline.is_first_life(storage)
        )

    def _path_to(self, storage: int) -> set[int]:
        path: set[int] = set()
        pending = [storage]
        while pending:
            for index in self._writers[pending.pop()]:
                if index not in path:
                    path.add(index)
                    pending += [s for s in self._reads[index] if self._is_missing(s)]
        return path

    def _run(self, operator: int) -> None:
        self._ran.add(operator)
        self._timeline.run_again(operator)
        fresh = []
        for storage in self._ways.writes[operator]:
            if self._graph.storages[storage].birth == operator:
                self._timeline.take(storage)
                if storage in self._writers and storage not in self._there:
                    self._there[storage] = _Memory(1)
                else:
                    fresh.append(storage)  # What is there stays; this goes at once.
        self._timeline.note(operator)
        for storage in fresh:
            self._timeline.let_go(storage)
        for storage in self._reads[operator]:
            self._uses[storage] -= 1
            self._reads_to_come[storage] -= 1
        self._go_if_done([*self._ways.writes[operator], *self._reads[operator]])

    def _go_if_done(self, storages: Iterable[int]) -> None:
        for storage in storages:
            if storage in self._there and self._uses[storage] <= 0:
                self._drop(storage, self._there.pop(storage))

    def _drop(self, storage: int, memory: _Memory) -> None:
        memory.holders -= 1
        if not memory.holders:
            self._timeline.let_go(storage)
