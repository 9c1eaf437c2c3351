"""Blocks of the forward, the choices made for them, and the storages they concern."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

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
