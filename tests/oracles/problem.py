"""A step, reduced to what schedules of its backward differ in.

The problem: for an exact planner, a step is what the backward asks for (*demands*), the
storages that it asks for or that those are made of (*items*), and what makes them again
(`makers`). All else is so many bytes at each moment. Storages without bytes, and what
the user's code holds to the end, cost nothing and are kept by every schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from membudget.graph import StepGraph
from membudget.planner.choice import Choice, saved_in
from membudget.planner.timeline import lifetimes, of_intervals
from tests.oracles.makers import Grouping, Maker


@dataclass(frozen=True)
class Item:
    """A storage that a schedule may keep, hold or make again.

    Attributes:
        storage: Which.
        bytes: Its size.
        birth: The operator that makes it first.
        maker: What makes it again, by index; -1 for a source.
        readers: The operators that read it on the way to another item, in order, each
            with its maker.
        there_until: The first moment at which it is gone unless it is kept.
        kept_until: The first moment at which it is gone if it is kept, and nothing that
            is dropped comes of it.
        needed_until: The first moment at which nothing that may be dropped comes of it.
        freed: The first moment at which autograd has freed it, as far as it was saved
            in the region; -1 if it was not.
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
        sources: What was made before the region and is kept by every schedule, as items
            without a maker.
        makers: What makes items again.
        demands: In the order in which the backward asks.
        idle: The moments of asking, of operators whose saved items are all there when
            they are asked for: stages in which nothing has to be made.
        fixed_bytes: At each moment, of what no schedule moves; without workspace.
        always: The storages that are kept by every schedule.
    """

    items: Mapping[int, Item]
    sources: Sequence[Item]
    makers: Sequence[Maker]
    demands: Sequence[Demand]
    idle: Mapping[int, Sequence[int]]
    fixed_bytes: Sequence[int]
    always: frozenset[int]


def reduced(graph: StepGraph, region: Choice | None = None) -> Problem:
    """Reduce a step to what schedules of the way back through a region differ in.

    Args:
        graph: The step.
        region: The region; the whole forward if `None`.
    """
    region = region or Choice(0, graph.backward_start)
    always = _always(graph, region)
    grouping = Grouping(graph, region, always)
    makers = grouping.joined(grouping.grouped())
    items = _items(graph, grouping, makers)
    intervals = [
        *lifetimes(graph, without=items),
        *((i.birth, i.there_until, i.bytes) for i in items.values()),
    ]
    fixed = of_intervals(graph, intervals).alive_bytes
    demands, idle = _demands(graph, region, items)
    sources = _sources(graph, grouping, makers)
    return Problem(items, sources, makers, demands, idle, fixed, always)


def _always(graph: StepGraph, region: Choice) -> frozenset[int]:
    last = max((saved.freed for saved in graph.saved), default=0)
    return frozenset(
        index
        for index, storage in enumerate(graph.storages)
        if region.start <= storage.birth < region.end
        and (not storage.bytes or (storage.released is None and storage.death >= last))
    )


def _demands(
    graph: StepGraph, region: Choice, items: Mapping[int, Item]
) -> tuple[list[Demand], dict[int, list[int]]]:
    """Return the demands, with a stage for each operator that saved something.

    Operators that saved the same and are served one after the other share a stage: it
    is made once for both, and no copy of it is made for the first.
    """
    found: Counter[tuple[int, int, int, int]] = Counter()
    idle: dict[int, list[int]] = {}
    for saved in (graph.saved[index] for index in saved_in(graph, region)):
        storage = graph.values[saved.value].storage
        if storage in items:
            moments = idle.setdefault(saved.moment, [])
            moments += saved.asked[:1]
            if saved.asked and saved.asked[0] >= items[storage].there_until:
                found[saved.asked[0], saved.moment, storage, saved.freed] += 1
    # Within a moment they are asked for in the order in which they were saved.
    rows = sorted(found, key=lambda row: row[0])
    stages = _stages([(saver, storage) for _, saver, storage, _ in rows], set(idle))
    demands = [
        Demand(storage, moment, freed, found[moment, saver, storage, freed], stage)
        for (moment, saver, storage, freed), stage in zip(rows, stages, strict=True)
    ]
    asking = {saver for _, saver, _, _ in rows}
    return demands, {s: moments for s, moments in idle.items() if s not in asking}


def _stages(asked: Sequence[tuple[int, int]], savers: set[int]) -> list[int]:
    """Return the stage of each of the savers and storages that are asked for."""
    first = {saver: saver for saver in savers}
    of_saver = {saver: {s for other, s in asked if other == saver} for saver in savers}
    for (before, _), (after, _) in pairwise(asked):
        is_next = before > after and not savers & set(range(after + 1, before))
        if is_next and of_saver[before] & of_saver[after]:
            first |= {s: after for s, stage in first.items() if stage == first[before]}
    return [first[saver] for saver, _ in asked]


def _items(
    graph: StepGraph, grouping: Grouping, makers: Sequence[Maker]
) -> dict[int, Item]:
    readers: dict[int, list[tuple[int, int]]] = {}
    for number, maker in enumerate(makers):
        for index in maker.operators:
            for storage in set(grouping.reads[index]).intersection(maker.reads):
                readers.setdefault(storage, []).append((index, number))
    return {
        storage: _item(graph, storage, number, readers.get(storage, ()), grouping)
        for number, maker in enumerate(makers)
        for storage in maker.makes
    }


def _sources(
    graph: StepGraph, grouping: Grouping, makers: Sequence[Maker]
) -> list[Item]:
    readers: dict[int, list[tuple[int, int]]] = {}
    for number, maker in enumerate(makers):
        for index in maker.operators:
            for storage in grouping.sources[index]:
                readers.setdefault(storage, []).append((index, number))
    return [
        _item(graph, storage, -1, of_storage, grouping)
        for storage, of_storage in readers.items()
    ]


def _item(
    graph: StepGraph,
    index: int,
    maker: int,
    readers: Iterable[tuple[int, int]],
    grouping: Grouping,
) -> Item:
    storage = graph.storages[index]
    return Item(
        storage=index,
        bytes=storage.bytes,
        birth=storage.birth,
        maker=maker,
        readers=tuple(sorted(readers)),
        there_until=grouping.there_until(index),
        kept_until=storage.death,
        needed_until=grouping.until[index],
        freed=grouping.freed.get(index, -1),
    )
