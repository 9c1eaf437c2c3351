"""Which operators make again what the backward asks for, and which run together.

The problem: an exact planner searches all schedules, so what cannot matter must go
before it begins. On the way to all that autograd saved, if nothing is kept, operators
are joined to *makers*:

* operators that write one storage run together;
* where a storage serves one maker alone, which makes one storage that is no larger and
  is there no less long of itself, the two makers are joined. Who holds the former could
  hold the latter instead, for no more bytes and fewer seconds, so that no schedule is
  lost that could be the best. So the output of a convolution that is rectified at once
  is no choice of its own;
* views are passed over, and so is what is there anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from membudget.graph import StepGraph
from membudget.planner.choice import Choice, made_in
from membudget.planner.slices import slice_of_saved


@dataclass(frozen=True)
class Maker:
    """Operators that run again together.

    Attributes:
        operators: Them, in order.
        seconds: What they take.
        must_keep: Whether they must not run again.
        makes: The items that they make.
        reads: The items that they need.
        passing: Operators and bytes of what they make beside items: those bytes are
            alive while the operator runs.
    """

    operators: tuple[int, ...]
    seconds: float
    must_keep: bool
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    passing: tuple[tuple[int, int], ...]


class Grouping:
    """Groups operators on the way to all that autograd saved in a region.

    Attributes:
        writers: The operators that make each storage, in order.
        reads: What each of them needs.
        sources: What each of them reads that the step made before the region.
        until: The first moment at which nothing comes of each storage.
        freed: The first moment at which autograd frees what it saved in the region.
    """

    def __init__(self, graph: StepGraph, region: Choice, always: frozenset[int]):
        """Find them.

        Args:
            graph: The step.
            region: What schedules are of; what is not made in it is a source.
            always: Storages that are there whatever is chosen.
        """
        self._graph = graph
        self._region = region
        made = made_in(graph, region) - always
        ways = slice_of_saved(graph, region, made)
        self.freed, self.until = ways.targets, ways.needed_until
        self.writers = ways.writers
        self.reads = {
            index: [storage for storage in read if storage in made]
            for index, read in ways.reads.items()
        }
        self.sources = {
            index: [s for s in read if 0 <= graph.storages[s].birth < region.start]
            for index, read in ways.reads.items()
        }

    def grouped(self) -> list[Maker]:
        """Return makers: operators that write one storage are together."""
        group_of: dict[int, set[int]] = {}
        for writers in self.writers.values():
            together = set(writers).union(*(group_of.get(w, ()) for w in writers))
            group_of |= dict.fromkeys(together, together)
        groups = {min(group): sorted(group) for group in group_of.values()}
        return [self._maker(groups[first]) for first in sorted(groups)]

    def _maker(self, operators: Sequence[int]) -> Maker:
        graph = self._graph
        inside = set(operators)
        makes = [s for s, w in self.writers.items() if inside.issuperset(w)]
        reads = {s for index in operators for s in self.reads[index]}.difference(makes)
        return Maker(
            tuple(operators),
            sum(graph.operators[index].seconds for index in operators),
            any(graph.operators[index].must_keep for index in operators),
            tuple(sorted(makes)),
            tuple(sorted(reads)),
            tuple(
                (index, graph.storages[storage].bytes)
                for index in operators
                for storage in graph.born_at.get(index, ())
                if storage not in self.writers
            ),
        )

    def joined(self, makers: Sequence[Maker]) -> list[Maker]:
        """Join what makes a storage with what alone reads it, where nothing is lost."""
        found = dict(enumerate(makers))
        readers: dict[int, set[int]] = {}
        for index, maker in found.items():
            for read in maker.reads:
                readers.setdefault(read, set()).add(index)
        for index in sorted(found, reverse=True):
            storage = self._passed_on(found[index])
            if storage is None or len(readers.get(storage, ())) != 1:
                continue
            (reader,) = readers[storage]
            if self._is_as_good(found[reader].makes, storage):
                first = found.pop(index)
                found[reader] = self._join(first, found[reader], storage)
                for read in first.reads:
                    readers[read] = readers[read] - {index} | {reader}
        return sorted(found.values(), key=lambda maker: maker.operators)

    def _passed_on(self, maker: Maker) -> int | None:
        """Return what a maker makes, if it is one storage that autograd never saw."""
        if len(maker.makes) != 1 or maker.makes[0] in self.freed:
            return None
        storage = maker.makes[0]
        in_backward = self._graph.storages[storage].death > self._graph.backward_start
        return None if in_backward else storage

    def _is_as_good(self, instead: Sequence[int], storage: int) -> bool:
        """Return whether a schedule may hold one storage for another, at no cost."""
        if len(instead) != 1:
            return False
        storages = self._graph.storages
        fits = storages[instead[0]].bytes <= storages[storage].bytes
        return fits and self.there_until(instead[0]) >= self.there_until(storage)

    def there_until(self, storage: int) -> int:
        """Return the first moment at which a storage is gone unless it is kept."""
        released = self._graph.storages[storage].released
        # What autograd never saw goes at its death, dropped or not.
        if released is None or storage not in self.freed:
            return self._graph.storages[storage].death
        # What was saved elsewhere, autograd keeps.
        saved = (self._graph.saved[i] for i in self._graph.saved_on[storage])
        inside = range(self._region.start, self._region.end)
        return max([released, *(s.freed for s in saved if s.moment not in inside)])

    def _join(self, first: Maker, then: Maker, storage: int) -> Maker:
        operators = tuple(sorted((*first.operators, *then.operators)))
        birth = self._graph.storages[storage].birth
        last = max(i for i in then.operators if storage in self.reads[i])
        alive = [i for i in self.reads if birth <= i <= last]
        size = self._graph.storages[storage].bytes
        return Maker(
            operators,
            first.seconds + then.seconds,
            first.must_keep or then.must_keep,
            then.makes,
            tuple(sorted({*first.reads, *then.reads} - {storage})),
            (*first.passing, *then.passing, *((index, size) for index in alive)),
        )
