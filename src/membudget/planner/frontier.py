"""Pareto front of a block: the best storages to keep at each price per byte.

Each tensor saved for a block's backward pass is either kept, which costs its bytes, or
recomputed, which costs the time of its writers and requires their inputs. At a price λ
in seconds per byte, the cheapest keep-set is a minimum cut (project selection, Picard
1976) of a network with a node s (*needed*) for each storage and a node P (*runs again*)
for each producer:

    source ──∞──▶ s ──λ·bytes(s)──▶ P ──seconds(P)──▶ sink        s written by P
                                    P ──∞──▶ s'                   s' read by P

Cutting the edge s → P keeps the storage s; cutting P → sink runs the producer P again.
A recursion that tries the slope between two known keep-sets as the next λ (Eisner and
Severance 1976) finds every keep-set on the lower convex hull of (bytes, seconds). The
higher λ, the more is on the source side (Gallo, Grigoriadis and Tarjan 1989), so that
only nodes between the two known source sides need a cut, and each recursion has fewer.
Keep-sets above the hull are skipped: mixing choices across blocks makes up for them.
Where many storages have the same price, such as the outputs of identical layers, the
hull jumps from keeping all of them to keeping none, so keep-sets in between are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Block,
    droppable_in,
    run_together,
    wanted_in,
    writers_of,
)
from membudget.planner.network import Network

MOST_SPARSE = 12
"""A convex hull with more keep-sets than this is dense enough."""

FILLED = 8
"""Maximum number of keep-sets added between two neighbours of a sparse hull."""

_HIGHEST_PRICE = 1e6
"""In seconds per byte: more than recomputation ever costs."""

_SOURCE, _SINK = 0, 1


@dataclass(frozen=True)
class KeepSet:
    """One point of a block's Pareto front: the storages to keep, by index."""

    kept: frozenset[int]
    kept_bytes: int
    seconds: float  # To recompute all other saved tensors.


@dataclass(frozen=True)
class _Producer:
    """Operators that must run together to make some storages of a block."""

    seconds: float  # Infinite if they must not run again.
    makes: tuple[int, ...]
    reads: tuple[int, ...]  # The block's storages that they read and do not make.


class _Cut(NamedTuple):
    """A minimum cut: its keep-set, and the nodes on its source side."""

    keep_set: KeepSet
    side: frozenset[int]


class _Nodes(NamedTuple):
    """The nodes that may be on either side of a cut.

    Attributes:
        place: Their numbers in the network.
        network: The network, in which what costs to be kept has no capacity yet.
        priced: The storages that the edges without capacity stand for.
    """

    place: dict[int, int]
    network: Network
    priced: dict[int, int]


class Front:
    """Minimum-cut solver for the keep-sets of one block."""

    def __init__(
        self, graph: StepGraph, block: Block, always: frozenset[int] = frozenset()
    ):
        """Group operators that must run together; keep-sets always include `always`."""
        made = droppable_in(graph, block) - always
        groups = run_together(writers_of(graph, block, made).values())
        self._producers = [_producer(graph, group, made) for group in groups]
        self._producer_of = {
            s: i for i, p in enumerate(self._producers) for s in p.makes
        }
        self.bytes = {s: graph.storages[s].bytes for s in self._producer_of}
        # Nodes: the producers, then the storages.
        self._node = dict(zip(self.bytes, count(len(self._producers))))
        self._all = frozenset(range(len(self._producers) + len(self._node)))
        wanted = made & wanted_in(graph, block)
        # Every cut has them on the source side, so that nothing lies below these.
        self._wanted = frozenset(self._node[s] for s in wanted if s in self._node)
        self._whole = self._nodes_between(self._wanted, self._all)

    def inputs(self, storage: int) -> tuple[int, ...]:
        """Return the block's storages that recomputing `storage` reads."""
        return self._producers[self._producer_of[storage]].reads

    def droppable(self) -> list[int]:
        """Return the block's storages that a keep-set may leave out."""
        of = self._producer_of
        return [s for s in of if not math.isinf(self._producers[of[s]].seconds)]

    def cheapest(self, costs: Mapping[int, float]) -> KeepSet:
        """Return the cheapest keep-set; `costs` are the storages' prices in seconds."""
        return self._cut(costs, self._wanted, self._all).keep_set

    def hull(self) -> list[KeepSet]:
        """Return the keep-sets on the lower convex hull, largest first.

        The first keep-set recomputes nothing; the last keeps as little as possible.
        """
        return [cut.keep_set for cut in self._hull()]

    def _hull(self) -> list[_Cut]:
        most = self._at_price(0.0, self._wanted, self._all)
        least = self._at_price(_HIGHEST_PRICE, most.side, self._all)
        found = {most.keep_set.kept: most, least.keep_set.kept: least}
        self._between(most, least, found)
        return sorted(found.values(), key=_by_size)

    def _between(
        self, more: _Cut, less: _Cut, found: dict[frozenset[int], _Cut]
    ) -> None:
        """Find the corners of the convex hull between two known corners."""
        saved_bytes = more.keep_set.kept_bytes - less.keep_set.kept_bytes
        longer_s = less.keep_set.seconds - more.keep_set.seconds
        if saved_bytes <= 0 or longer_s <= 0:
            return
        price = longer_s / saved_bytes
        middle = self._at_price(price, more.side, less.side)
        cost = middle.keep_set.seconds + price * middle.keep_set.kept_bytes
        line = more.keep_set.seconds + price * more.keep_set.kept_bytes
        # A point on the line between both is no corner, rounding aside.
        if middle.keep_set.kept in found or cost >= line * (1 - 1e-9):
            return
        found[middle.keep_set.kept] = middle
        self._between(more, middle, found)
        self._between(middle, less, found)

    def keep_sets(self) -> list[KeepSet]:
        """Return the keep-sets on the convex hull, with sparse stretches filled in."""
        hull = self._hull()
        found = {cut.keep_set.kept: cut.keep_set for cut in hull}
        if len(hull) <= MOST_SPARSE:
            for more, less in pairwise(hull):
                for keep_set in self._filling(more, less):
                    found.setdefault(keep_set.kept, keep_set)
        return sorted(found.values(), key=_size)

    def _filling(self, more: _Cut, less: _Cut) -> Iterator[KeepSet]:
        """Yield keep-sets between two neighbours on the convex hull."""
        most, least = more.keep_set, less.keep_set
        # Keep the latest storages first: their live ranges are the shortest.
        moved = sorted(most.kept - least.kept, reverse=True)
        gap_bytes = most.kept_bytes - least.kept_bytes
        if len(moved) < 2 or gap_bytes <= 0:
            return
        # Just above the slope, only free storages of `moved` are worth keeping.
        price = 1.01 * (least.seconds - most.seconds) / gap_bytes
        step = max(1, len(moved) // (FILLED + 1))
        within = less.side
        for number in range(step, len(moved), step):
            middle = self._at_price(price, more.side, within, frozenset(moved[:number]))
            within = middle.side  # The more is free, the less runs again.
            if least.kept_bytes < middle.keep_set.kept_bytes < most.kept_bytes:
                yield middle.keep_set

    def _at_price(
        self,
        price: float,
        known: frozenset[int],
        within: frozenset[int],
        free: frozenset[int] = frozenset(),
    ) -> _Cut:
        """Return the minimum cut at a price per byte; see `_cut` for the nodes."""
        costs = {s: 0.0 if s in free else price * n for s, n in self.bytes.items()}
        return self._cut(costs, known, within)

    def _cut(
        self,
        costs: Mapping[int, float],
        known: frozenset[int],
        within: frozenset[int],
    ) -> _Cut:
        """Return the minimum cut whose source side has `known`, and is in `within`."""
        is_whole = known is self._wanted and within is self._all
        nodes = self._whole if is_whole else self._nodes_between(known, within)
        priced, place = nodes.priced.items(), nodes.place
        network = nodes.network.with_capacities((e, costs[s]) for e, s in priced)
        reached = network.source_side(_SOURCE, _SINK)
        side = known.union(node for node, at in place.items() if at in reached)
        kept = frozenset(
            storage
            for storage, maker in self._producer_of.items()
            if self._node[storage] in side and maker not in side
        )
        again = (p.seconds for i, p in enumerate(self._producers) if i in side)
        kept_bytes = sum(self.bytes[storage] for storage in kept)
        return _Cut(KeepSet(kept, kept_bytes, sum(again)), side)

    def _nodes_between(self, known: frozenset[int], within: frozenset[int]) -> _Nodes:
        """Return the network of the nodes that may be on either side of a cut."""
        between = within - known
        place = {node: 2 + i for i, node in enumerate(sorted(between))}
        network, priced = Network(2 + len(place)), {}
        for storage, maker in self._producer_of.items():
            node = self._node[storage]
            start = _SOURCE if node in known else place.get(node)
            if start is not None and maker not in known:
                edge = network.connect(start, place.get(maker, _SINK), 0.0)
                priced[edge] = storage
        for maker in between.intersection(range(len(self._producers))):
            producer = self._producers[maker]
            network.connect(place[maker], _SINK, producer.seconds)
            for node in map(self._node.__getitem__, producer.reads):
                if node in place:
                    network.connect(place[maker], place[node], math.inf)
        return _Nodes(place, network, priced)


def _size(keep_set: KeepSet) -> tuple[int, float]:
    return -keep_set.kept_bytes, keep_set.seconds


def _by_size(cut: _Cut) -> tuple[int, float]:
    return _size(cut.keep_set)


def _producer(graph: StepGraph, group: list[int], made: set[int]) -> _Producer:
    operators = [graph.operators[index] for index in group]
    makes = made & {storage for index in group for storage in graph.writes[index]}
    reads = made & {storage for index in group for storage in graph.reads[index]}
    seconds = sum(operator.seconds for operator in operators)
    if any(operator.must_keep for operator in operators):
        seconds = math.inf
    return _Producer(seconds, tuple(sorted(makes)), tuple(sorted(reads - makes)))
