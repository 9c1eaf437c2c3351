"""Which operators must run again to recompute a dropped tensor: the recompute slice.

The slice is a backward program slice (Weiser 1981) of the block's operators: start from
the dropped tensors that autograd saved, scan from the last operator to the first, and
add every operator that writes something wanted; then its inputs are wanted, too.

    operator   0        1        2        3            saved: c, dropped: a, b, c
    writes     a        b        d        c
    reads      x        a        a        b
               in       in       -        in           slice: 0, 1, 3; source: x
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from membudget.graph import StepGraph
from membudget.planner.choice import Block, saved_in, storages_of


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
    """Return the slice that recomputes what autograd saved in a block.

    Args:
        graph: The step.
        block: The block.
        dropped: Storages that may be recomputed; all others are sources.
    """
    targets: dict[int, int] = {}
    for saved in (graph.saved[index] for index in saved_in(graph, block)):
        storage = graph.values[saved.value].storage
        if storage in dropped:
            targets[storage] = max(targets.get(storage, 0), saved.freed)
    return slice_of(graph, block, dropped, targets)


def slice_of(
    graph: StepGraph, block: Block, dropped: Collection[int], targets: dict[int, int]
) -> RecomputeSlice:
    """Return the slice that recomputes given targets.

    Args:
        graph: The step.
        block: The operators that may run again.
        dropped: Storages that may be recomputed; all others are sources.
        targets: The storages to recompute, each with the op index after which nobody
            needs it.
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
    """Return the operators of a block that write each of some storages, in order."""
    table: dict[int, list[int]] = {}
    for index in range(block.start, block.end):
        operator = graph.operators[index]
        if not operator.is_view:
            for storage in storages_of(graph, operator.outputs):
                if storage in among:
                    table.setdefault(storage, []).append(index)
    return table


def run_together(writers: Iterable[Collection[int]]) -> list[list[int]]:
    """Join operators that write the same storage: they can only run together.

    Args:
        writers: The writers of each storage.

    Returns:
        Disjoint groups of operators in ascending order of their first.

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
