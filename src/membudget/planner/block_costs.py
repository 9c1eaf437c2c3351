"""What each choice of a block retains, and its peaks beside the rest of the step.

Live bytes are a sum over storages, and a block's choice moves only the storages that
the block makes. So the timeline of a step under any choices is that of the storages
outside all blocks, which keep the live ranges of the plain step, plus one timeline for
each block:

    outside      ▂▂▂▂▂▂▂▂▃▃▃▂▂▂▂▂▂▂▂▂▂▂▂▂
    block 0      ▃▆▄▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▄▆▃
    block 1          ▃▆▄▁▁▁▁▁▁▁▁▄▆▃
                 forward     │ backward
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Block,
    Choice,
    made_in,
    saved_in,
    storages_of,
    wanted_in,
)
from membudget.planner.frontier import Front, KeepSet, outlives_forward
from membudget.planner.simulate import (
    BlockTimeline,
    lifetimes,
    of_intervals,
    peak_of,
    simulate_block,
)


@dataclass(frozen=True)
class ChoiceCost:
    """What one choice for a block costs.

    Attributes:
        retained_bytes: Live from the block's forward to its backward.
        peak_bytes: The maximum while the block runs, forward or backward, beside what
            the blocks before it retain; tensors outside all blocks are in it.
        seconds: Recomputation and overhead.
    """

    retained_bytes: int
    peak_bytes: int
    seconds: float


class BlockCosts:
    """The keep-sets of some blocks of a step, and their costs.

    Attributes:
        blocks: The blocks, in forward order; they do not overlap.
        keep_sets: The keep-sets of each block, largest first.
        outside_bytes: At each operator, what is live outside all blocks.
    """

    def __init__(
        self,
        graph: StepGraph,
        blocks: Sequence[Block],
        always: Sequence[frozenset[int]] = (),
    ):
        """Find the keep-sets; `always`, for each block, is what every choice keeps."""
        self._graph = graph
        self.blocks = list(blocks)
        kept = always or [frozenset[int]()] * len(self.blocks)
        fronts = Fronts(graph)
        self.keep_sets = [
            fronts.of(block, k) for block, k in zip(self.blocks, kept, strict=True)
        ]
        moved = {s for block in self.blocks for s in made_in(graph, block)}
        outside = of_intervals(graph, lifetimes(graph, without=moved))
        self.outside_bytes = outside.alive_bytes
        self._starts = sorted(self.backward_start(block) for block in self.blocks)

    def costs(self) -> list[list[ChoiceCost]]:
        """Return the cost of each keep-set of each block, in their order."""
        pairs = list(zip(self.blocks, self.keep_sets, strict=True))
        timelines = [
            [simulate_block(self._graph, Choice(b.start, b.end, k.kept)) for k in of]
            for b, of in pairs
        ]
        between = self._peaks_between_blocks(timelines)
        found = []
        for (block, of), own, peak in zip(pairs, timelines, between, strict=True):
            both = zip(of, own, strict=True)
            found.append([self._cost(k.seconds, block, o, peak) for k, o in both])
        return found

    def backward_start(self, block: Block) -> int:
        """Return the op index at which the backward pass first needs a block."""
        saved = (self._graph.saved[i] for i in saved_in(self._graph, block))
        asked = [s.asked[0] for s in saved if s.asked]
        return min(asked, default=len(self.outside_bytes))

    def next_backward(self, moment: int) -> int:
        """Return when the backward of the next block starts, after an op index."""
        later = bisect_right(self._starts, moment)
        return [*self._starts, len(self.outside_bytes)][later]

    def _cost(
        self, seconds: float, block: Block, own: BlockTimeline, between_bytes: int
    ) -> ChoiceCost:
        start = self.backward_start(block)
        retained = peak = 0
        for moment, end, alive, most in own:
            if moment < start and end > self._graph.backward_start:
                retained = max(retained, alive)
            if moment < block.end or moment >= start:
                peak = max(peak, self.outside_bytes[moment] + most)
            if moment >= start and alive:
                peak = max(peak, alive + self._outside_peak(moment + 1, end))
        peak = max(peak, self.peak_between(own, start, self.next_backward(start)))
        return ChoiceCost(retained, max(peak, retained + between_bytes), seconds)

    def _peaks_between_blocks(
        self, timelines: Sequence[Sequence[BlockTimeline]]
    ) -> list[int]:
        """Return, for each block, the outside peak while no block runs.

        An operator of the forward counts for the block before it, one of the backward
        for the block whose backward comes next: what that block and those before it
        retain is live there.
        """
        starts = [self.backward_start(block) for block in self.blocks]
        count, turn = len(self.outside_bytes), self._graph.backward_start
        busy = [False] * count
        for block, start, of_block in zip(self.blocks, starts, timelines, strict=True):
            end = max((own[-1].start + 1 for own in of_block if own), default=start)
            for first, last in ((block.start, block.end), (start, end)):
                busy[first:last] = [True] * (min(last, count) - first)
        peaks = [0] * len(self.blocks)
        after = {block.end: i for i, block in enumerate(self.blocks)}
        before = {start: i for i, start in enumerate(starts)}
        forward, backward = range(turn), range(count - 1, turn - 1, -1)
        for moments, table in ((forward, after), (backward, before)):
            current = None
            for moment in moments:
                current = table.get(moment, current)
                if current is not None and not busy[moment]:
                    outside = self._outside_peak(moment, moment + 1)
                    peaks[current] = max(peaks[current], outside)
        return peaks

    def peak_between(self, own: BlockTimeline, first: int, last: int) -> int:
        """Return the peak of a block beside the outside, over a range of operators."""
        peak = self._outside_peak(first, min(last, own[0].start if own else last))
        for moment, end, alive, most in own:
            start, stop = max(moment, first), min(end, last)
            if start < stop:
                peak = max(peak, alive + self._outside_peak(start, stop))
            if first <= moment < last:
                peak = max(peak, self.outside_bytes[moment] + most)
        return peak

    def _outside_peak(self, start: int, end: int) -> int:
        alive, operators = self.outside_bytes[start:end], self._graph.operators
        return peak_of(operators[start:end], alive)[0]


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
        """Return the keep-sets of a block, largest first.

        Every choice keeps `always`, whose bytes are not counted.
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
