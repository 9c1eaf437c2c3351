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

import numpy as np

from membudget.graph import StepGraph
from membudget.planner.choice import (
    Block,
    Choice,
    made_in,
    saved_in,
)
from membudget.planner.known_blocks import KnownBlocks
from membudget.planner.simulate import BlockTimeline
from membudget.planner.timeline import RangePeaks, lifetimes, of_intervals


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
        self._outside = np.array(self.outside_bytes, int)
        workspaces = np.array([o.workspace_bytes for o in graph.operators], int)
        self._totals = self._outside + workspaces
        self._peaks = RangePeaks(self._totals)
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
            start = self.backward_start(block)
            pairs = [self._cost(block, start, timeline) for timeline in own]
            found.append(
                [
                    ChoiceCost(retained, max(most, retained + peak), option.seconds)
                    for option, (retained, most) in zip(of, pairs, strict=True)
                ]
            )
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

    def _cost(self, block: Block, start: int, own: BlockTimeline) -> tuple[int, int]:
        """Return what a choice retains, and its peak.

        Args:
            block: The block.
            start: Where its backward starts.
            own: Timeline of the choice.
        """
        moments, ends, alive, most = own
        # Live between the end of the forward and the block's backward.
        between = (moments < start) & (ends > self._graph.backward_start)
        is_later = moments >= start
        at_events = self._outside[moments] + most
        after = alive + self._peaks.over(moments + 1, ends)
        peak_bytes = max(
            _peak(at_events, (moments < block.end) | is_later),
            _peak(after, is_later & (alive > 0)),
            self.peak_between(own, start, self.next_backward(start)),
        )
        return _peak(alive, between), peak_bytes

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
            end = max(
                (int(m) + 1 for own in of_block for m in own.starts[-1:]), default=start
            )
            for first, last in ((block.start, block.end), (start, end)):
                busy[first:last] = [True] * (min(last, count) - first)
        peaks, totals = [0] * len(self.blocks), self._totals.tolist()
        after = {block.end: i for i, block in enumerate(self.blocks)}
        before = {start: i for i, start in enumerate(starts)}
        forward, backward = range(turn), range(count - 1, turn - 1, -1)
        for moments, table in ((forward, after), (backward, before)):
            current = None
            for moment in moments:
                current = table.get(moment, current)
                if current is not None and not busy[moment]:
                    peaks[current] = max(peaks[current], totals[moment])
        return peaks

    def peak_between(self, own: BlockTimeline, first: int, last: int) -> int:
        """Return the peak over an op range of a block and tensors outside blocks."""
        moments, ends, alive, most = own
        begin = min(last, int(moments[0])) if len(moments) else last
        starts, stops = np.maximum(moments, first), np.minimum(ends, last)
        return max(
            int(self._totals[first:begin].max(initial=0)),
            _peak(alive + self._peaks.over(starts, stops), starts < stops),
            _peak(self._outside[moments] + most, (first <= moments) & (moments < last)),
        )


def _peak(numbers: np.ndarray, where: np.ndarray) -> int:
    return int(numbers.max(where=where, initial=0))
