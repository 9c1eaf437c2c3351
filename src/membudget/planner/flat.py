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
    regions: Sequence[Sequence[Option]], budget_bytes: int
) -> list[int] | None:
    """Return the index of the option of each region that costs least in sum.

    Args:
        regions: The options of each region, in the order of the forward.
        budget_bytes: What every moment must fit into.

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
    size = budget_bytes // grain + 1
    best = np.full(size, np.inf)
    best[0] = 0.0
    steps: list[np.ndarray] = []
    for options in regions:
        best, chosen = _add_region(best, options, grain, budget_bytes)
        steps.append(chosen)
    if not np.isfinite(best).any():
        return None
    return _trace(regions, steps, int(np.argmin(best)), grain)


def _add_region(
    best: np.ndarray, options: Sequence[Option], grain: int, budget_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    size = len(best)
    after = np.full(size, np.inf)
    chosen = np.full(size, -1, dtype=np.int32)
    for index, option in enumerate(options):
        held = -(-option.held_bytes // grain)
        # What may be held before it: it must fit beside the region's own peak.
        room = (budget_bytes - option.peak_bytes) // grain
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
    grain: int,
) -> list[int]:
    picked = []
    for options, chosen in zip(reversed(regions), reversed(steps), strict=True):
        index = int(chosen[at])
        picked.append(index)
        at -= -(-options[index].held_bytes // grain)
    return picked[::-1]
