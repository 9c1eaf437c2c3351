"""Least time to recompute storages, and what that depends on, in limited memory.

A storage that is not live is recomputed by its writers, and these read storages that
are live or recomputed in turn. If `live(s)` says whether a storage is live at an op
index, and `again(w)` whether an operator runs again later, any schedule has

    again(w) ≥ 1 - live(s)             w writes s, s is wanted
    again(w) ≥ again(v) - live(s)      w writes s before v reads it
    room     ≥ Σ bytes(s) · live(s)

The least Σ seconds(w) · again(w) under these conditions bounds its time from below. At
a price λ in seconds per byte of room, what is left is a minimum cut, as in `frontier`:

    source ──∞──▶ s ──λ·bytes(s)──▶ s is dropped ──∞──▶ w ──seconds(w)──▶ sink
                                                        w ──∞──▶ s'       w reads s'

    least ≥ capacity of the cut at λ - λ · room        for each λ ≥ 0

by weak duality: a schedule that meets the conditions is a cut at λ, with a capacity of
its seconds and at most λ · room (Geoffrion 1974, "Lagrangean relaxation for integer
programming"). The right side is concave in λ. Each cut gives a line above it, and the
next price is that at which the lines of two cuts meet (Eisner and Severance 1976).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from membudget.graph import StepGraph
from membudget.planner.choice import Block, writers_of
from membudget.planner.network import Network

CLOSE = 0.99
"""The search ends with this share of the most that is left to find."""

MOST_NODES = 8_000
"""Number of nodes of networks, after which no other cut is made: about 40 ms."""

_SOURCE, _SINK = 0, 1


class _CutCost(NamedTuple):
    """What the source side of a cut recomputes, and what it keeps."""

    seconds: float
    bytes: int


class DependencyCuts:
    """The operators that recompute each storage of a forward, and what they read."""

    def __init__(self, graph: StepGraph, saved_at: Mapping[int, int]):
        """Find the writers of each storage, until it is saved if it is saved."""
        self._graph = graph
        forward = Block(0, graph.backward_start)
        made = {
            index
            for index, storage in enumerate(graph.storages)
            # FSDP empties and fills again what is from before the step.
            if storage.bytes and storage.birth >= 0 and storage.kind != "outside"
        }
        found = writers_of(graph, forward, made).items()
        until = {s: saved_at.get(s, forward.end) for s, _ in found}
        known = ((s, [w for w in writers if w <= until[s]]) for s, writers in found)
        self._writers = {storage: writers for storage, writers in known if writers}
        pinned = {i for i, o in enumerate(graph.operators) if o.must_keep}
        self._pinned = {
            s for s, of in self._writers.items() if not pinned.isdisjoint(of)
        }
        self._last_write = {s: max(writers) for s, writers in self._writers.items()}
        self._reads: dict[int, list[int]] = {}
        self._nodes = 0  # Of networks, each time that one is made or cut.

    @property
    def is_spent(self) -> bool:
        """Whether no further cut is made: large steps would take long."""
        return self._nodes >= MOST_NODES

    def writers_of(self, storage: int) -> list[int]:
        """Return the operators that have to run again if a storage is dropped."""
        return self._writers.get(storage, [])

    def least_s(
        self,
        wanted: Iterable[int],
        is_live: Callable[[int], bool],
        room_bytes: int,
    ) -> float:
        """Return a lower bound on the seconds in which wanted storages are recomputed.

        Args:
            wanted: The storages, none of which is live in any case.
            is_live: Whether a storage is live in any case.
            room_bytes: The bytes that other storages may take.
        """
        needed = self._needed(wanted, is_live)
        more = _CutCost(0.0, sum(self._graph.storages[s].bytes for s in needed.wanted))
        if more.bytes <= room_bytes:
            return 0.0
        network = _CutNetwork(self._graph, needed)
        self._nodes += network.nodes
        most, best_s = network.most_again, 0.0
        less = _CutCost(most.seconds, min(most.bytes, room_bytes))
        while not self.is_spent and more.seconds < less.seconds:
            price = (less.seconds - more.seconds) / (more.bytes - less.bytes)
            most_s = more.seconds + price * (more.bytes - room_bytes)
            if CLOSE * most_s <= best_s:
                break
            found = network.cut(price)
            self._nodes += network.nodes
            best_s = max(best_s, found.seconds + price * (found.bytes - room_bytes))
            if found in (more, less):
                break
            more, less = (found, less) if found.bytes > room_bytes else (more, found)
        return best_s

    def _needed(self, wanted: Iterable[int], is_live: Callable[[int], bool]) -> _Needed:
        """Return what wanted storages depend on if nothing but `is_live` is live."""
        found = _Needed([s for s in wanted if s in self._writers], {}, {})
        pending = [*found.wanted]
        while pending:
            storage = pending.pop()
            if storage in found.writers:
                continue
            is_pinned = storage in self._pinned
            found.writers[storage] = [] if is_pinned else self._writers[storage]
            for writer in found.writers[storage]:
                if writer not in found.reads:
                    reads = [s for s in self._reads_of(writer) if not is_live(s)]
                    found.reads[writer] = reads
                    pending += reads
        return found

    def _reads_of(self, operator: int) -> list[int]:
        """Return what an operator reads after its last writer, and does not write."""
        if operator not in self._reads:
            written, last = self._graph.writes[operator], self._last_write
            self._reads[operator] = [
                storage
                for storage in self._graph.reads[operator]
                if storage not in written and last.get(storage, operator) < operator
            ]
        return self._reads[operator]


class _Needed(NamedTuple):
    """Wanted storages, and what recomputing them depends on."""

    wanted: list[int]
    # Of each storage that is not live in any case; none if they must not run again.
    writers: dict[int, list[int]]
    reads: dict[int, list[int]]  # Such storages, by the operator that may run again.


class _CutNetwork:
    """The network of what is needed, at any price of a byte.

    Attributes:
        nodes: Number of its nodes.
        most_again: The cut that keeps only what must not be computed again.
    """

    def __init__(self, graph: StepGraph, needed: _Needed):
        """Connect storages with their writers, and those with what they read."""
        number, writers = count(2), needed.writers
        again = {operator: next(number) for operator in needed.reads}
        live = {storage: next(number) for storage in writers}
        # Dropping what one operator writes is running it again.
        dropped = {s: again[of[0]] for s, of in writers.items() if len(of) == 1}
        dropped |= {s: next(number) for s, of in writers.items() if len(of) > 1}
        self.nodes = next(number)
        network = self._network = Network(self.nodes)
        for storage in needed.wanted:
            network.connect(_SOURCE, live[storage], math.inf)
        # By the edge that keeps a storage: its ends, and the bytes.
        self._sizes: dict[int, tuple[int, int, int]] = {}
        for storage, of in writers.items():
            start, end = live[storage], dropped.get(storage, _SINK)
            edge = network.connect(start, end, 0.0)
            self._sizes[edge] = start, end, graph.storages[storage].bytes
            for writer in of if len(of) > 1 else ():
                network.connect(end, again[writer], math.inf)
        self._seconds = {
            again[i]: graph.operators[i].seconds for i in again
        }  # By node.
        for operator, reads in needed.reads.items():
            node = again[operator]
            network.connect(node, _SINK, self._seconds[node])
            for storage in reads:
                network.connect(node, live[storage], math.inf)
        self.most_again = self._cut_of({*range(self.nodes)} - {_SINK})

    def cut(self, price: float) -> _CutCost:
        """Return the minimum cut at a price in seconds per byte."""
        costs = ((edge, price * size) for edge, (*_, size) in self._sizes.items())
        network = self._network.with_capacities(costs)
        return self._cut_of(network.source_side(_SOURCE, _SINK))

    def _cut_of(self, side: set[int]) -> _CutCost:
        """Return the cut with a source side."""
        seconds = sum(s for node, s in self._seconds.items() if node in side)
        kept = (n for a, b, n in self._sizes.values() if a in side and b not in side)
        return _CutCost(seconds, sum(kept))
