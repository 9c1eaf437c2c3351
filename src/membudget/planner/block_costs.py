"""Cost of each choice for a block: retained bytes, peak and recompute time.

Live bytes are a sum over storages, and the model assumes that a block's choice changes
the live ranges of only the storages that the block allocates. For any set of choices,
the live bytes of a step are therefore the timeline of the storages outside all blocks,
whose live ranges never change, plus one timeline per block:

    outside      ▂▂▂▂▂▂▂▂▃▃▃▂▂▂▂▂▂▂▂▂▂▂▂▂
    block 0      ▃▆▄▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▄▆▃
    block 1          ▃▆▄▁▁▁▁▁▁▁▁▄▆▃
                 forward     │ backward
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Block,
    Choice,
    made_in,
    saved_in,
)
from membudget.planner.known_blocks import KnownBlocks
from membudget.planner.simulate import (
    BlockTimeline,
    lifetimes,
    of_intervals,
    peak_of,
)


@dataclass(frozen=True)
class ChoiceCost:
    """The cost of one choice for a block.

    Attributes:
        retained_bytes: Bytes that the block keeps live between forward and backward.
        peak_bytes: Peak while the block runs, forward or backward, including tensors
            outside all blocks but excluding the bytes that earlier blocks retain.
        seconds: Time of recomputation, plus the engine's overhead.
    """

    retained_bytes: int
    peak_bytes: int
    seconds: float


class Option(NamedTuple):
    """A choice for a block, with its time of recomputation in seconds."""

    choice: Choice
    seconds: float


class BlockCosts:
    """Keep-sets (storages to keep) for the blocks of a step, with their costs.

    Attributes:
        blocks: The blocks, disjoint and in forward order.
        keep_sets: The candidate keep-sets of each block, largest first.
        options: The choices of each block: its keep-sets, and what a solver appends.
        outside_bytes: Live bytes outside all blocks, at each op index.
    """

    def __init__(
        self,
        graph: StepGraph,
        blocks: Sequence[Block],
        always: Sequence[frozenset[int]] = (),
        known: KnownBlocks | None = None,
    ):
        """Find each block's keep-sets, which all include the storages in `always`.

        What is `known` of blocks of the step is not computed again.
        """
        self._graph = graph
        self._known = known = known or KnownBlocks(graph)
        self.blocks = list(blocks)
        kept = always or [frozenset[int]()] * len(self.blocks)
        self.keep_sets = [
            known.keep_sets(b, k) for b, k in zip(self.blocks, kept, strict=True)
        ]
        self.options = [
            [Option(Choice(b.start, b.end, k.kept), k.seconds) for k in of]
            for b, of in zip(self.blocks, self.keep_sets, strict=True)
        ]
        moved = {s for block in self.blocks for s in made_in(graph, block)}
        outside = of_intervals(graph, lifetimes(graph, without=moved))
        self.outside_bytes = outside.alive_bytes
        self._starts = sorted(self.backward_start(block) for block in self.blocks)

    def costs(self) -> list[list[ChoiceCost]]:
        """Return one list per block, with the cost of each of its options."""
        timelines = [
            [self._known.timeline(option.choice) for option in of]
            for of in self.options
        ]
        between = self._peaks_between_blocks(timelines)
        found = []
        for block, of, own, peak in zip(
            self.blocks, self.options, timelines, between, strict=True
        ):
            both = zip(of, own, strict=True)
            found.append([self._cost(o.seconds, block, t, peak) for o, t in both])
        return found

    def backward_start(self, block: Block) -> int:
        """Return the op index at which a block's saved tensors are first unpacked."""
        saved = (self._graph.saved[i] for i in saved_in(self._graph, block))
        asked = [s.asked[0] for s in saved if s.asked]
        return min(asked, default=len(self.outside_bytes))

    def next_backward(self, moment: int) -> int:
        """Return the first op index after `moment` where a block's backward starts."""
        later = bisect_right(self._starts, moment)
        return [*self._starts, len(self.outside_bytes)][later]

    def _cost(
        self, seconds: float, block: Block, own: BlockTimeline, between_bytes: int
    ) -> ChoiceCost:
        start = self.backward_start(block)
        retained = peak = 0
        for moment, end, alive, most in own:
            # Live between the end of the forward and the block's backward.
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
        """Return the peaks of operators between blocks, each counted toward one block.

        An operator outside all blocks counts toward the preceding block in the forward,
        and toward the next block to run in the backward pass: in both cases, the bytes
        retained by this block and all earlier blocks are live.
        """
        starts = [self.backward_start(block) for block in self.blocks]
        count, turn = len(self.outside_bytes), self._graph.backward_start
        busy = [False] * count
        for block, start, of_block in zip(self.blocks, starts, timelines, strict=True):
            # Backward, a block is busy up to the last event of any of its choices.
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
        """Return the peak over an op range of a block and tensors outside blocks."""
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
