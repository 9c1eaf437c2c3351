"""Blocks of the forward, what a choice keeps of them, and what must then run again.

To recompute the dropped tensors that autograd saved, a *recompute slice* of the block
runs: a backward program slice (Weiser 1981). Scan from the last operator to the first,
and add every operator that writes something wanted; then its inputs are wanted, too.

    operator   0        1        2        3            saved: c, dropped: a, b, c
    writes     a        b        d        c
    reads      x        a        a        b
               in       in       -        in           slice: 0, 1, 3; source: x
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from membudget.graph import Saved, StepGraph


@dataclass(frozen=True)
class Block:
    """A run of consecutive forward operators.

    Attributes:
        start: Index of the first operator.
        end: Index after the last operator.
    """

    start: int
    end: int


@dataclass(frozen=True)
class Stage:
    """A part of a block's backward pass that recomputes on its own.

    A stage serves the saved tensors of the operators from `start` up to the next
    stage's start. It runs each operator of their recompute slice at most once, and
    frees each result after its last use. The next stage starts over from what the
    forward kept and what this stage retained; nested recomputation is a list of stages.

    Attributes:
        start: The first operator whose saved tensors the stage serves.
        retained: Storages, by index, that stay live for stages still to come.
    """

    start: int
    retained: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Choice(Block):
    """What to keep of a block; everything else that autograd saved is recomputed.

    Attributes:
        kept: Storages, by index, that the block makes and the forward keeps.
        stages: The stages of the backward pass, in forward order, the first at
            `start`; empty for a single stage.
    """

    kept: frozenset[int] = frozenset()
    stages: tuple[Stage, ...] = ()


def made_in(graph: StepGraph, block: Block) -> set[int]:
    """Return the storages that a block allocates."""
    return {
        storage
        for index in range(block.start, block.end)
        for storage in graph.born_at.get(index, ())
    }


def saved_in(graph: StepGraph, block: Block) -> range:
    """Return the saved tensors of a block, as a range of indices."""
    first = bisect_left(graph.saved, block.start, key=_saved_at)
    return range(first, bisect_left(graph.saved, block.end, key=_saved_at))


def saved_storages(graph: StepGraph, block: Block) -> list[int]:
    """Return the storages of a block's saved tensors."""
    saved = (graph.saved[index] for index in saved_in(graph, block))
    return storages_of(graph, (s.value for s in saved))


def wanted_in(graph: StepGraph, block: Block) -> set[int]:
    """Return the storages of those saved tensors that the backward pass unpacks."""
    saved = (graph.saved[index] for index in saved_in(graph, block))
    return set(storages_of(graph, (s.value for s in saved if s.asked)))


def _saved_at(saved: Saved) -> int:
    return saved.moment


def storages_of(graph: StepGraph, values: Iterable[int]) -> list[int]:
    """Return the storages of some values, without duplicates, in order."""
    return list(dict.fromkeys(graph.values[value].storage for value in values))


def bytes_of(graph: StepGraph, storages: Iterable[int]) -> int:
    """Return the total size of some storages."""
    return sum(graph.storages[storage].bytes for storage in storages)


@dataclass
class RecomputeSlice:
    """The operators that recompute some targets, and how long their results matter.

    Attributes:
        targets: Each storage to recompute, with the op index after which nobody needs
            it.
        needed_until: The same for every storage that the slice reads or writes.
        writers: The operators of the slice that write each storage, in order.
        writes: All storages that each operator of the slice writes.
        reads: What each of them reads and does not write.
    """

    targets: dict[int, int]
    needed_until: dict[int, int]
    writers: dict[int, list[int]] = field(default_factory=dict)
    writes: dict[int, list[int]] = field(default_factory=dict)
    reads: dict[int, list[int]] = field(default_factory=dict)


def slice_of_saved(
    graph: StepGraph, block: Block, dropped: Collection[int]
) -> RecomputeSlice:
    """Return the slice that recomputes those that autograd saved in a block."""
    targets: dict[int, int] = {}
    for saved in (graph.saved[index] for index in saved_in(graph, block)):
        storage = graph.values[saved.value].storage
        if storage in dropped:
            targets[storage] = max(targets.get(storage, 0), saved.freed)
    return slice_of(graph, block, dropped, targets)


def slice_of(
    graph: StepGraph, block: Block, dropped: Collection[int], targets: dict[int, int]
) -> RecomputeSlice:
    """Return the slice of a block that recomputes some targets.

    Dropped storages may be recomputed; all others are sources.
    """
    found = RecomputeSlice(targets, dict(targets))
    until = found.needed_until
    for index in range(block.end - 1, block.start - 1, -1):
        operator = graph.operators[index]
        if operator.is_view:
            continue
        writes = storages_of(graph, operator.outputs)
        outputs = [s for s in writes if s in dropped and s in until]
        if not outputs:
            continue
        for storage in outputs:
            found.writers.setdefault(storage, []).insert(0, index)
        reads = storages_of(graph, operator.inputs)
        found.writes[index] = writes
        found.reads[index] = [s for s in reads if s not in writes]
        latest = max(until[storage] for storage in outputs)
        for storage in reads:
            if storage not in outputs:
                until[storage] = max(until.get(storage, 0), latest)
    return found


def writers_of(
    graph: StepGraph, block: Block, among: Collection[int]
) -> dict[int, list[int]]:
    """Return, for each given storage, the block's operators that write it, in order."""
    table: dict[int, list[int]] = {}
    for index in range(block.start, block.end):
        operator = graph.operators[index]
        if not operator.is_view:
            for storage in storages_of(graph, operator.outputs):
                if storage in among:
                    table.setdefault(storage, []).append(index)
    return table


def run_together(writers: Iterable[Collection[int]]) -> list[list[int]]:
    """Join the writers of each storage: they can only run together.

    Example:
        >>> run_together([[0, 2], [1], [2, 3]])
        [[0, 2, 3], [1]]
    """
    group_of: dict[int, set[int]] = {}
    for together in writers:
        joined = set(together).union(*(group_of.get(w, ()) for w in together))
        group_of |= dict.fromkeys(joined, joined)
    groups = {min(group): sorted(group) for group in group_of.values()}
    return [groups[first] for first in sorted(groups)]
