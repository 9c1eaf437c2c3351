"""Find what a region copies because a later operator overwrites what a replay reads.

A replay reads the sources of its recompute slice: storages that the region keeps or was
given. If the region overwrites a source after an operator of the slice has read it, the
engine copies the source just before the write:

    operator       0 makes a    1 reads a, makes b    2 overwrites a
    a, kept        ├────────────┼─────────────────────┼─────────────
    copy of a                                         ├───────────── until b is freed

A write to one part of a split leaves the other parts as they are.

A saved tensor in memory from before the region is such a source, too, until autograd
frees it, whether anything is recomputed or not. A normalisation in training saves its
running statistics, and overwrites them:

    operator       3 saves and overwrites s                  backward of 3
    copy of s      ├────────────────────────────────────────
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Block,
    is_output,
    kept_from,
    once,
    storages_saved_in,
)
from membudget.planner.slices import RecomputeSlice

_Writes = dict[int, list[tuple[int, int]]]
"""In-place writes by storage: op indices, and the written values."""


class SourceCopy(NamedTuple):
    """A copy of a source: from a write until the last tensor that depends on it."""

    storage: int
    start: int
    end: int


def source_copies(
    graph: StepGraph, block: Block, found: RecomputeSlice
) -> list[SourceCopy]:
    """Return the copies that a block makes of what it saves or replays read."""
    copies = {(c.storage, c.start): c.end for c in copies_of_saved(graph, block)}
    for read in _reads_of_overwritten(graph, block, found):
        if read.write is not None:
            key = read.storage, read.write
            copies[key] = max(found.until_of(read.operator), copies.get(key, 0))
    return [SourceCopy(*key, until) for key, until in copies.items()]


def sources_until(
    graph: StepGraph, block: Block, found: RecomputeSlice
) -> dict[int, int]:
    """Return the op indices until which a block holds what its replays read.

    A source that replays read only from its copy is not held.
    """
    elsewhere = found.writers.keys() | overwrites_in(graph, block).keys()
    held = {s: end for s, end in found.needed_until.items() if s not in elsewhere}
    for read in _reads_of_overwritten(graph, block, found):
        until = found.until_of(read.operator) if read.write is None else 0
        held[read.storage] = max(until, held.get(read.storage, 0))
    return held


class _Read(NamedTuple):
    operator: int  # That runs again, and reads the storage.
    storage: int
    write: int | None  # The op index before which the storage is copied.


def _reads_of_overwritten(
    graph: StepGraph, block: Block, found: RecomputeSlice
) -> Iterator[_Read]:
    """Yield what operators of a slice read of sources that the block overwrites."""
    writes = overwrites_in(graph, block)
    for index, written in found.writes.items() if writes else ():
        if writes.keys().isdisjoint(graph.reads[index]):
            continue
        for value in graph.operators[index].inputs:
            storage = graph.values[value].storage
            if storage in found.writers or storage not in writes:
                continue
            since = max(index + 1, _held_from(graph, block, storage))
            later = (
                moment
                for moment, result in writes[storage]
                if moment >= since and _overlap(graph, value, result)
            )
            # The next call overwrites running state, whose copy is made at the end.
            end = block.end if _is_state(graph, storage, writes, index) else None
            # Writes after the first leave the copy as it is.
            write = None if storage in written else next(later, end)
            yield _Read(index, storage, write)


def _is_state(graph: StepGraph, storage: int, writes: _Writes, index: int) -> bool:
    """Return whether an operator reads older memory that a block has written to."""
    older = graph.storages[storage]
    is_written = writes[storage][0][0] < index
    return older.birth < 0 and older.kind != "parameter" and is_written


@once
def copies_of_saved(graph: StepGraph, block: Block) -> list[SourceCopy]:
    """Return the copies of older memory that a block saves and overwrites."""
    writes, copies = overwrites_in(graph, block), dict[tuple[int, int], int]()
    for index, storage in storages_saved_in(graph, block).items():
        if graph.storages[storage].birth >= block.start or storage not in writes:
            continue
        saved = graph.saved[index]
        since = saved.moment + is_output(graph, saved)
        later = (moment for moment, _ in writes[storage] if moment >= since)
        moment = next(later, block.end)
        if moment == block.end and graph.storages[storage].kind == "parameter":
            continue  # It is no running state, which the next call overwrites.
        key = storage, moment
        copies[key] = max(saved.freed, copies.get(key, 0))
    return [SourceCopy(*key, until) for key, until in copies.items()]


@once
def overwrites_in(graph: StepGraph, block: Block) -> _Writes:
    """Return a block's in-place writes."""
    table: _Writes = {}
    for index in range(block.start, block.end):
        operator = graph.operators[index]
        for value in () if operator.is_view else operator.outputs:
            storage = graph.values[value].storage
            if graph.storages[storage].birth < index:
                table.setdefault(storage, []).append((index, value))
    return table


def _held_from(graph: StepGraph, block: Block, storage: int) -> int:
    birth = graph.storages[storage].birth
    if birth < block.start or graph.operators[birth].must_keep:
        return birth
    return kept_from(graph, block, storage)


def _overlap(graph: StepGraph, one: int, other: int) -> bool:
    """Return whether two values in a storage may share elements."""
    first, second = part_of(graph, one), part_of(graph, other)
    if first is None or second is None:
        return True
    return first == second or first[0] != second[0]


def part_of(graph: StepGraph, index: int) -> tuple[int, int] | None:
    """Return the split that a value is a part of, by its op index, and which output."""
    storage = graph.values[index].storage
    while (moment := graph.values[index].operator) >= 0:
        operator = graph.operators[moment]
        if operator.is_view and len(operator.outputs) > 1:
            return moment, operator.outputs.index(index)
        # An operator writes to the first of its arguments in a storage.
        inputs = [v for v in operator.inputs if graph.values[v].storage == storage]
        if not inputs:
            return None
        index = inputs[0]
    return None
