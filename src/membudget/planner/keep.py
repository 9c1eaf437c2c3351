"""Which outputs of a region to keep: every trade of bytes for seconds that pays.

The problem: a region saves tensors for its backward. Each storage that is needed is
kept, which costs its bytes, or made again, which costs the seconds of the operators
that write it and needs their inputs in turn. For a price of a byte in seconds the
cheapest choice is a minimum cut of a graph with two nodes a storage, *needed* and *made
again* (project selection, Picard 1976): a cut edge from needed to made again keeps, a
cut edge from made again to the sink recomputes. A sweep over the price, halving between
known solutions, finds every choice on the lower convex hull of (bytes, seconds); those
between are left to mixing the choices of several regions; a sparse hull is filled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from membudget.graph import StepGraph, Storage
from membudget.planner.mincut import Network
from membudget.planner.regions import Region, made_in, storages_of, wanted_in


@dataclass(frozen=True)
class Choice:
    """One way to treat a region.

    Attributes:
        kept: The storages that stay, by index.
        kept_bytes: Their bytes.
        seconds: What the backward takes more.
    """

    kept: frozenset[int]
    kept_bytes: int
    seconds: float


@dataclass(frozen=True)
class _Maker:
    """Operators that together make storages.

    Attributes:
        seconds: What they take; infinite if they must not run again.
        makes: The storages.
        reads: The storages of the region that they read, and do not make.
    """

    seconds: float
    makes: tuple[int, ...]
    reads: tuple[int, ...]


def choices(
    graph: StepGraph, region: Region, kept_anyway: frozenset[int] = frozenset()
) -> list[Choice]:
    """Return the choices on the convex hull, and some between, the most bytes first.

    Where many storages have one price (the outputs of like layers), the
    hull leaps from all of them to none; there, choices between are added.

    Args:
        graph: The step.
        region: The region.
        kept_anyway: Storages that every choice keeps; their bytes are not counted.
    """
    cut = problem(graph, region, kept_anyway)
    found = cut.hull()
    if len(found) <= MOST_SPARSE:
        cut.fill(found)
    ordered = sorted(found.values(), key=lambda c: (-c.kept_bytes, c.seconds))
    return [replace(choice, kept=choice.kept | kept_anyway) for choice in ordered]


def problem(
    graph: StepGraph, region: Region, kept_anyway: frozenset[int] = frozenset()
) -> Problem:
    """Return the choice as a cut, to be solved at prices."""
    made = _made(graph, region) - kept_anyway
    wanted = made & wanted_in(graph, region)
    return Problem(graph, _makers(graph, region, made), wanted)


_HIGHEST_PRICE = 1e6
"""Seconds a byte: more than any operator costs."""

MOST_SPARSE = 12
"""A hull of more choices than this is dense enough."""

FILLED = 8
"""How many choices at most are put between two of a sparse hull."""


def _made(graph: StepGraph, region: Region) -> set[int]:
    return {
        storage
        for storage in made_in(graph, region)
        if graph.storages[storage].bytes
        and not is_held_anyway(graph, graph.storages[storage])
    }


def is_held_anyway(graph: StepGraph, storage: Storage) -> bool:
    """Tell whether the user's code holds it until the backward, kept or not."""
    return storage.released is None and storage.death > graph.backward_start


def _makers(graph: StepGraph, region: Region, made: set[int]) -> list[_Maker]:
    """Group the operators of the region by the storages that they write."""
    group_of: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for index in range(region.start, region.end):
        operator = graph.operators[index]
        if operator.is_view:
            continue
        outputs = made.intersection(storages_of(graph, operator.outputs))
        if not outputs:
            continue
        known = sorted({group_of[s] for s in outputs if s in group_of})
        number = known[0] if known else index
        members = groups.setdefault(number, [])
        for other in known[1:]:
            members += groups.pop(other)
        members.append(index)
        makes = {s for s, g in group_of.items() if g in known} | outputs
        group_of.update(dict.fromkeys(makes, number))
    return [_maker(graph, members, made) for members in groups.values()]


def _maker(graph: StepGraph, members: Sequence[int], made: set[int]) -> _Maker:
    operators = [graph.operators[index] for index in members]
    makes = made.intersection(
        storages_of(graph, (v for o in operators for v in o.outputs))
    )
    reads = made.intersection(
        storages_of(graph, (v for o in operators for v in o.inputs))
    )
    is_pinned = any(operator.is_pinned for operator in operators)
    seconds = sum(operator.seconds for operator in operators)
    return _Maker(
        math.inf if is_pinned else seconds,
        tuple(sorted(makes)),
        tuple(sorted(reads - makes)),
    )


class Problem:
    """The cut, for any price.

    Attributes:
        bytes: What each storage takes that may be kept, or made again.
    """

    def __init__(self, graph: StepGraph, makers: Sequence[_Maker], wanted: set[int]):
        """Hold the makers, and what is wanted of what they make."""
        self.bytes = {s: graph.storages[s].bytes for m in makers for s in m.makes}
        self._makers = makers
        self._maker_of = {s: i for i, m in enumerate(makers) for s in m.makes}
        self._wanted = wanted

    def inputs(self, storage: int) -> tuple[int, ...]:
        """Return the storages that are read to make one again."""
        return self._makers[self._maker_of[storage]].reads

    def is_pinned(self, storage: int) -> bool:
        """Tell whether it must be kept, because it must not be made again."""
        return math.isinf(self._makers[self._maker_of[storage]].seconds)

    def solve(self, price: float, free: frozenset[int] = frozenset()) -> Choice:
        """Return the cheapest choice at a price in seconds a byte.

        Args:
            price: The price.
            free: Storages that cost nothing to keep.
        """
        return self.cheapest(
            {s: 0.0 if s in free else price * size for s, size in self.bytes.items()}
        )

    def cheapest(self, costs: Mapping[int, float]) -> Choice:
        """Return the cheapest choice if each storage costs so many seconds to keep."""
        order = {storage: 2 + i for i, storage in enumerate(self.bytes)}
        first = 2 + len(order)
        network = Network(first + len(self._makers))
        for storage, node in order.items():
            made = first + self._maker_of[storage]
            network.connect(node, made, costs[storage])
            if storage in self._wanted:
                network.connect(_SOURCE, node, math.inf)
        for i, maker in enumerate(self._makers):
            network.connect(first + i, _SINK, maker.seconds)
            for storage in maker.reads:
                network.connect(first + i, order[storage], math.inf)
        side = network.source_side(_SOURCE, _SINK)
        kept = frozenset(
            storage
            for storage, node in order.items()
            if node in side and first + self._maker_of[storage] not in side
        )
        again = [m for i, m in enumerate(self._makers) if first + i in side]
        return Choice(
            kept,
            sum(self.bytes[storage] for storage in kept),
            sum(maker.seconds for maker in again),
        )

    def hull(self) -> dict[frozenset[int], Choice]:
        """Return the choices on the lower convex hull, by what they keep."""
        most, least = self.solve(0.0), self.solve(_HIGHEST_PRICE)
        found = {most.kept: most, least.kept: least}
        self.between(most, least, found)
        return found

    def fill(self, found: dict[frozenset[int], Choice]) -> None:
        """Add choices between corners, which keep what was made last: it goes first."""
        corners = sorted(found.values(), key=lambda c: -c.kept_bytes)
        for more, less in pairwise(corners):
            moved = sorted(more.kept - less.kept, reverse=True)
            gap_bytes = more.kept_bytes - less.kept_bytes
            if len(moved) < 2 or gap_bytes <= 0:
                continue
            price = 1.01 * (less.seconds - more.seconds) / gap_bytes
            step = max(1, len(moved) // (FILLED + 1))
            for count in range(step, len(moved), step):
                middle = self.solve(price, frozenset(moved[:count]))
                if less.kept_bytes < middle.kept_bytes < more.kept_bytes:
                    found.setdefault(middle.kept, middle)

    def between(
        self, more: Choice, less: Choice, found: dict[frozenset[int], Choice]
    ) -> None:
        """Find the choices of the hull between two of them."""
        saved_bytes = more.kept_bytes - less.kept_bytes
        if saved_bytes <= 0 or less.seconds <= more.seconds:
            return
        price = (less.seconds - more.seconds) / saved_bytes
        middle = self.solve(price)
        cost = middle.seconds + price * middle.kept_bytes
        line = more.seconds + price * more.kept_bytes
        if middle.kept in found or cost >= line * (1 - 1e-9):
            return
        found[middle.kept] = middle
        self.between(more, middle, found)
        self.between(middle, less, found)


_SOURCE, _SINK = 0, 1
