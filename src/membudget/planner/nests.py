"""The least times of the nests of a chain; see `chain` for what a nest is.

If everything retained before a nest leaves m bytes free, the least time D for the
nest's backward pass is:

    D(i, i, m) = again_s(i)                                  if again_peak(i) ≤ m
    D(i, j, m) = min of
        saving_s(i) + D(i + 1, j, m - saved_bytes(i))        retain what i saved
        Σ pass_s(i .. c - 1) + D(c, j, m - crossing(i, c)) + D(i, c - 1, m)
                                                             retain what crosses c

The peak of each run of operators must fit in the bytes that are free. The times do not
depend on the budget, so one table serves all budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from membudget.planner.block_costs import ChoiceCost
from membudget.planner.knapsack import Quantum


@dataclass(frozen=True)
class SegmentCosts:
    """Times and sizes of one segment of a chain."""

    choices: tuple[ChoiceCost, ...]  # One for each keep-set.
    pass_s: float  # To recompute what crosses its end from what crosses its start.
    saving_s: float  # The same, and to recompute its saved tensors.
    again_s: float  # To recompute its saved tensors alone.
    saved_bytes: int  # Its saved tensors, and what crosses its end.
    pass_peak_bytes: int  # Peak of its own tensors during `pass_s`.
    saving_peak_bytes: int  # Peak of its own tensors during `saving_s`.
    # Peak of its backward with `again_s`, tensors outside the chain included.
    again_peak_bytes: int
    outside_bytes: int  # Live outside the chain when its backward starts.
    must_keep_bytes: int  # Kept by every choice.


@dataclass(frozen=True)
class Checkpoint:
    """Storages made in segments first..last and read later, retained by a stage."""

    first: int
    last: int
    is_saved_set: bool = False  # Whether it includes the saved tensors of `first`.


_NEVER = 1 << 40  # More quanta than there are.


class Nests:
    """Table of the least times D, by first and last segment and free quanta.

    Attributes:
        least: The fewest free quanta with which a nest is possible, by its first and
            last segment.
    """

    def __init__(
        self,
        segments: Sequence[SegmentCosts],
        crossing_bytes: Sequence[Sequence[int]],
        quantum: Quantum,
        size: int,
    ):
        """Create an empty table for fewer than `size` free quanta; see `Chain`."""
        self._segments = segments
        self._crossing = crossing_bytes
        self._outside = np.array([s.outside_bytes for s in segments], int)
        self._quantum = quantum
        self._size = size
        self._filled = 0  # Free quanta for which all times are known.
        needs = (quantum.need(segment.again_peak_bytes) for segment in segments)
        self.least = np.full((len(segments), len(segments)), _NEVER)
        np.fill_diagonal(self.least, [*needs])

    @cached_property
    def table(self) -> np.ndarray:
        """The table, of which `fill` fills a part."""
        # float32: the table grows with the square of the chain's length.
        shape = len(self._segments), len(self._segments), self._size
        return np.empty(shape, dtype=np.float32)

    def free(self) -> None:
        """Free the memory of the table, which the next `fill` fills again."""
        self._filled = 0
        vars(self).pop("table", None)

    def fill(self, end: int) -> None:
        """Find the least time of each nest with fewer free quanta than `end`."""
        table, start = self.table[..., :end], self._filled
        if end <= start:
            return
        for i, segment in reversed([*enumerate(self._segments)]):
            table[i, i:, start:] = np.inf
            table[i, i, max(self.least[i, i], start) :] = segment.again_s
            # A nest before the split is a shorter one, which no later split changes.
            for split in self._splits(i):
                self._relax(table, i, split, start)
        self._filled = end

    def _relax(self, table: np.ndarray, i: int, split: _Split, start: int) -> None:
        """Try a way to split the nests from a segment, from so many free quanta on."""
        later, leasts, end = split.later, self._leasts(split), table.shape[2]
        possible = np.maximum(leasts, self.least[later, later:] + split.retained)
        if not split.is_saving:
            possible = np.maximum(possible, self.least[i, later - 1])
        known = self.least[i, later:]
        np.minimum(known, possible, out=known)
        first = max(start, possible.min(initial=end))
        if first >= end:
            return
        nests = table[i, later:, first:]
        total = _total(table, split, i, slice(later, None), first)
        for row, least in zip(total, leasts.tolist(), strict=True):
            row[: max(0, least - first)] = np.inf
        np.minimum(nests, total, out=nests)

    def _splits(self, i: int) -> Iterator[_Split]:
        """Yield the ways to split the nests from a segment, shortest nest first."""
        first, need = self._segments[i], self._quantum.need
        saving_s, peak_bytes = np.float32(first.saving_s), first.saving_peak_bytes
        again_bytes = first.again_peak_bytes
        retained = need(first.saved_bytes)
        if i + 1 < len(self._segments):
            yield _Split(i + 1, True, retained, saving_s, peak_bytes, again_bytes)
        passed, peak_bytes = 0.0, 0
        for c in range(i + 1, len(self._segments)):
            passed += self._segments[c - 1].pass_s
            # The inputs of segment c - 1 are live while it runs.
            before = self._crossing[i][c - 1] if c - 1 > i else 0
            own_bytes = before + self._segments[c - 1].pass_peak_bytes
            peak_bytes = max(peak_bytes, own_bytes)
            retained = need(self._crossing[i][c])
            yield _Split(c, False, retained, np.float32(passed), peak_bytes, 0)

    def _leasts(self, split: _Split) -> np.ndarray:
        """Return the fewest free quanta with which nests can be split, by their end."""
        beside_bytes = self._outside[split.later :] + split.peak_bytes
        need_bytes = np.maximum(beside_bytes, split.again_peak_bytes)
        quanta = -(-need_bytes // self._quantum.bytes)
        leasts: np.ndarray = np.maximum(quanta, split.retained)
        return leasts

    def _split_at(self, i: int, j: int, m: int) -> _Split:
        """Return the first split of a nest that achieves its least time."""
        table = self.table[..., : m + 1]
        return next(
            split
            for split in self._splits(i)
            if split.later <= j
            and self._leasts(split)[j - split.later] <= m
            and _total(table, split, i, j, m)[0] == table[i, j, m]
        )

    def checkpoints(self, i: int, j: int, m: int) -> dict[int, tuple[Checkpoint, ...]]:
        """Return, per segment of a nest, the checkpoints that its stage retains."""
        found: dict[int, tuple[Checkpoint, ...]] = {}
        pending: list[tuple[int, int, int, tuple[Checkpoint, ...]]] = [(i, j, m, ())]
        while pending:
            i, j, m, points = pending.pop()
            if i == j:
                found[i] = points
                continue
            split = self._split_at(i, j, m)
            point = Checkpoint(i, split.later - 1, split.is_saving)
            pending.append((split.later, j, m - split.retained, (*points, point)))
            if split.is_saving:
                found[i] = points
            else:
                pending.append((i, split.later - 1, m, points))
        return found


class _Split(NamedTuple):
    """A way to split the nests that begin with one segment.

    Attributes:
        later: The first segment of the part whose backward runs first.
        is_saving: Whether a checkpoint of the first segment has its saved tensors, too.
        retained: Quanta of the checkpoint before `later`.
        seconds: Time to recompute that.
        peak_bytes: Peak of doing so, apart from tensors outside the chain.
        again_peak_bytes: Peak of the first segment's backward, if that runs alone.
    """

    later: int
    is_saving: bool
    retained: int
    seconds: np.float32
    peak_bytes: int
    again_peak_bytes: int


def _total(
    table: np.ndarray, split: _Split, i: int, j: int | slice, least: int
) -> np.ndarray:
    """Return the times of nests i..j under a split, from so many free quanta on."""
    end = table.shape[2] - split.retained
    total = table[split.later, j, least - split.retained : end] + split.seconds
    if not split.is_saving:
        total += table[i, split.later - 1, least:]
    return total
