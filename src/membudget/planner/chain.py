"""Along a chain of pieces: keep what pays, or go back through a stretch by stages.

The problem: pieces 0 to L - 1 run one after the other. For each, either some of what it
makes is kept for the backward, at the seconds of making the rest again; or it belongs
to a *segment* i..j, of which the forward keeps nothing but what crosses its end, and
which the backward makes again by stages, each of which may hold what later ones begin
from. With m the bytes that are left beside what is held before the segment:

    D(i, i, m) = again(i)                                         if again_peak(i) ≤ m
    D(i, j, m) = min of
        tape(i) + D(i + 1, j, m - tape_bytes(i))                  hold all that i saved
        Σ pass(i .. c - 1) + D(c, j, m - crossing(i, c)) + D(i, c - 1, m)
                                                                  hold what crosses c

where every run must fit at the moment at which it takes place. This is the persistent
schedule of Beaumont et al. 2019 (rotor). What they call a chain's forward is not paid
for twice where it is known: the operators that make what a segment keeps do not run
again (the *region transition*), because `again` is the seconds of what the backward
asks for alone. Before it, in the order of the forward, with h the bytes held:

    E(0, 0) = 0
    E(i + 1, h + held(o)) = E(i, h) + seconds(o)                  options o of piece i
    E(j + 1, h + crossing(i, j + 1)) = E(i, h) + D(i, j, B - h)   segments i..j

D does not depend on the budget B, so that one table serves a whole curve. Bytes are
rounded up to a grain that most of them are multiples of, so that rounding never breaks
the budget and loses little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from membudget.planner.flat import Grains, Option

FINEST, COARSEST = 6000, 1500
"""The plain peak is divided into so many grains at most and at least."""


@dataclass(frozen=True)
class Link:
    """One piece, as the programme sees it.

    Attributes:
        options: What the forward may keep of it; see `flat.Option`.
        pass_s: Seconds of making what leaves it from what enters it.
        tape_s: Seconds of making what it saves, too.
        again_s: Seconds of making what it saves alone.
        tape_bytes: What it saves, and what leaves it.
        pass_peak_bytes: The most of its own while what leaves it is made.
        tape_peak_bytes: The most of its own while what it saves is made, too.
        again_peak_bytes: The most in its backward if all that it saves is made again
            there, with what is alive in any case.
        fixed_bytes: What is alive in any case when its backward begins.
        pinned_bytes: What must be kept of it.
    """

    options: tuple[Option, ...]
    pass_s: float
    tape_s: float
    again_s: float
    tape_bytes: int
    pass_peak_bytes: int
    tape_peak_bytes: int
    again_peak_bytes: int
    fixed_bytes: int
    pinned_bytes: int


@dataclass(frozen=True)
class Hold:
    """What a stage holds: what crosses the end of pieces, or what one of them saved.

    Attributes:
        first: The first of the pieces that made it.
        last: The last of them.
        is_tape: Whether all that `first` saved is in it.
    """

    first: int
    last: int
    is_tape: bool = False


@dataclass(frozen=True)
class Treatment:
    """What becomes of one piece.

    Attributes:
        option: Which of its options; `None` in a segment.
        segment_end: The last piece of its segment; itself without one.
        holds: In a segment, what its stage holds for later ones.
    """

    option: int | None
    segment_end: int
    holds: tuple[Hold, ...] = ()


class Chain:
    """Solves one chain, for any number of budgets."""

    def __init__(
        self,
        links: Sequence[Link],
        crossing_bytes: Sequence[Sequence[int]],
        forward_bytes: Sequence[Sequence[int]],
        most_bytes: int,
        rounds_up: bool = True,
    ):
        """Hold the numbers.

        Args:
            links: The pieces.
            crossing_bytes: For i < c, what the pieces i to c - 1 made of that which
                crosses the beginning of c.
            forward_bytes: For i ≤ j, the most while j runs forward if nothing is kept
                from i on, without what the pieces before i made.
            most_bytes: The largest budget that will be asked for.
            rounds_up: Whether every answer fits; see `flat.choose_options`.
        """
        self._links = links
        self._crossing = crossing_bytes
        self._forward = forward_bytes
        grain = _grain(links, crossing_bytes, most_bytes)
        self._grains = Grains(grain, rounds_up)
        self._size = self._grains.room(most_bytes) + 1

    def solve(self, budget_bytes: int) -> list[Treatment] | None:
        """Return what becomes of each piece at the least seconds, if anything fits."""
        best, chosen = self._forward_table(budget_bytes)
        if not np.isfinite(best[-1]).any():
            return None
        return self._trace(best, chosen, budget_bytes)

    def least_seconds(self, budget_bytes: int) -> float:
        """Return the seconds of the answer; infinity if nothing fits."""
        return float(self._forward_table(budget_bytes)[0][-1].min())

    def _forward_table(self, budget_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return E, and how it was reached."""
        size = max(1, min(self._size, self._grains.room(budget_bytes) + 1))
        count = len(self._links)
        best = np.full((count + 1, size), np.inf)
        best[0, 0] = 0.0
        chosen = np.full((count + 1, size, 2), -1, dtype=np.int32)
        for i in range(count):
            self._add_options(i, best, chosen, budget_bytes)
            self._add_segments(i, best, chosen, budget_bytes)
        return best, chosen

    # The forward: what is held before each piece.

    def _add_options(
        self, i: int, best: np.ndarray, chosen: np.ndarray, budget_bytes: int
    ) -> None:
        for number, option in enumerate(self._links[i].options):
            room = self._grains.room(budget_bytes - option.peak_bytes)
            held = self._grains.of(option.held_bytes)
            self._relax(
                best, chosen, (i, i + 1), held, room, option.seconds, (i, number)
            )

    def _add_segments(
        self, i: int, best: np.ndarray, chosen: np.ndarray, budget_bytes: int
    ) -> None:
        pinned = forward = 0
        size = best.shape[1]
        for j in range(i, len(self._links)):
            pinned += self._links[j].pinned_bytes
            forward = max(forward, self._forward[i][j])
            room = self._grains.room(budget_bytes - forward)
            held = self._grains.of(self._crossing[i][j + 1] + pinned)
            # What is left beside h grains, the pinned bytes not.
            left = self._grains.room(budget_bytes - pinned)
            table = self._table[0][i, j]
            seconds = np.full(size, np.inf)
            count = min(left + 1, size)
            if count > 0:
                rows = np.minimum(left - np.arange(count), self._size - 1)
                seconds[:count] = table[rows]
            self._relax(best, chosen, (i, j + 1), held, room, seconds, (i, -1))

    def _relax(
        self,
        best: np.ndarray,
        chosen: np.ndarray,
        step: tuple[int, int],
        held: int,
        room: int,
        seconds: float | np.ndarray,
        choice: tuple[int, int],
    ) -> None:
        size = best.shape[1]
        count = min(room + 1, size - held)
        if count <= 0:
            return
        paid = seconds[:count] if isinstance(seconds, np.ndarray) else seconds
        candidate = best[step[0], :count] + paid
        target = best[step[1], held : held + count]
        better = candidate < target
        target[better] = candidate[better]
        chosen[step[1], held : held + count][better] = choice

    def _trace(
        self, best: np.ndarray, chosen: np.ndarray, budget_bytes: int
    ) -> list[Treatment]:
        found: list[Treatment] = []
        end = len(self._links)
        at = int(np.argmin(best[end]))
        while end:
            i, number = (int(x) for x in chosen[end, at])
            if number >= 0:
                found.insert(0, Treatment(number, i))
                at -= self._grains.of(self._links[i].options[number].held_bytes)
            else:
                pinned = sum(link.pinned_bytes for link in self._links[i:end])
                at -= self._grains.of(self._crossing[i][end] + pinned)
                left = self._grains.room(budget_bytes - pinned) - at
                holds = self._stages(i, end - 1, min(left, self._size - 1))
                segment = [Treatment(None, end - 1, holds[p]) for p in range(i, end)]
                found[:0] = segment
            end = i
        return found

    # Segments.

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return D, and how it was reached: 0 for the tape of i, else the split c."""
        count, size = len(self._links), self._size
        table = np.full((count, count, size), np.inf, dtype=np.float32)
        how = np.full((count, count, size), -1, dtype=np.int16)
        for i, link in enumerate(self._links):
            table[i, i, self._grains.of(link.again_peak_bytes) :] = link.again_s
        for length in range(2, count + 1):
            for i in range(count - length + 1):
                self._fill(table, how, i, i + length - 1)
        return table, how

    def _fill(self, table: np.ndarray, how: np.ndarray, i: int, j: int) -> None:
        links, fixed = self._links, self._links[j].fixed_bytes
        best, reached = table[i, j], how[i, j]
        tape = links[i]
        need = max(tape.again_peak_bytes, fixed + tape.tape_peak_bytes)
        self._try(best, reached, need, tape.tape_bytes, tape.tape_s, table[i + 1, j], 0)
        passed, peak = 0.0, 0
        for c in range(i + 1, j + 1):
            passed += links[c - 1].pass_s
            before = self._crossing[i][c - 1] if c - 1 > i else 0
            peak = max(peak, before + links[c - 1].pass_peak_bytes)
            self._try(
                *(best, reached, fixed + peak, self._crossing[i][c], passed),
                *(table[c, j], c, table[i, c - 1]),
            )

    def _try(
        self,
        best: np.ndarray,
        reached: np.ndarray,
        need_bytes: int,
        held_bytes: int,
        seconds: float,
        after: np.ndarray,
        number: int,
        before: np.ndarray | None = None,
    ) -> None:
        held = self._grains.of(held_bytes)
        least = max(held, self._grains.of(need_bytes))
        if least >= self._size:
            return
        candidate = after[least - held : self._size - held] + np.float32(seconds)
        if before is not None:
            candidate = candidate + before[least:]
        better = candidate < best[least:]
        best[least:][better] = candidate[better]
        reached[least:][better] = number

    def _stages(self, i: int, j: int, m: int) -> dict[int, tuple[Hold, ...]]:
        """Return what the stage of each piece of a segment holds."""
        holds: dict[int, tuple[Hold, ...]] = {}
        pending: list[tuple[int, int, int, tuple[Hold, ...]]] = [(i, j, m, ())]
        while pending:
            i, j, m, held = pending.pop()
            if i == j:
                holds[i] = held
                continue
            c = int(self._table[1][i, j, m])
            if c == 0:
                holds[i] = held
                less = m - self._grains.of(self._links[i].tape_bytes)
                pending.append((i + 1, j, less, (*held, Hold(i, i, is_tape=True))))
            else:
                less = m - self._grains.of(self._crossing[i][c])
                pending.append((c, j, less, (*held, Hold(i, c - 1))))
                pending.append((i, c - 1, m, held))
        return holds


def _grain(
    links: Sequence[Link], crossing_bytes: Sequence[Sequence[int]], most_bytes: int
) -> int:
    """Return the grain by which rounding up what is held adds least."""
    sizes = [option.held_bytes for link in links for option in link.options]
    sizes += [link.tape_bytes for link in links]
    sizes += [size for row in crossing_bytes for size in row]
    finest, coarsest = max(1, most_bytes // FINEST), max(1, most_bytes // COARSEST)
    candidates = {finest}
    for size in set(sizes):
        parts = -(-size // coarsest)
        if parts and size // parts >= finest:
            candidates.add(size // parts)
    held = np.array(sizes, dtype=np.int64)

    def rounding(grain: int) -> int:
        return int((-(-held // grain) * grain - held).sum())

    return min(sorted(candidates), key=rounding)
