"""Pareto front of a block: the best storages to keep at each price per byte.

Each tensor saved for a block's backward pass is either kept, which costs its bytes, or
recomputed, which costs the time of its writers and requires their inputs. At a price λ
in seconds per byte, the cheapest keep-set is a minimum cut (project selection, Picard
1976) of a network with a node s (*needed*) for each storage and a node P (*runs again*)
for each producer:

    source ──∞──▶ s ──λ·bytes(s)──▶ P ──seconds(P)──▶ sink        s written by P
                                    P ──∞──▶ s'                   s' read by P

Cutting the edge s → P keeps the storage s; cutting P → sink runs the producer P again.
Dinic's algorithm (1970) finds the minimum cut. A recursion that tries the slope between
two known keep-sets as the next λ (Eisner and Severance 1976) finds every keep-set on
the lower convex hull of (bytes, seconds). Keep-sets above the hull are skipped: mixing
choices across blocks makes up for them. Where many storages have the same price, such
as the outputs of identical layers, the hull jumps from keeping all of them to keeping
none, so keep-sets in between are added.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Block,
    made_in,
    outlives_forward,
    run_together,
    storages_of,
    wanted_in,
    writers_of,
)

MOST_SPARSE = 12
"""A convex hull with more keep-sets than this is dense enough."""

FILLED = 8
"""Maximum number of keep-sets added between two neighbours of a sparse hull."""

_HIGHEST_PRICE = 1e6
"""In seconds per byte: more than recomputation ever costs."""

_SOURCE, _SINK = 0, 1
_EPSILON = 1e-15


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


class Front:
    """Minimum-cut solver for the keep-sets of one block."""

    def __init__(
        self, graph: StepGraph, block: Block, always: frozenset[int] = frozenset()
    ):
        """Group operators that must run together; keep-sets always include `always`."""
        made = {
            storage
            for storage in made_in(graph, block) - always
            if graph.storages[storage].bytes and not outlives_forward(graph, storage)
        }
        groups = run_together(writers_of(graph, block, made).values())
        self._producers = [_producer(graph, group, made) for group in groups]
        self._producer_of = {
            s: i for i, p in enumerate(self._producers) for s in p.makes
        }
        self.bytes = {s: graph.storages[s].bytes for s in self._producer_of}
        self._wanted = made & wanted_in(graph, block)

    def inputs(self, storage: int) -> tuple[int, ...]:
        """Return the block's storages that recomputing `storage` reads."""
        return self._producers[self._producer_of[storage]].reads

    def droppable(self) -> list[int]:
        """Return the block's storages that a keep-set may leave out."""
        of = self._producer_of
        return [s for s in of if not math.isinf(self._producers[of[s]].seconds)]

    def at_price(self, price: float, free: frozenset[int] = frozenset()) -> KeepSet:
        """Return the cheapest keep-set at a price per byte; `free` storages cost 0."""
        return self.cheapest(
            {s: 0.0 if s in free else price * size for s, size in self.bytes.items()}
        )

    def cheapest(self, costs: Mapping[int, float]) -> KeepSet:
        """Return the cheapest keep-set; `costs` are the storages' prices in seconds."""
        # Nodes: source, sink, then the storages, then the producers.
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
        """Return the keep-sets on the lower convex hull, largest first.

        The first keep-set recomputes nothing; the last keeps as little as possible.
        """
        most, least = self.at_price(0.0), self.at_price(_HIGHEST_PRICE)
        found = {most.kept: most, least.kept: least}
        self._between(most, least, found)
        return _ordered(found)

    def _between(
        self, more: KeepSet, less: KeepSet, found: dict[frozenset[int], KeepSet]
    ) -> None:
        """Find the corners of the convex hull between two known corners."""
        saved_bytes = more.kept_bytes - less.kept_bytes
        if saved_bytes <= 0 or less.seconds <= more.seconds:
            return
        price = (less.seconds - more.seconds) / saved_bytes
        middle = self.at_price(price)
        cost = middle.seconds + price * middle.kept_bytes
        line = more.seconds + price * more.kept_bytes
        # A point on the line between both is no corner, rounding aside.
        if middle.kept in found or cost >= line * (1 - 1e-9):
            return
        found[middle.kept] = middle
        self._between(more, middle, found)
        self._between(middle, less, found)

    def keep_sets(self) -> list[KeepSet]:
        """Return the keep-sets on the convex hull, with sparse stretches filled in."""
        hull = self.hull()
        if len(hull) > MOST_SPARSE:
            return hull
        found = {keep_set.kept: keep_set for keep_set in hull}
        for more, less in pairwise(hull):
            # Keep the latest storages first: their live ranges are the shortest.
            moved = sorted(more.kept - less.kept, reverse=True)
            gap_bytes = more.kept_bytes - less.kept_bytes
            if len(moved) < 2 or gap_bytes <= 0:
                continue
            # Just above the slope, only free storages of `moved` are worth keeping.
            price = 1.01 * (less.seconds - more.seconds) / gap_bytes
            step = max(1, len(moved) // (FILLED + 1))
            for count in range(step, len(moved), step):
                middle = self.at_price(price, frozenset(moved[:count]))
                if less.kept_bytes < middle.kept_bytes < more.kept_bytes:
                    found.setdefault(middle.kept, middle)
        return _ordered(found)


def _ordered(found: Mapping[frozenset[int], KeepSet]) -> list[KeepSet]:
    return sorted(found.values(), key=lambda k: (-k.kept_bytes, k.seconds))


def _producer(graph: StepGraph, group: list[int], made: set[int]) -> _Producer:
    operators = [graph.operators[index] for index in group]
    makes = made & {*storages_of(graph, (v for o in operators for v in o.outputs))}
    reads = made & {*storages_of(graph, (v for o in operators for v in o.inputs))}
    seconds = sum(operator.seconds for operator in operators)
    if any(operator.must_keep for operator in operators):
        seconds = math.inf
    return _Producer(seconds, tuple(sorted(makes)), tuple(sorted(reads - makes)))


class Network:
    """A flow network: a directed graph with edge capacities.

    Example:
        >>> network = Network(4)
        >>> for start, end, capacity in [(0, 2, 3.0), (2, 3, 1.0), (3, 1, 2.0)]:
        ...     network.connect(start, end, capacity)
        >>> sorted(network.source_side(0, 1))
        [0, 2]
    """

    def __init__(self, nodes: int):
        """Create a network without edges, whose nodes are numbered from 0."""
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        self._heads: list[int] = []
        self._room: list[float] = []

    def connect(self, start: int, end: int, capacity: float) -> None:
        """Add an edge with a capacity."""
        # An edge and its reverse are numbered 2k and 2k + 1: `edge ^ 1` is the other.
        for tail, head, room in ((start, end, capacity), (end, start, 0.0)):
            self._edges[tail].append(len(self._heads))
            self._heads.append(head)
            self._room.append(room)

    def source_side(self, source: int, sink: int) -> set[int]:
        """Return the source side of the minimum cut that is nearest to the source."""
        while True:  # One blocking flow for each level graph.
            levels = self._levels(source)
            if sink not in levels:
                return set(levels)
            nexts = [0] * len(self._edges)
            while self._push(source, sink, levels, nexts):
                pass

    def _levels(self, source: int) -> dict[int, int]:
        """Return each node's distance from the source in the residual network."""
        levels = {source: 0}
        pending = deque([source])
        while pending:
            node = pending.popleft()
            for edge in self._edges[node]:
                head = self._heads[edge]
                if self._room[edge] > _EPSILON and head not in levels:
                    levels[head] = levels[node] + 1
                    pending.append(head)
        return levels

    def _push(
        self, source: int, sink: int, levels: dict[int, int], nexts: list[int]
    ) -> bool:
        """Push flow along one shortest path; return whether there was one."""
        path: list[int] = []
        node = source
        while node != sink:
            edge = self._next_edge(node, levels, nexts)
            if edge is not None:
                path.append(edge)
                node = self._heads[edge]
            elif path:
                node = self._heads[path.pop() ^ 1]
                nexts[node] += 1
            else:
                return False
        flow = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= flow
            self._room[edge ^ 1] += flow
        return True

    def _next_edge(
        self, node: int, levels: dict[int, int], nexts: list[int]
    ) -> int | None:
        """Return the next residual edge that leads one level away from the source."""
        edges = self._edges[node]
        while nexts[node] < len(edges):
            edge = edges[nexts[node]]
            further = levels.get(self._heads[edge]) == levels[node] + 1
            if further and self._room[edge] > _EPSILON:
                return edge
            nexts[node] += 1
        return None
