"""The Pareto front of a block: which storages to keep, at which price of a byte.

A block saves tensors for its backward pass. Each one is kept, which costs its bytes, or
recomputed, which costs the time of its writers and needs their inputs in turn. At a
price λ in seconds per byte the cheapest keep-set is a minimum cut (project selection,
Picard 1976) of a network with a node s for each storage, *needed*, and a node P for
each producer, *runs again*:

    source ──∞──▶ s ──λ·bytes(s)──▶ P ──seconds(P)──▶ sink        s written by P
                                    P ──∞──▶ s'                   s' read by P

Cutting s → P keeps s; cutting P → sink recomputes. Halving between known solutions over
λ finds every keep-set on the lower convex hull of (bytes, seconds), as in Eisner and
Severance 1976 for parametric cuts; those above the hull are left to mixing the choices
of several blocks. Where many storages have one price (the outputs of like layers), the
hull jumps from all of them to none, and keep-sets between are added.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from membudget.graph import StepGraph, Storage
from membudget.planner.choice import Block, made_in, storages_of, wanted_in
from membudget.planner.mincut import Network
from membudget.planner.recompute import run_together, writers_of

MOST_SPARSE = 12
"""A hull with more keep-sets than this is dense enough."""

FILLED = 8
"""At most so many keep-sets are added between two of a sparse hull."""

_HIGHEST_PRICE = 1e6
"""Seconds per byte: more than any operator costs."""

_SOURCE, _SINK = 0, 1


@dataclass(frozen=True)
class KeepSet:
    """One point of a block's front.

    Attributes:
        kept: The storages to keep, by index.
        kept_bytes: Their size.
        seconds: Recomputation time of everything else that is wanted.
    """

    kept: frozenset[int]
    kept_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Producer:
    """Operators that make storages together.

    Attributes:
        seconds: Their time; infinite if they must not run again.
        makes: The storages.
        reads: The block's storages that they read and do not make.
    """

    seconds: float
    makes: tuple[int, ...]
    reads: tuple[int, ...]


class Front:
    """The keep-sets of one block, at any price."""

    def __init__(
        self, graph: StepGraph, block: Block, always: frozenset[int] = frozenset()
    ):
        """Find the producers.

        Args:
            graph: The step.
            block: The block.
            always: Storages that every choice keeps.
        """
        made = {
            storage
            for storage in made_in(graph, block) - always
            if graph.storages[storage].bytes
            and not outlives_forward(graph, graph.storages[storage])
        }
        groups = run_together(writers_of(graph, block, made).values())
        self._producers = [_producer(graph, group, made) for group in groups]
        self._producer_of = {
            s: i for i, p in enumerate(self._producers) for s in p.makes
        }
        self.bytes = {s: graph.storages[s].bytes for s in self._producer_of}
        self._wanted = made & wanted_in(graph, block)

    def inputs(self, storage: int) -> tuple[int, ...]:
        """Return the storages that recomputing one reads."""
        return self._producers[self._producer_of[storage]].reads

    def may_drop(self, storage: int) -> bool:
        """Tell whether a storage can be recomputed at all."""
        return not math.isinf(self._producers[self._producer_of[storage]].seconds)

    def at_price(self, price: float, free: frozenset[int] = frozenset()) -> KeepSet:
        """Return the cheapest keep-set at a price.

        Args:
            price: Seconds per byte.
            free: Storages that cost nothing to keep.
        """
        return self.cheapest(
            {s: 0.0 if s in free else price * size for s, size in self.bytes.items()}
        )

    def cheapest(self, costs: Mapping[int, float]) -> KeepSet:
        """Return the cheapest keep-set, by the cost in seconds to keep each storage."""
        node = {storage: 2 + i for i, storage in enumerate(self.bytes)}
        first = 2 + len(node)
        network = Network(first + len(self._producers))
        for storage, needed in node.items():
            network.connect(needed, first + self._producer_of[storage], costs[storage])
            if storage in self._wanted:
                network.connect(_SOURCE, needed, math.inf)
        for i, producer in enumerate(self._producers):
            network.connect(first + i, _SINK, producer.seconds)
            for storage in producer.reads:
                network.connect(first + i, node[storage], math.inf)
        side = network.source_side(_SOURCE, _SINK)
        kept = frozenset(
            storage
            for storage, needed in node.items()
            if needed in side and first + self._producer_of[storage] not in side
        )
        again = (p.seconds for i, p in enumerate(self._producers) if first + i in side)
        return KeepSet(kept, sum(self.bytes[s] for s in kept), sum(again))

    def hull(self) -> list[KeepSet]:
        """Return the keep-sets on the lower convex hull, the most bytes first.

        The first recomputes nothing, the last keeps as little as possible.
        """
        most, least = self.at_price(0.0), self.at_price(_HIGHEST_PRICE)
        found = {most.kept: most, least.kept: least}
        self._between(most, least, found)
        return _ordered(found)

    def _between(
        self, more: KeepSet, less: KeepSet, found: dict[frozenset[int], KeepSet]
    ) -> None:
        """Find the corners of the hull between two of them."""
        saved_bytes = more.kept_bytes - less.kept_bytes
        if saved_bytes <= 0 or less.seconds <= more.seconds:
            return
        price = (less.seconds - more.seconds) / saved_bytes
        middle = self.at_price(price)
        cost = middle.seconds + price * middle.kept_bytes
        line = more.seconds + price * more.kept_bytes
        if middle.kept in found or cost >= line * (1 - 1e-9):
            return
        found[middle.kept] = middle
        self._between(more, middle, found)
        self._between(middle, less, found)

    def keep_sets(self) -> list[KeepSet]:
        """Return the hull, with keep-sets added where it is sparse."""
        hull = self.hull()
        if len(hull) > MOST_SPARSE:
            return hull
        found = {keep_set.kept: keep_set for keep_set in hull}
        for more, less in pairwise(hull):
            # The storages made last come first: their live ranges are the shortest.
            moved = sorted(more.kept - less.kept, reverse=True)
            gap_bytes = more.kept_bytes - less.kept_bytes
            if len(moved) < 2 or gap_bytes <= 0:
                continue
            price = 1.01 * (less.seconds - more.seconds) / gap_bytes
            step = max(1, len(moved) // (FILLED + 1))
            for count in range(step, len(moved), step):
                middle = self.at_price(price, frozenset(moved[:count]))
                if less.kept_bytes < middle.kept_bytes < more.kept_bytes:
                    found.setdefault(middle.kept, middle)
        return _ordered(found)


def _ordered(found: Mapping[frozenset[int], KeepSet]) -> list[KeepSet]:
    return sorted(found.values(), key=lambda k: (-k.kept_bytes, k.seconds))


def outlives_forward(graph: StepGraph, storage: Storage) -> bool:
    """Tell whether the user's code holds a storage into the backward pass anyway."""
    return storage.released is None and storage.death > graph.backward_start


def _producer(graph: StepGraph, group: list[int], made: set[int]) -> _Producer:
    operators = [graph.operators[index] for index in group]
    makes = made & {*storages_of(graph, (v for o in operators for v in o.outputs))}
    reads = made & {*storages_of(graph, (v for o in operators for v in o.inputs))}
    seconds = sum(operator.seconds for operator in operators)
    if any(operator.must_keep for operator in operators):
        seconds = math.inf
    return _Producer(seconds, tuple(sorted(makes)), tuple(sorted(reads - makes)))


class Fronts:
    """The keep-sets of the blocks of one step; equal blocks are solved once.

    Two blocks are equal if their operators take the same time, read and write what the
    block makes in the same way, and autograd wants the same of it.
    """

    def __init__(self, graph: StepGraph):
        """Start with none solved."""
        self._graph = graph
        # Storages stand there by their place among what the block makes.
        self._known: dict[Hashable, list[KeepSet]] = {}

    def of(self, block: Block, always: frozenset[int] = frozenset()) -> list[KeepSet]:
        """Return the keep-sets of a block, the most bytes first.

        Args:
            block: The block.
            always: Storages of the block that every choice keeps; their bytes are not
                counted.
        """
        made = sorted(made_in(self._graph, block))
        place_of = {storage: place for place, storage in enumerate(made)}
        signature = self._signature(block, place_of, always)
        known = self._known.get(signature)
        if known is None:
            known = [
                replace(k, kept=frozenset(place_of[s] for s in k.kept | always))
                for k in Front(self._graph, block, always).keep_sets()
            ]
            self._known[signature] = known
        return [
            replace(k, kept=frozenset(made[place] for place in k.kept)) for k in known
        ]

    def _signature(
        self, block: Block, place_of: dict[int, int], always: frozenset[int]
    ) -> Hashable:
        graph = self._graph
        operators = tuple(
            (
                operator.seconds,
                operator.is_view,
                operator.must_keep,
                *(
                    tuple(place_of.get(s, -1) for s in storages_of(graph, values))
                    for values in (operator.inputs, operator.outputs)
                ),
            )
            for operator in graph.operators[block.start : block.end]
        )
        wanted = wanted_in(graph, block)
        storages = tuple(
            (
                graph.storages[storage].bytes,
                outlives_forward(graph, graph.storages[storage]),
                storage in wanted,
                storage in always,
            )
            for storage in place_of
        )
        return operators, storages
