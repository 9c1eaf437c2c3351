"""Nested recomputation along a chain of segments: an exact dynamic programme.

Each segment, 0 to L - 1, is either *flat* (it keeps some of its outputs and recomputes
the rest once) or part of a *nest* of segments i..j. For a nest, the forward keeps only
the storages that cross its end; the backward pass recomputes the nest in stages, each
of which may retain a checkpoint for later stages.

    forward     0   1   2   3 │ backward of the nest 0..3, with a checkpoint before 2
    kept                      ▌ run 0, 1 ▌ run 2 ▌ 3 ▌ 2 ▌ run 0 ▌ 1 ▌ 0
                                         └ checkpoint retained ┘

The least time D(i, j, m) of a nest's backward pass, if m bytes are free, comes from
`nests`. If the forward retains h bytes and the budget is B, the least time E of the
chain's first segments is:

    E(0, 0) = 0
    E(i + 1, h + retained(o)) = E(i, h) + seconds(o)                 choices o of i
    E(j + 1, h + crossing(i, j + 1)) = E(i, h) + D(i, j, B - h)      nests i..j

The recurrences are those of the persistent schedules, known as rotor, of Beaumont,
Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory" (2019). Rotor recomputes
whole segments; here only the operators needed to recompute saved tensors run again (the
*region transition*), which saves 2 to 7 % of the step time. Bytes are counted in
quanta, of which most sizes are multiples, so rounding loses little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from membudget.planner.knapsack import best_quantum, relax
from membudget.planner.nests import Checkpoint, Nests, SegmentCosts

FINEST, COARSEST = 6000, 1500  # Quanta in the plain peak, at most and at least.


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
        self._nests = Nests(segments, crossing_bytes, self._quantum, self._size)

    def solve(self, budget_bytes: int) -> list[SegmentChoice] | None:
        """Return the fastest choice per segment that fits; `None` if nothing fits."""
        prefixes = self._prefixes(budget_bytes)
        if not np.isfinite(prefixes.best[-1]).any():
            return None
        return self._trace(prefixes, budget_bytes)

    def free_tables(self) -> None:
        """Free the memory of the table of nests, which the next `solve` makes again."""
        self._nests.free()

    def _prefixes(self, budget_bytes: int) -> _Prefixes:
        size = max(1, min(self._size, self._quantum.room(budget_bytes) + 1))
        self._nests.fill(size)
        prefixes = _Prefixes(len(self._segments), size)
        for i in range(len(self._segments)):
            self._add_flat(i, prefixes, budget_bytes)
            self._add_nests(i, prefixes, budget_bytes)
        return prefixes

    def _add_flat(self, i: int, prefixes: _Prefixes, budget_bytes: int) -> None:
        for number, cost in enumerate(self._segments[i].choices):
            room = self._quantum.room(budget_bytes - cost.peak_bytes)
            need = self._quantum.need(cost.retained_bytes)
            prefixes.add(_Part(i, i, number), need, room, cost.seconds)

    def _add_nests(self, i: int, prefixes: _Prefixes, budget_bytes: int) -> None:
        must_keep = forward = 0
        for j in range(i, len(self._segments)):
            must_keep += self._segments[j].must_keep_bytes
            forward = max(forward, self._forward[i][j])
            room = self._quantum.room(budget_bytes - forward)
            need = self._quantum.need(self._crossing[i][j + 1] + must_keep)
            free = self._quantum.room(budget_bytes - must_keep)
            room = min(room, free, free - int(self._nests.least[i, j]))
            if room < 0:
                continue
            # What is left for the nest; the table's last entry is an upper bound.
            seconds = self._nests.table[i, j, : free + 1][::-1]
            if free >= self._size:
                seconds = np.pad(seconds, (free + 1 - self._size, 0), "edge")
            prefixes.add(_Part(i, j), need, room, seconds)

    def _trace(self, prefixes: _Prefixes, budget_bytes: int) -> list[SegmentChoice]:
        found: list[SegmentChoice] = []
        end = len(self._segments)
        at = int(np.argmin(prefixes.best[end]))
        while end:
            i, _, number = prefixes.parts[prefixes.taken[end, at]]
            if number is not None:
                found.insert(0, SegmentChoice(number, i))
                retained = self._segments[i].choices[number].retained_bytes
                at -= self._quantum.need(retained)
            else:
                must_keep = sum(s.must_keep_bytes for s in self._segments[i:end])
                at -= self._quantum.need(self._crossing[i][end] + must_keep)
                free = self._quantum.room(budget_bytes - must_keep) - at
                points = self._nests.checkpoints(i, end - 1, min(free, self._size - 1))
                found[:0] = [
                    SegmentChoice(None, end - 1, points[p]) for p in range(i, end)
                ]
            end = i
        return found


class _Part(NamedTuple):
    """The last part of a chain's prefix: a flat segment, or a nest.

    Attributes:
        first: Its first segment.
        last: Its last segment.
        keep_set: The index of the flat segment's keep-set; `None` for a nest.
    """

    first: int
    last: int
    keep_set: int | None = None


class _Prefixes:
    """The table E of a chain, and the last part of each prefix.

    Attributes:
        best: Least times, by number of segments and retained quanta.
        taken: Indices in `parts` of the last part of each prefix.
        parts: All parts that were tried.
    """

    def __init__(self, count: int, size: int):
        """Begin with no segments, for fewer than `size` quanta."""
        self.best = np.full((count + 1, size), np.inf)
        self.best[0, 0] = 0.0
        self.taken = np.full((count + 1, size), -1, dtype=np.int32)
        self.parts: list[_Part] = []

    def add(
        self, part: _Part, need: int, room: int, seconds: float | np.ndarray
    ) -> None:
        """Try a part after each prefix that retains at most `room`; see `relax`."""
        end = part.last + 1
        rows = self.best[part.first], self.best[end], self.taken[end]
        relax(*rows, need, room, seconds, len(self.parts))
        self.parts.append(part)
