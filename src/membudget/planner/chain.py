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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
            seconds = np.full(size, np.inf)
            count = min(free + 1, size)
            if count > 0:
                # Beyond the table, the last entry is an upper bound.
                left = np.minimum(free - np.arange(count), self._size - 1)
                seconds[:count] = self._nests[0][i, j][left]
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
    def _nests(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each nest's least time, and the checkpoint that achieves it."""
        count, size = len(self._segments), self._size
        # float32 and int16: the table grows with the square of the chain's length.
        table = np.full((count, count, size), np.inf, dtype=np.float32)
        how = np.full((count, count, size), -1, dtype=np.int16)
        for i, segment in enumerate(self._segments):
            least = self._quantum.need(segment.again_peak_bytes)
            table[i, i, least:] = segment.again_s
        for length in range(2, count + 1):
            for i in range(count - length + 1):
                self._fill(table, how, i, i + length - 1)
        return table, how

    def _fill(self, table: np.ndarray, how: np.ndarray, i: int, j: int) -> None:
        outside, first = self._segments[j].outside_bytes, self._segments[i]
        entry = table[i, j], how[i, j]
        need = max(first.again_peak_bytes, outside + first.saving_peak_bytes)
        rest = table[i + 1, j]
        self._try(entry, 0, need, first.saved_bytes, first.saving_s, rest)
        passed, peak = 0.0, 0
        for c in range(i + 1, j + 1):
            passed += self._segments[c - 1].pass_s
            # The inputs of segment c - 1 are live while it runs.
            before = self._crossing[i][c - 1] if c - 1 > i else 0
            peak = max(peak, before + self._segments[c - 1].pass_peak_bytes)
            crossing = self._crossing[i][c]
            later, earlier = table[c, j], table[i, c - 1]
            self._try(entry, c, outside + peak, crossing, passed, later, earlier)

    def _try(
        self,
        entry: tuple[np.ndarray, np.ndarray],
        number: int,
        need_bytes: int,
        retained_bytes: int,
        seconds: float,
        later: np.ndarray,
        earlier: np.ndarray | None = None,
    ) -> None:
        """Update a nest's least times wherever the given split of the nest is faster.

        Recomputing a checkpoint takes `seconds` and has a peak of `need_bytes`. The
        nest's later part runs its backward pass first, while the checkpoint is live.
        """
        best, how = entry
        retained = self._quantum.need(retained_bytes)
        least = max(retained, self._quantum.need(need_bytes))
        if least >= self._size:
            return
        total = later[least - retained : self._size - retained] + np.float32(seconds)
        if earlier is not None:
            total = total + earlier[least:]
        better = total < best[least:]
        best[least:][better] = total[better]
        how[least:][better] = number

    def _checkpoints(self, i: int, j: int, m: int) -> dict[int, tuple[Checkpoint, ...]]:
        """Return, per segment of a nest, the checkpoints that its stage retains."""
        found: dict[int, tuple[Checkpoint, ...]] = {}
        pending: list[tuple[int, int, int, tuple[Checkpoint, ...]]] = [(i, j, m, ())]
        while pending:
            i, j, m, points = pending.pop()
            if i == j:
                found[i] = points
                continue
            c = int(self._nests[1][i, j, m])
            if c == 0:
                found[i] = points
                less = m - self._quantum.need(self._segments[i].saved_bytes)
                saved = Checkpoint(i, i, is_saved_set=True)
                pending.append((i + 1, j, less, (*points, saved)))
            else:
                less = m - self._quantum.need(self._crossing[i][c])
                pending.append((c, j, less, (*points, Checkpoint(i, c - 1))))
                pending.append((i, c - 1, m, points))
        return found
