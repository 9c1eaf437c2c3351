"""Nested recomputation along a chain of segments: an exact dynamic programme.

Each segment, 0 to L - 1, is either *flat* (it keeps some of its outputs and recomputes
the rest once) or part of a *nest* of segments i..j. For a nest, the forward keeps only
the storages that cross its end; the backward pass recomputes the nest in stages, each
of which may retain a checkpoint for later stages.

    forward     0   1   2   3 │ backward of the nest 0..3, with a checkpoint before 2
    kept                      ▌ run 0, 1 ▌ run 2 ▌ 3 ▌ 2 ▌ run 0 ▌ 1 ▌ 0
                                         └ checkpoint retained ┘

If everything retained before a nest leaves m bytes free, the least time D for the
nest's backward pass is:

    D(i, i, m) = again_s(i)                                  if again_peak(i) ≤ m
    D(i, j, m) = min of
        saving_s(i) + D(i + 1, j, m - saved_bytes(i))        retain what i saved
        Σ pass_s(i .. c - 1) + D(c, j, m - crossing(i, c)) + D(i, c - 1, m)
                                                             retain what crosses c

The peak of each run of operators must fit in the bytes that are free. The recurrence is
that of the persistent schedules, known as rotor, of Beaumont, Eyraud-Dubois, Herrmann,
Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory" (2019). Rotor recomputes whole segments; here only
the operators needed to recompute saved tensors run again (the *region transition*),
which saves 2 to 7 % of the step time. If the forward retains h bytes and the budget is
B, the least time E of the chain's first segments is:

    E(0, 0) = 0
    E(i + 1, h + retained(o)) = E(i, h) + seconds(o)                 choices o of i
    E(j + 1, h + crossing(i, j + 1)) = E(i, h) + D(i, j, B - h)      nests i..j

The times D of nests do not depend on the budget, so one table serves all budgets. Bytes
are counted in quanta, of which most sizes are multiples, so rounding loses little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from membudget.planner.block_costs import ChoiceCost
from membudget.planner.knapsack import best_quantum, relax

FINEST, COARSEST = 6000, 1500  # Quanta in the plain peak, at most and at least.


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


@dataclass(frozen=True)
class SegmentChoice:
    """The decision for one segment: flat with a keep-set, or part of a nest."""

    keep_set: int | None  # Index of its keep-set; `None` in a nest.
    nest_end: int  # The last segment of its nest, or itself.
    checkpoints: tuple[Checkpoint, ...] = ()  # Retained by its stage, in a nest.


class Chain:
    """Dynamic programme for one chain of segments and any number of budgets."""

    def __init__(
        self,
        segments: Sequence[SegmentCosts],
        crossing_bytes: Sequence[Sequence[int]],
        forward_bytes: Sequence[Sequence[int]],
        most_bytes: int,
    ):
        """Choose the quantum in which the bytes of a chain are counted.

        Args:
            segments: Costs of the segments, in forward order.
            crossing_bytes: For i < c, the bytes that segments i to c - 1 make and that
                cross the start of segment c.
            forward_bytes: For i ≤ j, the peak of segment j's forward if nothing is kept
                from segment i on, excluding tensors that earlier segments made.
            most_bytes: The largest budget that `solve` supports.
        """
        self._segments = segments
        self._crossing = crossing_bytes
        self._forward = forward_bytes
        sizes = [choice.retained_bytes for s in segments for choice in s.choices]
        sizes += [segment.saved_bytes for segment in segments]
        sizes += [size for row in crossing_bytes for size in row]
        finest, coarsest = (max(1, most_bytes // n) for n in (FINEST, COARSEST))
        self._quantum = best_quantum(sizes, finest, coarsest)
        self._size = self._quantum.room(most_bytes) + 1

    def solve(self, budget_bytes: int) -> list[SegmentChoice] | None:
        """Return the fastest choice per segment that fits; `None` if nothing fits."""
        best, taken = self._forward_table(budget_bytes)
        if not np.isfinite(best[-1]).any():
            return None
        return self._trace(best, taken, budget_bytes)

    def free_tables(self) -> None:
        """Free the memory of the table of nests, which the next `solve` makes again."""
        vars(self).pop("_nests", None)

    # The forward: E, by segment and retained quanta.

    def _forward_table(self, budget_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each chain prefix's least time and the choice for its last segment."""
        size = max(1, min(self._size, self._quantum.room(budget_bytes) + 1))
        count = len(self._segments)
        best = np.full((count + 1, size), np.inf)
        best[0, 0] = 0.0
        taken = np.full((count + 1, size, 2), -1, dtype=np.int32)
        for i in range(count):
            self._add_flat(i, best, taken, budget_bytes)
            self._add_nests(i, best, taken, budget_bytes)
        return best, taken

    def _add_flat(
        self, i: int, best: np.ndarray, taken: np.ndarray, budget_bytes: int
    ) -> None:
        for number, cost in enumerate(self._segments[i].choices):
            room = self._quantum.room(budget_bytes - cost.peak_bytes)
            need = self._quantum.need(cost.retained_bytes)
            rows = best[i], best[i + 1], taken[i + 1]
            relax(*rows, need, room, cost.seconds, (i, number))

    def _add_nests(
        self, i: int, best: np.ndarray, taken: np.ndarray, budget_bytes: int
    ) -> None:
        must_keep = forward = 0
        size = best.shape[1]
        for j in range(i, len(self._segments)):
            must_keep += self._segments[j].must_keep_bytes
            forward = max(forward, self._forward[i][j])
            room = self._quantum.room(budget_bytes - forward)
            need = self._quantum.need(self._crossing[i][j + 1] + must_keep)
            free = self._quantum.room(budget_bytes - must_keep)
            count = min(free, room, size - 1) + 1
            if count <= 0:
                continue
            # What is left for the nest; the table's last entry is an upper bound.
            left = np.minimum(np.arange(free, free - count, -1), self._size - 1)
            seconds, room = self._nests[i, j][left], count - 1
            rows = best[i], best[j + 1], taken[j + 1]
            relax(*rows, need, room, seconds, (i, -1))

    def _trace(
        self, best: np.ndarray, taken: np.ndarray, budget_bytes: int
    ) -> list[SegmentChoice]:
        found: list[SegmentChoice] = []
        end = len(self._segments)
        at = int(np.argmin(best[end]))
        while end:
            i, number = (int(x) for x in taken[end, at])
            if number >= 0:
                found.insert(0, SegmentChoice(number, i))
                retained = self._segments[i].choices[number].retained_bytes
                at -= self._quantum.need(retained)
            else:
                must_keep = sum(s.must_keep_bytes for s in self._segments[i:end])
                at -= self._quantum.need(self._crossing[i][end] + must_keep)
                free = self._quantum.room(budget_bytes - must_keep) - at
                points = self._checkpoints(i, end - 1, min(free, self._size - 1))
                found[:0] = [
                    SegmentChoice(None, end - 1, points[p]) for p in range(i, end)
                ]
            end = i
        return found

    # Nests: D, by first and last segment and free quanta.

    @cached_property
    def _nests(self) -> np.ndarray:
        """Return each nest's least time."""
        count, size = len(self._segments), self._size
        # float32: the table grows with the square of the chain's length.
        table = np.full((count, count, size), np.inf, dtype=np.float32)
        for i, segment in enumerate(self._segments):
            least = self._quantum.need(segment.again_peak_bytes)
            table[i, i, least:] = segment.again_s
        for i in reversed(range(count)):
            splits = list(self._splits(i))
            for j in range(i + 1, count):
                nest = table[i, j]
                for split in splits[: j - i + 1]:
                    least = self._least(split, j)
                    if least < size:
                        total = _total(table, split, i, j, least)
                        np.minimum(nest[least:], total, out=nest[least:])
        return table

    def _splits(self, i: int) -> Iterator[_Split]:
        """Yield the ways to split the nests from a segment, shortest nest first."""
        first, need = self._segments[i], self._quantum.need
        saving_s, peak_bytes = np.float32(first.saving_s), first.saving_peak_bytes
        again_bytes = first.again_peak_bytes
        retained = need(first.saved_bytes)
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

    def _least(self, split: _Split, j: int) -> int:
        """Return the fewest free quanta with which a nest's split is possible."""
        outside_bytes = self._segments[j].outside_bytes
        need_bytes = max(split.again_peak_bytes, outside_bytes + split.peak_bytes)
        return max(split.retained, self._quantum.need(need_bytes))

    def _split_at(self, i: int, j: int, m: int) -> _Split:
        """Return the first split of a nest that achieves its least time."""
        table = self._nests
        return next(
            split
            for split in self._splits(i)
            if self._least(split, j) <= m
            and _total(table, split, i, j, m)[0] == table[i, j, m]
        )

    def _checkpoints(self, i: int, j: int, m: int) -> dict[int, tuple[Checkpoint, ...]]:
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


def _total(table: np.ndarray, split: _Split, i: int, j: int, least: int) -> np.ndarray:
    """Return the times of a nest i..j under a split, from so many free quanta on."""
    end = table.shape[2] - split.retained
    total = table[split.later, j, least - split.retained : end] + split.seconds
    if not split.is_saving:
        total += table[i, split.later - 1, least:]
    return total
