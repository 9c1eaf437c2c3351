"""What the backward asks for, and which operators make it again: a step, reduced.

The problem: an exact planner searches all schedules, so all that cannot matter must go
before it begins. What stays are the storages that the backward asks for or that those
are made of, the *items*, and the operators that write them, joined to *makers*:

* operators that write one storage together run together;
* where a storage serves one maker alone, which makes one storage that is no larger, the
  two makers are joined. Whoever holds the former could hold the latter instead, for no
  more bytes and fewer seconds, so no schedule is lost that could be the best;
* views, storages without bytes and what the user's code holds to the end cost nothing
  and are there anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from membudget.graph import StepGraph
from membudget.planner.regions import storages_of
from membudget.planner.timeline import lifetimes, of_intervals


@dataclass(frozen=True)
class Item:
    """A storage that a schedule may keep, hold or make again.

    Attributes:
        storage: Which.
        bytes: Its size.
        birth: The operator that makes it first.
        maker: What makes it again, by index.
        readers: The operators that read it on the way to another item, in order, each
            with its maker.
        there_until: The first moment at which it is gone unless it is kept.
        kept_until: The first moment at which it is gone if it is kept, and nothing that
            is dropped comes of it.
        needed_until: The first moment at which nothing that may be dropped comes of it.
        freed: The first moment at which autograd holds it no more; -1 if it never did.
    """

    storage: int
    bytes: int
    birth: int
    maker: int
    readers: tuple[tuple[int, int], ...]
    there_until: int
    kept_until: int
    needed_until: int
    freed: int


@dataclass(frozen=True)
class Maker:
    """Operators that run again together.

    Attributes:
        operators: Them, in order.
        seconds: What they take.
        is_pinned: Whether they must not run again.
        makes: The items that they make.
        reads: The items that they need.
        passing: Operators and bytes of what they make beside items: those bytes are
            alive while the operator runs.
    """

    operators: tuple[int, ...]
    seconds: float
    is_pinned: bool
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    passing: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Demand:
    """The backward asks for an item that is not there unless a schedule sees to it.

    Attributes:
        item: The storage.
        moment: When.
        freed: The first moment at which autograd holds it no more.
        times: How often it was saved and is asked for at once.
        stage: Of which stage it is: the first operator that saved what that serves.
    """

    item: int
    moment: int
    freed: int
    times: int
    stage: int


@dataclass(frozen=True)
class Problem:
    """A step, reduced to what schedules differ in.

    Attributes:
        items: By their storage.
        makers: What makes them again.
        demands: In the order in which the backward asks.
        fixed_bytes: At each moment, of what no schedule moves; without workspace.
        always: The storages that are kept by every schedule.
    """

    items: Mapping[int, Item]
    makers: Sequence[Maker]
    demands: Sequence[Demand]
    fixed_bytes: Sequence[int]
    always: frozenset[int]


def reduced(graph: StepGraph) -> Problem:
    """Reduce a step to what schedules of its backward differ in."""
    always = _always(graph)
    ways = _Ways(graph, always)
    makers = ways.joined(ways.grouped())
    items = _items(graph, ways, makers)
    intervals = [
        *lifetimes(graph, without=items),
        *((i.birth, i.there_until, i.bytes) for i in items.values()),
    ]
    fixed = of_intervals(graph, intervals).alive_bytes
    return Problem(items, makers, _demands(graph, items), fixed, always)


def _always(graph: StepGraph) -> frozenset[int]:
    last = max((saved.freed for saved in graph.saved), default=0)
    return frozenset(
        index
        for index, storage in enumerate(graph.storages)
        if 0 <= storage.birth < graph.backward_start
        and (not storage.bytes or (storage.released is None and storage.death >= last))
    )


def _demands(graph: StepGraph, items: Mapping[int, Item]) -> list[Demand]:
    """Return the demands, with a stage for each operator that saved something.

    Operators that saved the same and are served one after the other share a stage: it
    is made once for both, and no copy of it is made for the first.
    """
    found: Counter[tuple[int, int, int, int]] = Counter()
    for saved in graph.saved:
        storage = graph.values[saved.value].storage
        if saved.asked and storage in items:
            if saved.asked[0] >= items[storage].there_until:
                found[saved.asked[0], saved.moment, storage, saved.freed] += 1
    # Within a moment they are asked for in the order in which they were saved.
    rows = sorted(found, key=lambda row: row[0])
    stages = _stages([(saver, storage) for _, saver, storage, _ in rows])
    return [
        Demand(storage, moment, freed, found[moment, saver, storage, freed], stage)
        for (moment, saver, storage, freed), stage in zip(rows, stages, strict=True)
    ]


def _stages(asked: Sequence[tuple[int, int]]) -> list[int]:
    """Return the stage of each of the savers and storages that are asked for."""
    savers = {saver for saver, _ in asked}
    first = {saver: saver for saver in savers}
    of_saver = {saver: {s for other, s in asked if other == saver} for saver in savers}
    for (before, _), (after, _) in pairwise(asked):
        is_next = before > after and not savers & set(range(after + 1, before))
        if is_next and of_saver[before] & of_saver[after]:
            first |= {s: after for s, stage in first.items() if stage == first[before]}
    return [first[saver] for saver, _ in asked]


class _Ways:
    """The operators on the way to all that autograd saved, if nothing is kept.

    Attributes:
        writers: The operators that make each storage, in order.
        reads: What each of them needs.
        until: The first moment at which nothing comes of each storage.
        wanted: The storages that autograd saved.
    """

    def __init__(self, graph: StepGraph, always: frozenset[int]):
        self._graph = graph
        self._always = always
        self.writers: dict[int, list[int]] = {}
        self.reads: dict[int, list[int]] = {}
        self.until = {
            storage: max(graph.saved[index].freed for index in indices)
            for storage, indices in graph.saved_on.items()
            if self._is_made(storage)
        }
        self.wanted = frozenset(self.until)
        for index in range(graph.backward_start - 1, -1, -1):
            if not graph.operators[index].is_view:
                self._add(index)

    def _is_made(self, storage: int) -> bool:
        birth = self._graph.storages[storage].birth
        return 0 <= birth < self._graph.backward_start and storage not in self._always

    def _add(self, index: int) -> None:
        operator = self._graph.operators[index]
        writes = storages_of(self._graph, operator.outputs)
        outputs = [storage for storage in writes if storage in self.until]
        if not outputs:
            return
        for storage in outputs:
            self.writers.setdefault(storage, []).insert(0, index)
        reads = storages_of(self._graph, operator.inputs)
        self.reads[index] = [s for s in reads if self._is_made(s) and s not in writes]
        moment = max(self.until[storage] for storage in outputs)
        for storage in reads:
            if self._is_made(storage) and storage not in outputs:
                self.until[storage] = max(self.until.get(storage, 0), moment)

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
            any(graph.operators[index].is_pinned for index in operators),
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
        found = {index: maker for index, maker in enumerate(makers)}
        for index in sorted(found, reverse=True):
            storage = self._passed_on(found[index])
            readers = [i for i, m in found.items() if storage in m.reads]
            if storage is None or len(readers) != 1:
                continue
            reader = found[readers[0]]
            if len(reader.makes) == 1 and self._bytes(reader.makes) <= self._bytes(
                [storage]
            ):
                found[readers[0]] = self._join(found.pop(index), reader, storage)
        return sorted(found.values(), key=lambda maker: maker.operators)

    def _passed_on(self, maker: Maker) -> int | None:
        """Return what a maker makes, if it is one storage that autograd never saw."""
        if len(maker.makes) != 1 or maker.makes[0] in self.wanted:
            return None
        storage = maker.makes[0]
        in_backward = self._graph.storages[storage].death > self._graph.backward_start
        return None if in_backward else storage

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._graph.storages[storage].bytes for storage in storages)

    def _join(self, first: Maker, then: Maker, storage: int) -> Maker:
        operators = tuple(sorted((*first.operators, *then.operators)))
        birth = self._graph.storages[storage].birth
        last = max(i for i in then.operators if storage in self.reads[i])
        alive = [i for i in self.reads if birth <= i <= last]
        size = self._graph.storages[storage].bytes
        return Maker(
            operators,
            first.seconds + then.seconds,
            first.is_pinned or then.is_pinned,
            then.makes,
            tuple(sorted({*first.reads, *then.reads} - {storage})),
            (*first.passing, *then.passing, *((index, size) for index in alive)),
        )


def _items(
    graph: StepGraph, ways: _Ways, makers: Sequence[Maker]
) -> dict[int, Item]:
    readers: dict[int, list[tuple[int, int]]] = {}
    for number, maker in enumerate(makers):
        for index in maker.operators:
            for storage in set(ways.reads[index]).intersection(maker.reads):
                readers.setdefault(storage, []).append((index, number))
    return {
        storage: _item(graph, storage, number, readers.get(storage, ()), ways)
        for number, maker in enumerate(makers)
        for storage in maker.makes
    }


def _item(
    graph: StepGraph,
    index: int,
    maker: int,
    readers: Iterable[tuple[int, int]],
    ways: _Ways,
) -> Item:
    storage = graph.storages[index]
    # What autograd never saw goes at its death, dropped or not.
    is_dropped = storage.released is not None and index in ways.wanted
    there_until = storage.released if is_dropped else storage.death
    assert there_until is not None
    saved = [graph.saved[i] for i in graph.saved_on.get(index, ())]
    return Item(
        storage=index,
        bytes=storage.bytes,
        birth=storage.birth,
        maker=maker,
        readers=tuple(sorted(readers)),
        there_until=there_until,
        kept_until=storage.death,
        needed_until=ways.until[index],
        freed=max((s.freed for s in saved), default=-1),
    )
