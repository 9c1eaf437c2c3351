"""Blocks of the forward, and choices of what they keep."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Literal, TypeVar

from membudget.graph import Saved, StepGraph

T = TypeVar("T")

BlockEngine = Literal["replay", "rerun"]

REPLAY: BlockEngine = "replay"
RERUN: BlockEngine = "rerun"


@dataclass(frozen=True)
class Block:
    """A run of consecutive forward operators.

    Attributes:
        start: Index of the first operator of the block.
        end: One past the index of the last operator of the block.
    """

    start: int
    end: int


@dataclass(frozen=True)
class Stage:
    """One stage of nested recomputation: a part of a block's backward pass.

    A stage recomputes the saved tensors of the operators from `start` up to the start
    of the next stage. Within a stage, each operator runs at most once, and each result
    is freed after its last use. Each stage recomputes from the storages that the
    forward kept and those retained by the stage that ran before it; nested
    recomputation is a list of stages.

    Attributes:
        start: Index of the first operator whose saved tensors the stage recomputes.
        retained: Indices of the storages that stay live for the stages that run later.
    """

    start: int
    retained: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Choice(Block):
    """The storages that a block keeps; its other saved tensors are recomputed.

    Attributes:
        kept: Indices of the storages that the block allocates and the forward keeps.
        stages: Stages of the block's backward pass, in forward order, the first of
            which begins at the block's `start`; empty for a single stage.
        engine: What recomputes dropped tensors. `RERUN` runs the block's function again
            as a whole: then the block keeps nothing and has no stages.
        offloaded: Those of `kept` that are moved to the host; see `planner.moved`.
    """

    kept: frozenset[int] = frozenset()
    stages: tuple[Stage, ...] = ()
    engine: BlockEngine = REPLAY
    offloaded: frozenset[int] = frozenset()


def once(find: Callable[[StepGraph, Block], T]) -> Callable[[StepGraph, Block], T]:
    """Find what depends on a block alone once for each graph; nobody may change it."""
    name = f"{find.__module__}.{find.__name__}"

    @wraps(find)
    def known(graph: StepGraph, block: Block) -> T:
        table = graph.known.setdefault(name, {})
        where = block.start, block.end
        if where not in table:
            table[where] = find(graph, block)
        found: T = table[where]
        return found

    return known


@once
def made_in(graph: StepGraph, block: Block) -> set[int]:
    """Return the storages that a block allocates."""
    return {
        storage
        for index in range(block.start, block.end)
        for storage in graph.born_at.get(index, ())
    }


@once
def saved_in(graph: StepGraph, block: Block) -> range:
    """Return the index range of the tensors that autograd saves in a block."""
    first = bisect_left(graph.saved, block.start, key=_saved_at)
    return range(first, bisect_left(graph.saved, block.end, key=_saved_at))


@once
def storages_saved_in(graph: StepGraph, block: Block) -> dict[int, int]:
    """Return the storage of each tensor that autograd saves in a block, by index."""
    saved = saved_in(graph, block)
    return {index: graph.values[graph.saved[index].value].storage for index in saved}


@once
def ends_if_dropped(graph: StepGraph, block: Block) -> dict[int, int]:
    """Return when the storages that a block saves are freed if the block drops them.

    Until then, user code or what is saved elsewhere refers to them.
    """
    own, ends = saved_in(graph, block), {}
    for storage in storages_saved_in(graph, block).values():
        released = graph.storages[storage].released
        if released is not None:
            others = (i for i in graph.saved_on[storage] if i not in own)
            ends[storage] = max([released, *(graph.saved[i].freed for i in others)])
    return ends


def wanted_in(graph: StepGraph, block: Block) -> set[int]:
    """Return the storages of a block's saved tensors that the backward pass unpacks."""
    saved = (graph.saved[index] for index in saved_in(graph, block))
    return set(storages_of(graph, (s.value for s in saved if s.asked)))


def _saved_at(saved: Saved) -> int:
    return saved.moment


def is_output(graph: StepGraph, saved: Saved) -> bool:
    """Return whether the operator that saves a tensor has made it.

    An operator's inputs are saved before it runs, its outputs afterwards.
    """
    return graph.values[saved.value].operator == saved.moment


def storages_of(graph: StepGraph, values: Iterable[int]) -> list[int]:
    """Return the distinct storages of the given tensor values, in order."""
    return list(dict.fromkeys(graph.values[value].storage for value in values))


def bytes_of(graph: StepGraph, storages: Iterable[int]) -> int:
    """Return the total bytes of the given storages."""
    return sum(graph.storages[storage].bytes for storage in storages)


def kept_from(graph: StepGraph, block: Block, storage: int) -> int:
    """Return the op index from which on a block keeps what it makes in a storage.

    A plan names the last write before the backward pass's first saved tensor in it.
    """
    asked = (s for i in graph.saved_on.get(storage, ()) if (s := graph.saved[i]).asked)
    return min([block.end, *(s.moment + is_output(graph, s) for s in asked)])


@once
def overwritten_reads(graph: StepGraph, block: Block) -> dict[int, set[int]]:
    """Return what operators of a block read as it is not kept: others overwrite it.

    `silu_` reads what it overwrites later from a copy, which autograd saves: if the
    block keeps the result, the copy cannot be made of it.
    """
    found: dict[int, set[int]] = {}
    made = made_in(graph, block)
    for storage, writers in writers_of(graph, block, made).items():
        kept = kept_from(graph, block, storage)
        last = max((w for w in writers if w < kept), default=0)
        for index in range(graph.storages[storage].birth + 1, last):
            operator = graph.operators[index]
            reads = not operator.is_view and storage in graph.reads[index]
            if reads and storage not in graph.writes[index]:
                found.setdefault(index, set()).add(storage)
    return found


def retained_in(graph: StepGraph, choice: Choice) -> list[frozenset[int]]:
    """Return what each stage retains: none of what the block reads and overwrites.

    A stage that retained such a storage, as a recurrent cell's gates, would hold it as
    it is at the first tensor that is saved in it, and make a copy for what is written
    to it later.
    """
    if not choice.stages:
        return []
    overwritten = _overwritten_in(graph, choice)
    return [stage.retained - overwritten for stage in choice.stages]


@once
def _overwritten_in(graph: StepGraph, block: Block) -> set[int]:
    """Return what a block makes, and overwrites after it was saved or read."""
    table = writers_of(graph, block, made_in(graph, block))
    saved = {s for s, w in table.items() if w[-1] >= kept_from(graph, block, s)}
    return saved.union(*overwritten_reads(graph, block).values())


def outlives_forward(graph: StepGraph, index: int) -> bool:
    """Return whether user code still holds a storage when the backward pass begins."""
    storage = graph.storages[index]
    return storage.released is None and storage.death > graph.backward_start


@once
def droppable_in(graph: StepGraph, block: Block) -> set[int]:
    """Return the storages that a block makes and may drop.

    What user code holds is always kept, and so are storages without bytes: dropping
    them would free nothing. So is what an operator in place writes that cannot run
    again, as `transpose_`; what such an operator makes anew may go unused.
    """
    always_kept = {
        storage
        for index in range(block.start, block.end)
        if graph.operators[index].must_keep and not graph.operators[index].is_view
        for storage in graph.writes[index]
        if graph.storages[storage].birth != index
    }
    return {
        storage
        for storage in made_in(graph, block) - always_kept
        if graph.storages[storage].bytes and not outlives_forward(graph, storage)
    }


def is_movable(graph: StepGraph, block: Block, index: int) -> bool:
    """Return whether a storage that a block keeps can be moved to the host.

    Only the block saves it, nobody reads it between the block and the backward pass,
    and it is written for the last time before it is saved, and read. No constant is: a
    region may see another alias of it saved than it was told to move.
    """
    storage = graph.storages[index]
    saved = [graph.saved[i] for i in graph.saved_on.get(index, ())]
    asked = [moment for s in saved for moment in s.asked]
    moments = [s.moment for s in saved]
    maker = graph.operators[graph.last_write.get(index, 0)]
    if not (maker.inputs or maker.is_random):
        return False
    if not (asked and storage.bytes and block.start <= storage.birth < block.end):
        return False
    return (
        storage.released is not None
        and storage.released <= block.end
        and not graph.operators[storage.birth].must_keep
        and min(asked) >= graph.backward_start
        and graph.last_write[index] <= min(moments)
        and max(moments) < block.end
        and not any(index in s for s in overwritten_reads(graph, block).values())
    )


def writers_of(
    graph: StepGraph, block: Block, among: Collection[int]
) -> dict[int, list[int]]:
    """Return, for each given storage, the block's operators that write it, in order."""
    table: dict[int, list[int]] = {}
    for index in range(block.start, block.end):
        operator = graph.operators[index]
        if not operator.is_view:
            for storage in graph.writes[index]:
                if storage in among:
                    table.setdefault(storage, []).append(index)
    return table


def run_together(writers: Iterable[Collection[int]]) -> list[list[int]]:
    """Group operators that write to the same storage and therefore must run together.

    Example:
        >>> run_together([[0, 2], [1], [2, 3]])
        [[0, 2, 3], [1]]
    """
    group_of: dict[int, set[int]] = {}  # The members of a group share one set.
    for together in writers:
        joined = set(together).union(*(group_of.get(w, ()) for w in together))
        group_of |= dict.fromkeys(joined, joined)
    groups = {min(group): sorted(group) for group in group_of.values()}
    return [groups[first] for first in sorted(groups)]
