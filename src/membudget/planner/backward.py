"""Simulate when one block's backward pass recomputes and frees each storage.

Uses of storages are counted exactly as in the replay engine (`engine.replay`). When the
backward pass unpacks the first saved tensor of a stage, the stage determines its
recompute slice: the operators that recompute all its saved tensors from the storages
then live. Each recomputed storage is freed when its use count reaches zero; the count
starts as the number of operators in the slice that read the storage plus the number of
saved tensors in it.

    stage serves: b, c      slice: 0 → a, 1 → b, 2 → c      (1 and 2 read a)

    unpack c    run 0, 2       uses  a: 2 → 1    c: 1 → 0, autograd holds it
    unpack b    run 1          uses  a: 1 → 0, freed        b: 1 → 0
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Choice,
    ends_if_dropped,
    retained_in,
    storages_saved_in,
)
from membudget.planner.ledger import Ledger
from membudget.planner.overwrites import SourceCopy, source_copies, sources_until
from membudget.planner.slices import dropped_in, held_by_living, slice_of_saved


@dataclass
class _Copy:
    """A recomputed storage, with a count of its holders: the block and autograd."""

    holders: int = 0


class ReplayBackward:
    """Recomputation state of one block during the simulated backward pass."""

    def __init__(self, ledger: Ledger, choice: Choice):
        """Find the saved tensors that a block drops, and their recompute slice."""
        self._graph = graph = ledger.graph
        self._ledger, self._choice = ledger, choice
        self._retained = retained_in(graph, choice) or [frozenset[int]()]
        self._dropped = dropped = dropped_in(graph, choice)
        self._storage = storages_saved_in(graph, choice)
        # Indices of the saved tensors that the backward pass has to recompute.
        self.dropped_saved = [i for i, s in self._storage.items() if s in dropped]
        self._stage_of = _stages(graph, choice, self.dropped_saved)
        self._slice = slice_of_saved(graph, choice, dropped)
        self._writers, self._reads = self._slice.writers, self._slice.reads
        rewritten = {s for s, of in self._writers.items() if len(of) > 1}
        # What several operators of the slice write, with those that read it.
        self._readers: dict[int, list[int]] = {s: [] for s in rewritten}
        for index in self._reads if rewritten else ():
            for storage in rewritten.intersection(self._reads[index]):
                self._readers[storage].append(index)
        self._by_stage: dict[int, list[int]] = {}
        for index in self.dropped_saved:
            self._by_stage.setdefault(self._stage_of[index], []).append(index)
        self._freed: set[int] = set()
        self._live: dict[int, _Copy] = {}
        self._lent: dict[int, _Copy] = {}  # Held by autograd, by saved tensor.
        # Copies of overwritten storages, by the operator that reads one, and storage.
        self._overwritten: dict[tuple[int, int], _Copy] = {}
        self._begin(-1)  # No stage yet.

    def move_ends(self) -> None:
        """Record in the ledger the live ranges that dropping tensors changes.

        A dropped storage is freed once only dropped saved tensors refer to it. A
        storage from which dropped tensors are recomputed stays live until autograd has
        freed the last of these tensors, and the forward has released them.
        """
        graph, choice, ends = self._graph, self._choice, self._ledger.ends
        earlier = ends_if_dropped(graph, choice)
        ends.update((s, earlier[s]) for s in self._slice.targets if s in earlier)
        held = sources_until(graph, choice, self._slice)
        living = held_by_living(graph, choice, self._dropped, self._slice, ends)
        for storage, moment in (*held.items(), *living.items()):
            self._ledger.hold(storage, moment)

    def copies(self) -> list[SourceCopy]:
        """Return the copies that the forward makes of what it overwrites."""
        return source_copies(self._graph, self._choice, self._slice)

    def unpack(self, saved: int) -> None:
        """Give autograd a saved tensor, recomputing the tensor if it is not live."""
        if saved in self._served:
            self.end_pass()  # This is another one.
        if self._stage_of[saved] != self._stage:
            self._begin(self._stage_of[saved])
        storage = self._storage[saved]
        if self._is_missing(storage):
            missing = self._missing_slice([storage])
            if not (missing <= self._planned and self._ran.isdisjoint(missing)):
                # The stage began in a backward pass inside the forward, before this was
                # missing, or it has freed a storage that is needed after all.
                self._begin(self._stage)
            for operator in sorted(missing):
                self._run(operator)
        self._served.add(saved)
        self._uses[storage] -= 1
        copy = self._live.get(storage)
        if copy is not None:
            is_retained = storage in self._retained[self._stage]
            if self._reads_to_come[storage] or (
                is_retained and self._is_read_in_other_stage(storage)
            ):
                # Autograd may overwrite the tensor it unpacks, so it gets a copy.
                copy = _Copy()
                self._ledger.allocate(storage)
            copy.holders += 1
            self._lent[saved] = copy
        self._free_unused([storage])

    def end_pass(self, _: int = 0) -> None:
        """Free what a backward pass recomputed and did not use up."""
        self._uses.clear()
        self._free_unused(list(self._live))
        self._free_copies([*self._overwritten])
        self._stage = -1

    def free(self, saved: int) -> None:
        """Simulate the release of a saved tensor by autograd."""
        storage = self._storage[saved]
        self._freed.add(saved)
        if saved not in self._served:
            self._served.add(saved)
            if saved in self._counted:
                self._uses[storage] -= 1
                self._free_unused([storage])
        self.take_back(saved)

    def take_back(self, saved: int) -> None:
        """Simulate the end of the backward operators that unpacked a saved tensor."""
        copy = self._lent.pop(saved, None)
        if copy is not None:
            self._drop(self._storage[saved], copy)

    def _begin(self, stage: int) -> None:
        """Begin a stage: count its remaining uses of each storage."""
        self._stage = stage
        self._ran: set[int] = set()
        self._served: set[int] = set()
        self._counted = set(self._living(self._by_stage.get(stage, ())))
        wanted = [self._storage[index] for index in self._counted]
        self._planned = self._missing_slice(wanted)
        self._free_copies([c for c in self._overwritten if c[0] not in self._planned])
        reads = _count(map(self._reads.__getitem__, self._planned))
        self._reads_to_come = reads
        for _, storage in self._overwritten:
            reads[storage] -= 1
        self._uses: defaultdict[int, int] = (uses := reads.copy())
        for storage in (*wanted, *(self._retained[stage] if stage >= 0 else ())):
            uses[storage] += 1
        self._free_unused(list(self._live))

    def _living(self, indices: Iterable[int]) -> Iterator[int]:
        """Yield those of some saved tensors that autograd holds now.

        A backward pass inside the forward comes before some are saved.
        """
        now, saved = self._ledger.moment, self._graph.saved
        for index in indices:
            if saved[index].moment < now and index not in self._freed:
                yield index

    def _is_read_in_other_stage(self, storage: int) -> bool:
        """Return whether another stage will read a storage that this stage retains."""
        retained = self._retained[self._stage]
        pending = [
            self._storage[index]
            for stage, indices in self._by_stage.items()
            if stage != self._stage
            for index in self._living(indices)
        ]
        seen: set[int] = set()
        while pending:
            wanted = pending.pop()
            # A retained live storage is not recomputed, so its inputs are not read.
            if wanted in seen or (wanted in retained and wanted in self._live):
                continue
            seen.add(wanted)
            for operator in self._writers.get(wanted, ()):
                if storage in self._reads[operator]:
                    return True
                pending += self._reads[operator]
        return False

    def _is_missing(self, storage: int) -> bool:
        # The forward's copy serves from the end of the block to that of its live range.
        moment = self._ledger.moment
        return (
            storage in self._writers
            and storage not in self._live
            and not self._choice.end <= moment < self._ledger.end_of(storage)
        )

    def _missing_slice(self, storages: Iterable[int]) -> set[int]:
        """Return the operators that must run now to recompute the given storages."""
        found: set[int] = set()
        writers, reads, pending = self._writers, self._reads, [*storages]
        seen = self._live.keys() | pending
        pending = [s for s in pending if self._is_missing(s)]
        while pending:
            for index in writers[pending.pop()]:
                if index not in found:
                    found.add(index)
                    for storage in reads[index]:
                        is_kept = (index, storage) in self._overwritten
                        if storage not in seen and not is_kept:
                            seen.add(storage)
                            if self._is_missing(storage):
                                pending.append(storage)
        return found

    def _run(self, operator: int) -> None:
        ledger, uses = self._ledger, self._uses
        reads, writes = self._reads[operator], self._slice.writes[operator]
        if not self._readers.keys().isdisjoint(writes):
            self._keep_overwritten(operator)
        self._ran.add(operator)
        ledger.read(reads)
        ledger.run_again(operator, ledger.replayed)
        discarded = []
        for storage in writes:
            # Only its first writer allocates a storage; later ones write in place.
            if self._graph.storages[storage].birth == operator:
                ledger.allocate(storage)
                if storage in self._writers and storage not in self._live:
                    self._live[storage] = _Copy(1)
                else:
                    discarded.append(storage)  # Live already, or not needed.
        ledger.update_peak(operator)
        for storage in discarded:
            ledger.release(storage)
        for storage in reads:
            if (operator, storage) in self._overwritten:
                self._free_copies([(operator, storage)])
            else:
                uses[storage] -= 1
                self._reads_to_come[storage] -= 1
        self._free_unused(writes)
        self._free_unused(reads)

    def _keep_overwritten(self, operator: int) -> None:
        """Copy what an operator overwrites and earlier operators have yet to read."""
        for storage in self._slice.writes[operator]:
            if storage not in self._readers or storage not in self._live:
                continue
            before = [w for w in self._writers[storage] if w < operator]
            if not before:
                continue
            between = (i for i in self._readers[storage] if before[-1] < i < operator)
            readers = self._planned.intersection(between) - self._ran
            if readers:
                self._ledger.allocate(storage)
                copy = _Copy(len(readers))
                self._overwritten |= {(i, storage): copy for i in readers}
                self._uses[storage] -= len(readers)
                self._reads_to_come[storage] -= len(readers)

    def _free_copies(self, copies: Iterable[tuple[int, int]]) -> None:
        """Free copies of overwritten storages that operators no longer need."""
        for operator, storage in copies:
            self._drop(storage, self._overwritten.pop((operator, storage)))

    def _free_unused(self, storages: Iterable[int]) -> None:
        live, uses = self._live, self._uses
        for storage in storages:
            if storage in live and uses[storage] <= 0:
                self._drop(storage, live.pop(storage))

    def _drop(self, storage: int, copy: _Copy) -> None:
        copy.holders -= 1
        if not copy.holders:
            self._ledger.release(storage)


def _count(reads: Iterable[Iterable[int]]) -> defaultdict[int, int]:
    """Return how often each storage is read; a `Counter` would take twice as long."""
    found: defaultdict[int, int] = defaultdict(int)
    for storages in reads:
        for storage in storages:
            found[storage] += 1
    return found


def _stages(graph: StepGraph, choice: Choice, saved: Sequence[int]) -> dict[int, int]:
    """Return the stages that recompute saved tensors, by index."""
    starts = [stage.start for stage in choice.stages[1:]]
    return {i: bisect_right(starts, graph.saved[i].moment) for i in saved}
