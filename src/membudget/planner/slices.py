"""Recompute slices: the operators of a block that recompute what it drops.

Dropped saved tensors are recomputed by a *recompute slice* of the block, a backward
program slice (Weiser 1981). A scan from the last operator to the first adds every
writer of a needed storage to the slice, and marks the writer's inputs as needed.

    operator   0        1        2        3            saved: c, dropped: a, b, c
    writes     a        b        d        c
    reads      x        a        a        b
               in       in       -        in           slice: 0, 1, 3; source: x
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Block,
    Choice,
    droppable_in,
    made_in,
    once,
    overwritten_reads,
    storages_saved_in,
    wanted_in,
)


@dataclass
class RecomputeSlice:
    """Operators that recompute target storages, and how long each result is needed."""

    targets: dict[int, int]  # Storage to the op index at which autograd frees it.
    needed_until: dict[int, int]  # Op index until which a target depends on it.
    writers: dict[int, list[int]] = field(default_factory=dict)  # By storage.
    writes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # By operator.
    # By operator, without the storages that it writes.
    reads: dict[int, list[int]] = field(default_factory=dict)

    def until_of(self, operator: int) -> int:
        """Return the op index until which targets depend on what an operator writes."""
        return max(self.needed_until.get(s, 0) for s in self.writes[operator])


def dropped_in(graph: StepGraph, choice: Choice) -> set[int]:
    """Return the storages that a block makes and does not keep.

    What a recompute reads as it was before a write is not kept, but made again.
    """
    droppable = droppable_in(graph, choice)
    dropped, kept = droppable - choice.kept, droppable & choice.kept
    reads = overwritten_reads(graph, choice)
    lost = kept.intersection(chain.from_iterable(reads.values()))
    while lost:
        again = slice_of_saved(graph, choice, dropped).reads
        lost = {s for i in again for s in reads.get(i, ()) if s in kept - dropped}
        dropped |= lost
    return dropped


def slice_of_saved(
    graph: StepGraph, block: Block, dropped: Collection[int]
) -> RecomputeSlice:
    """Return the slice that recomputes the dropped saved tensors of a block."""
    targets: dict[int, int] = {}
    for index, storage in storages_saved_in(graph, block).items():
        if storage in dropped:
            targets[storage] = max(targets.get(storage, 0), graph.saved[index].freed)
    return slice_of(graph, block, dropped, targets)


def useful_kept(graph: StepGraph, choice: Choice) -> set[int]:
    """Return the kept storages that the backward pass or a recompute reads.

    The engine would keep the others as long as anything computed from them lives.
    """
    dropped = dropped_in(graph, choice)
    return _useful_in(graph, choice, dropped, slice_of_saved(graph, choice, dropped))


def _useful_in(
    graph: StepGraph, block: Block, dropped: set[int], found: RecomputeSlice
) -> set[int]:
    read = found.needed_until.keys()
    return (made_in(graph, block) - dropped) & (read | wanted_in(graph, block))


def slice_of(
    graph: StepGraph, block: Block, dropped: Collection[int], targets: dict[int, int]
) -> RecomputeSlice:
    """Return the operators of a block that recompute the given targets.

    Only storages in `dropped` are recomputed; all others are available as inputs.
    """
    found = RecomputeSlice(targets, dict(targets))
    until = found.needed_until
    needed = until.keys()
    for index, writes, reads, others in _makers_in(graph, block):
        if needed.isdisjoint(writes):  # Of most: half the time of looking for them.
            continue
        outputs = [s for s in writes if s in dropped and s in until]
        if not outputs:
            continue
        # Scanned backwards: `insert` at the front restores forward order.
        for storage in outputs:
            found.writers.setdefault(storage, []).insert(0, index)
        found.writes[index] = writes
        found.reads[index] = others
        # The operator's inputs are needed as long as its outputs.
        latest = max(map(until.__getitem__, outputs))
        for storage in reads:
            if storage not in outputs:
                until[storage] = max(until.get(storage, 0), latest)
    return found


def held_by_living(
    graph: StepGraph,
    block: Block,
    dropped: set[int],
    found: RecomputeSlice,
    ends: Mapping[int, int],
) -> dict[int, int]:
    """Return the op indices until which a block holds sources of what lives.

    What is not kept, and the forward has not released, may yet be saved, or read by
    what is. So the region holds what would recompute it, also where a backward pass
    inside the forward has freed that.

    Args:
        graph: The step.
        block: The block.
        dropped: What it drops.
        found: The slice that recomputes this.
        ends: The op indices at which storages are freed that do not live as in the
            plain step.
    """
    unkept = droppable_in(graph, block) - _useful_in(graph, block, dropped, found)
    later = (s for s, end in ends.items() if end >= block.end)
    sources = (_read_and_freed_in(graph, block) - unkept).difference(later)
    until: dict[int, int] = {}  # That long, a storage may recompute what lives.
    for maker in _makers_in(graph, block) if sources else ():
        last = 0
        for output in unkept.intersection(maker.writes):
            lives = min(graph.storages[output].released_or_dead, block.end)
            last = max(last, lives, until.get(output, 0))
        if last:
            for storage in maker.reads:
                until[storage] = max(last, until.get(storage, 0))
    return {storage: until[storage] for storage in sources if storage in until}


@once
def _read_and_freed_in(graph: StepGraph, block: Block) -> set[int]:
    """Return the storages that a block reads, of which nothing is left at its end."""
    read = {s for maker in _makers_in(graph, block) for s in maker.reads}
    return {s for s in read if graph.storages[s].death < block.end}


@once
def _makers_in(graph: StepGraph, block: Block) -> list[_Maker]:
    """Return the operators of a block that are no views, last to first."""
    found = []
    for index in range(block.end - 1, block.start - 1, -1):
        if not graph.operators[index].is_view:
            writes, reads = graph.writes[index], graph.reads[index]
            others = [s for s in reads if s not in writes]
            found.append(_Maker(index, writes, reads, others))
    return found


class _Maker(NamedTuple):
    """An operator: its op index, and what it writes, reads, and only reads."""

    number: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    others: list[int]
