"""One choice for each region, so that every moment of the step fits.

The problem: a region's choice holds bytes from its forward to its backward, and has a
peak of its own in each of the two. With the regions in the order of the forward, what
is held before a region is known, so the least seconds for each sum of held bytes follow
by dynamic programming over (regions, held bytes):

    best[r + 1][h + held(c)] = min over choices c of best[r][h] + seconds(c)
                               where h + peak_r(c) ≤ budget

This is the multiple-choice knapsack with a row at every backward position. Bytes are
rounded up to a grain, so that rounding never breaks the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GRAINS = 4096
"""Into how many parts the budget is divided."""


@dataclass(frozen=True)
class Grains:
    """Bytes as whole numbers of a grain.

    Attributes:
        bytes: Of a grain.
        rounds_up: Whether what is held is rounded up, and what is left down, so that an
            answer fits; or the other way around, so that none that fits is missed.
    """

    bytes: int
    rounds_up: bool = True

    def of(self, size_bytes: int) -> int:
        """Return the grains of what is held or needed."""
        return -(-size_bytes // self.bytes) if self.rounds_up else self.down(size_bytes)

    def room(self, left_bytes: int) -> int:
        """Return the grains of what is left; negative for less than nothing."""
        return self.down(left_bytes) if self.rounds_up else -(-left_bytes // self.bytes)

    def down(self, size_bytes: int) -> int:
        """Return the whole grains in some bytes."""
        return size_bytes // self.bytes


@dataclass(frozen=True)
class Option:
    """One choice for a region, as the programme sees it.

    Attributes:
        held_bytes: From the end of its forward to the beginning of its backward.
        peak_bytes: The most while it runs, forward or backward, above what the regions
            before it hold; what is there in any case is in it.
        seconds: What it costs.
    """

    held_bytes: int
    peak_bytes: int
    seconds: float


def choose_options(
    regions: Sequence[Sequence[Option]], budget_bytes: int, rounds_up: bool = True
) -> list[int] | None:
    """Return the index of the option of each region that costs least in sum.

    Args:
        regions: The options of each region, in the order of the forward.
        budget_bytes: What every moment must fit into.
        rounds_up: Whether bytes are rounded up to grains, so that the answer fits;
            rounded down, no answer that fits costs less.

    Returns:
        The indices; `None` if nothing fits.

    Example:
        >>> keep, drop = Option(6, 8, 0.0), Option(1, 8, 2.0)
        >>> choose_options([[keep, drop], [keep, drop]], 9)
        [1, 0]
    """
    if budget_bytes <= 0:
        return None
    grain = max(1, -(-budget_bytes // GRAINS))
    grains = Grains(grain, rounds_up)
    size = grains.room(budget_bytes) + 1
    best = np.full(size, np.inf)
    best[0] = 0.0
    steps: list[np.ndarray] = []
    for options in regions:
        best, chosen = _add_region(best, options, grains, budget_bytes)
        steps.append(chosen)
    if not np.isfinite(best).any():
        return None
    return _trace(regions, steps, int(np.argmin(best)), grains)


def _add_region(
    best: np.ndarray, options: Sequence[Option], grains: Grains, budget_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    size = len(best)
    after = np.full(size, np.inf)
    chosen = np.full(size, -1, dtype=np.int32)
    for index, option in enumerate(options):
        held = grains.of(option.held_bytes)
        # What may be held before it: it must fit beside the region's own peak.
        room = grains.room(budget_bytes - option.peak_bytes)
        count = min(room + 1, size - held)
        if count <= 0:
            continue
        candidate = best[:count] + option.seconds
        target = after[held : held + count]
        better = candidate < target
        target[better] = candidate[better]
        chosen[held : held + count][better] = index
    return after, chosen


def _trace(
    regions: Sequence[Sequence[Option]],
    steps: Sequence[np.ndarray],
    at: int,
    grains: Grains,
) -> list[int]:
    picked = []
    for options, chosen in zip(reversed(regions), reversed(steps), strict=True):
        index = int(chosen[at])
        picked.append(index)
        at -= grains.of(options[index].held_bytes)
    return picked[::-1]
