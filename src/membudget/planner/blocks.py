"""Cut the forward into blocks: at module calls, or where few bytes cross the cut.

`module_blocks` cuts at module calls, because a region wraps a module. From the whole
model downwards, a module call with more than a given share of the saved bytes is
replaced by its child calls if these account for most of its saved bytes, so layers are
found whatever their names. Children are the modules that are called once per step; if
they account for too little, also those that the model calls often, such as a recurrent
cell or the right side of a differential equation. Each of their calls is a block.

`segments` cuts one module call into a chain of segments for nested recomputation.
Recomputation that starts at a cut needs all storages that are made before the cut and
read after it. A skip connection crosses every cut between its two ends. Each new cut
splits the segment with the most saved bytes, at the point of its middle three fifths
that the fewest bytes cross; identical layers are therefore cut identically.

    operators    0   1 │ 2   3   4 │ 5        crossing the first cut: b, the skip
    b                ├─┼───┤       │
    skip         ├─────┼───────────┼─┤        crossing the second: d, the skip
    d                  │       ├───┼─┤
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import (
    Block,
    made_in,
    saved_in,
    storages_saved_in,
    writers_of,
)
from membudget.planner.timeline import live_bytes

_start = attrgetter("start")

GATHERS = "fsdp."
"""How the names of the operators begin by which FSDP2 gathers and reduces."""

LEAST_COVERED = 0.6
"""The share of a call's saved bytes that the calls inside must cover to replace it."""

LEAST_COVERED_OFTEN = 0.3
"""The same where modules called often count: a solver saves much between its calls."""

LONG = 0.25
"""Where a storage is filled while so much of what is saved is made, cuts are missed."""


def module_blocks(graph: StepGraph, most_share: float) -> list[ModuleCall]:
    """Return disjoint module calls that cover most of the forward, in forward order.

    A call with more than the fraction `most_share` of the step's saved bytes is
    replaced by its child calls, provided that they cover most of its saved bytes.
    """
    tree = _CallTree(graph, most_share)
    found = [block for call in tree.outermost() for block in tree.cut(call)]
    return [block for block in found if tree.saved_bytes(block)]


def largest_call(graph: StepGraph) -> ModuleCall | None:
    """Return the outermost module call with the most operators, or `None`."""
    calls = module_blocks(graph, 1.0)
    return max(calls, key=lambda call: call.end - call.start, default=None)


class _CallTree:
    """The tree of module calls, with the saved bytes of each call."""

    def __init__(self, graph: StepGraph, most_share: float):
        times = Counter(call.path for call in graph.calls)
        fits = _without_gathers(graph)
        once = [call for call in graph.calls if times[call.path] == 1 and fits(call)]
        often = [call for call in numbered_calls(graph) if fits(call)]
        self._often = {call.path for call in often}
        self._once = sorted(once, key=_start)
        self._all = sorted([*once, *often], key=_start)
        self._saved_before = _made_before(graph, graph.saved_on)
        self._most_bytes = most_share * self._saved_before[-1]

    def saved_bytes(self, call: ModuleCall) -> int:
        """Return the bytes that a module call allocates and autograd saves."""
        return self._saved_before[call.end] - self._saved_before[call.start]

    def cut(self, call: ModuleCall) -> list[ModuleCall]:
        """Return a module call, or its child calls if it saves too many bytes."""
        saved = self.saved_bytes(call)
        if saved <= self._most_bytes:
            return [call]
        inner = _inside(self._once, call)
        if self._covered(inner) < LEAST_COVERED * saved:
            inner = _inside(self._all, call)
            often = [inside for inside in inner if inside.path in self._often]
            if self._covered(often) < LEAST_COVERED_OFTEN * saved:
                return [call]
        return [block for inside in inner for block in self.cut(inside)]

    def _covered(self, calls: Iterable[ModuleCall]) -> int:
        return sum(map(self.saved_bytes, calls))

    def outermost(self) -> list[ModuleCall]:
        """Return the top-level calls of modules that are called once."""
        return _inside(self._once, None)


def _without_gathers(graph: StepGraph) -> Callable[[ModuleCall], bool]:
    """Return whether FSDP gathers no parameters in a call, which a region would hold.

    FSDP frees them after the forward of the inner module that it shards, and gathers
    them again before its backward: regions lie inside of that.
    """
    gathers = (o.name.startswith(GATHERS) for o in graph.operators)
    before = [0, *accumulate(gathers)]
    return lambda call: before[call.start] == before[call.end]


def numbered_calls(graph: StepGraph) -> list[ModuleCall]:
    """Return the calls of each module that one call of the model calls often.

    Their numbers start anew when the model is called, so nothing may call the model a
    second time, or these modules before it.
    """
    paths = [call.path for call in graph.calls]
    if paths.count("") != 1:
        return []
    before, times = paths[: paths.index("")], Counter(paths)
    often = {path for path, n in times.items() if n > 1} - {*before}
    return [call for call in graph.calls if call.path in often]


def _inside(calls: Sequence[ModuleCall], outer: ModuleCall | None) -> list[ModuleCall]:
    """Return the direct child calls of `outer`, or top-level calls for `None`."""
    found: list[ModuleCall] = []
    end = 0
    first, last = 0, len(calls)
    if outer is not None:
        first = bisect_left(calls, outer.start, key=_start)
        last = bisect_left(calls, outer.end, key=_start)
    for call in calls[first:last]:
        if outer is not None and not _is_inside(call, outer):
            continue
        if call.end > call.start >= end:
            found.append(call)
            end = call.end
    return found


def _is_inside(call: ModuleCall, outer: ModuleCall) -> bool:
    # A child with the same operators as its parent would be the same block.
    same = (call.start, call.end) == (outer.start, outer.end)
    deeper = call.path != outer.path and (
        not outer.path or call.path.startswith(outer.path + ".")
    )
    return deeper and outer.start <= call.start and call.end <= outer.end and not same


def _made_before(graph: StepGraph, storages: Iterable[int]) -> list[int]:
    """Return, for each op index, the bytes of the given storages made before it."""
    made = [0] * (len(graph.operators) + 1)
    for storage in (graph.storages[index] for index in storages):
        if storage.birth >= 0:
            made[storage.birth + 1] += storage.bytes
    return list(accumulate(made))


@dataclass(frozen=True)
class Segment(Block):
    """One segment of a chain, with the storages that cross its end."""

    crossing: frozenset[int]  # By index; empty for the last segment.


def segments(
    graph: StepGraph, block: Block, most: int, kept: frozenset[int] = frozenset()
) -> list[Segment]:
    """Cut a block into a chain of at most `most` segments, in forward order.

    The storages in `kept` are never recomputed, so that cuts need not mind them.
    """
    cuts = _Cuts(graph, block, kept)
    borders = [block.start, block.end]
    uncuttable: set[int] = set()
    while len(borders) <= most:
        parts = [
            (cuts.saved_bytes(start, end), start, end)
            for start, end in pairwise(borders)
            if start not in uncuttable
        ]
        if not parts:
            break
        _, start, end = max(parts)
        place = cuts.best(start, end)
        if place is None:
            uncuttable.add(start)
        else:
            borders = sorted([*borders, place])
    return [Segment(start, end, cuts.crossing(end)) for start, end in pairwise(borders)]


def filled_in_parts(graph: StepGraph, block: Block) -> frozenset[int]:
    """Return the storages that a block fills over a long stretch and reads when full.

    Such as the results of a loop: no cut may lie in the stretch, unless they are kept.
    """
    writers = writers_of(graph, block, made_in(graph, block))
    first_use: dict[int, int] = {}
    for index in range(block.end - 1, block.start - 1, -1):
        operator = graph.operators[index]
        if not operator.is_view:
            written = graph.writes[index]
            read = (s for s in graph.reads[index] if s not in written)
            first_use |= dict.fromkeys(read, index)
    for saved in (graph.saved[index] for index in saved_in(graph, block)):
        storage = graph.values[saved.value].storage
        first_use[storage] = min(saved.moment, first_use.get(storage, block.end))
    cuts = _Cuts(graph, block)
    least = LONG * cuts.saved_bytes(block.start, block.end)
    return frozenset(
        storage
        for storage, indices in writers.items()
        if cuts.saved_bytes(indices[0], indices[-1]) > least
        and indices[-1] < first_use.get(storage, block.end)
    )


class _Cuts:
    """Crossing and saved bytes at each cut of a block; cut p precedes operator p."""

    def __init__(
        self, graph: StepGraph, block: Block, kept: frozenset[int] = frozenset()
    ):
        self._graph = graph
        self._block = block
        self._last_read: dict[int, int] = {}
        made = made_in(graph, block) - kept
        self._births = {s: graph.storages[s].birth for s in made}
        last_write = dict(self._births)
        for index in range(block.start, block.end):
            operator = graph.operators[index]
            if not operator.is_view:
                for storage in graph.reads[index]:
                    self._last_read[storage] = index
                for storage in graph.writes[index]:
                    last_write[storage] = index
        # No cut between two writes of a storage: the second destroys its content.
        self._is_open = [True] * (block.end - block.start)
        for storage, birth in self._births.items():
            for place in range(birth + 1, last_write[storage] + 1):
                self._is_open[place - block.start] = False
        wanted = self._births.keys() & storages_saved_in(graph, block).values()
        self._saved_before = _made_before(graph, wanted)
        ranges = []
        for storage, birth in self._births.items():
            last = self._last_read.get(storage, birth)
            # Twice the weight if autograd does not save it: only the cut retains it.
            size = graph.storages[storage].bytes * (1 if storage in wanted else 2)
            ranges.append((birth + 1, last + 1, size))
        self._crossing_bytes = live_bytes(block.end + 1, ranges)

    def saved_bytes(self, start: int, end: int) -> int:
        """Return the saved bytes allocated between two op indices."""
        return self._saved_before[end] - self._saved_before[start]

    def best(self, start: int, end: int) -> int | None:
        """Return the cut in an op range that the fewest bytes cross, or `None`."""
        first = self._block.start
        places = [p for p in range(start + 1, end) if self._is_open[p - first]]
        operators = self._graph.operators
        # Cutting before or after a view is equivalent: only the former is tried.
        places = [p for p in places if not operators[p - 1].is_view]
        if not places:
            return None
        whole = self.saved_bytes(start, end)
        # The middle three fifths by saved bytes.
        inner = [
            p for p in places if whole <= 5 * self.saved_bytes(start, p) <= 4 * whole
        ]

        def cost(place: int) -> tuple[int, int]:
            imbalance = abs(2 * self.saved_bytes(start, place) - whole)
            return self._crossing_bytes[place], imbalance

        return min(inner or places, key=cost)

    def crossing(self, place: int) -> frozenset[int]:
        """Return the storages that are made before a cut and read after it."""
        if place == self._block.end:
            return frozenset()
        return frozenset(
            storage
            for storage, birth in self._births.items()
            if birth < place <= self._last_read.get(storage, birth)
        )
