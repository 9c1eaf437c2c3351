"""Cut a run of operators where few bytes cross, so that a chain of pieces remains.

The problem: a nested plan goes back through the forward piece by piece, and what it
must have to begin a piece is what earlier pieces made and later ones read: the bytes
that *cross* the cut. Cutting where they are few keeps that cheap. Skip connections
need nothing else: what a skip carries crosses every cut that it spans.

The heaviest piece, by the bytes that autograd saves in it, is cut first, at the place
between its fifths at which the fewest bytes cross; so equal blocks are cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from membudget.graph import StepGraph
from membudget.planner.regions import Region, made_in, saved_storages, storages_of


@dataclass(frozen=True)
class Piece:
    """A run of operators between two cuts.

    Attributes:
        start: The first of them.
        end: The first after them.
        leaves: The storages, by index, that this piece or one before made and that a
            later one reads.
    """

    start: int
    end: int
    leaves: frozenset[int]


def cut(graph: StepGraph, region: Region, most: int) -> list[Piece]:
    """Cut a region into at most so many pieces, in the order of the forward."""
    crossing = _Crossing(graph, region)
    cuts = [region.start, region.end]
    done: set[int] = set()
    while len(cuts) <= most:
        parts = [
            (crossing.weight(start, end), start, end)
            for start, end in pairwise(cuts)
            if start not in done
        ]
        if not parts:
            break
        _, start, end = max(parts)
        place = crossing.best(start, end)
        if place is None:
            done.add(start)
        else:
            cuts = sorted([*cuts, place])
    return [Piece(start, end, crossing.at(end)) for start, end in pairwise(cuts)]


class _Crossing:
    """What crosses each place of a region, and what each part of it saves."""

    def __init__(self, graph: StepGraph, region: Region):
        self._graph = graph
        self._region = region
        self._last_read: dict[int, int] = {}
        self._made = {s: graph.storages[s].birth for s in made_in(graph, region)}
        last_write = dict(self._made)
        for index in range(region.start, region.end):
            operator = graph.operators[index]
            if not operator.is_view:
                for storage in storages_of(graph, operator.inputs):
                    self._last_read[storage] = index
                for storage in storages_of(graph, operator.outputs):
                    last_write[storage] = index
        # Of a storage that is being written, what was there before is lost.
        self._is_open = [True] * (region.end - region.start)
        for storage, birth in self._made.items():
            for place in range(birth + 1, last_write[storage] + 1):
                self._is_open[place - region.start] = False
        self._wanted = self._made.keys() & saved_storages(graph, region)
        self._bytes = self._crossing_bytes()
        self._saved = self._saved_before()

    def _crossing_bytes(self) -> list[int]:
        start = self._region.start
        steps = [0] * (self._region.end - start + 2)
        for storage, birth in self._made.items():
            last = self._last_read.get(storage, birth)
            size = self._graph.storages[storage].bytes
            # What autograd saves is wanted anyway; the rest is held for the cut alone.
            size *= 1 if storage in self._wanted else 2
            steps[birth + 1 - start] += size
            steps[last + 1 - start] -= size
        return list(accumulate(steps))

    def _saved_before(self) -> list[int]:
        start = self._region.start
        steps = [0] * (self._region.end - start + 1)
        for storage in self._wanted:
            place = self._made[storage] + 1 - start
            steps[place] += self._graph.storages[storage].bytes
        return list(accumulate(steps))

    def weight(self, start: int, end: int) -> int:
        """Return the saved bytes that a part makes."""
        first = self._region.start
        return self._saved[end - first] - self._saved[start - first]

    def best(self, start: int, end: int) -> int | None:
        """Return where to cut a part; `None` if it cannot be cut."""
        first = self._region.start
        places = [p for p in range(start + 1, end) if self._is_open[p - first]]
        operators = self._graph.operators
        # After a view or before one is the same; the earlier place is enough.
        places = [p for p in places if not operators[p - 1].is_view]
        if not places:
            return None
        whole = self.weight(start, end)
        inner = [p for p in places if whole <= 5 * self.weight(start, p) <= 4 * whole]

        def cost(place: int) -> tuple[int, int]:
            lopsided = abs(2 * self.weight(start, place) - whole)
            return self._bytes[place - first], lopsided

        return min(inner or places, key=cost)

    def at(self, place: int) -> frozenset[int]:
        """Return the storages that cross a place."""
        if place == self._region.end:
            return frozenset()
        return frozenset(
            storage
            for storage, birth in self._made.items()
            if birth < place <= self._last_read.get(storage, birth)
        )
