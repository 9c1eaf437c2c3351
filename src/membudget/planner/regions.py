"""Regions of the forward: which operators, what they make, what is saved there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from membudget.graph import Saved, StepGraph


@dataclass(frozen=True)
class Stage:
    """A part of a region's way back: what is made again together, and let go together.

    The saved tensors of the operators from `start` up to the start of the next stage
    are served in one run: each operator on the way to them runs at most once, and what
    it makes goes at its last use in the stage. A later stage begins anew from what the
    forward kept and from what this stage held. So a nested plan is a list of stages.

    Attributes:
        start: The first operator whose saved tensors the stage serves.
        held: The storages, by index, that stay for later stages once this one has made
            them, or found them made.
    """

    start: int
    held: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Region:
    """Operators of the forward that run as one region.

    Attributes:
        start: The first of them.
        end: The first after them.
        kept: The storages that stay, by index, among those that the region makes.
        stages: In the order of the forward, the first from `start` on; none for one
            stage.
    """

    start: int
    end: int
    kept: frozenset[int] = frozenset()
    stages: tuple[Stage, ...] = ()


def made_in(graph: StepGraph, region: Region) -> set[int]:
    """Return the storages that the operators of a region make."""
    return {
        storage
        for index in range(region.start, region.end)
        for storage in graph.born_at.get(index, ())
    }


def saved_in(graph: StepGraph, region: Region) -> range:
    """Return the saved tensors that the operators of a region saved, by index."""
    first = bisect_left(graph.saved, region.start, key=_moment_of)
    return range(first, bisect_left(graph.saved, region.end, key=_moment_of))


def saved_storages(graph: StepGraph, region: Region) -> list[int]:
    """Return the storages in which the operators of a region saved tensors."""
    saved = (graph.saved[index] for index in saved_in(graph, region))
    return storages_of(graph, (s.value for s in saved))


def wanted_in(graph: StepGraph, region: Region) -> set[int]:
    """Return the storages that autograd saved in the region and asks for again."""
    saved = (graph.saved[index] for index in saved_in(graph, region))
    return set(storages_of(graph, (s.value for s in saved if s.asked)))


def _moment_of(saved: Saved) -> int:
    return saved.moment


def storages_of(graph: StepGraph, values: Iterable[int]) -> list[int]:
    """Return the storages of values, each once, in order."""
    return list(dict.fromkeys(graph.values[value].storage for value in values))
