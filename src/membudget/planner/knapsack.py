"""One choice for each block, so that the budget holds at every operator of the step.

A choice retains bytes from its block's forward to its backward, and has a peak of its
own in each of the two. Blocks nest like parentheses: in the forward and in the backward
of block r, exactly what blocks 0 to r - 1 retain is live beside it.

    forward          │ backward
    0    1    2      │    2    1    0
    ├────┼────┼──────┼────┼────┼────┤     retained by 0
         ├────┼──────┼────┼────┤          retained by 1

So one dynamic programme over (blocks, retained bytes) finds the least time:

    best[r + 1][h + retained(c)] = min over choices c of best[r][h] + seconds(c)
                                   where h + peak_r(c) ≤ budget

It is the multiple-choice knapsack (Kellerer, Pferschy and Pisinger 2004, chapter 11)
with a second constraint at every block. Bytes are rounded up to a quantum, so that
rounding never breaks the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

QUANTA = 4096
"""The budget is divided into so many quanta."""


@dataclass(frozen=True)
class Quantum:
    """The unit in which a dynamic programme counts bytes."""

    bytes: int

    def need(self, size_bytes: int) -> int:
        """Return the quanta that some bytes take, rounded up."""
        return -(-size_bytes // self.bytes)

    def room(self, left_bytes: int) -> int:
        """Return the quanta that fit into some bytes, negative if those are."""
        return left_bytes // self.bytes


def best_quantum(sizes: Sequence[int], finest: int, coarsest: int) -> Quantum:
    """Return the quantum to which rounding up some sizes adds least.

    Args:
        sizes: The sizes, in bytes.
        finest: No quantum is smaller.
        coarsest: No quantum is larger.
    """
    fitting = {finest}
    for size in set(sizes):
        parts = -(-size // coarsest)
        if parts and size // parts >= finest:
            fitting.add(size // parts)
    all_sizes = np.array(sizes, dtype=np.int64)

    def rounding(quantum: int) -> int:
        return int((-(-all_sizes // quantum) * quantum - all_sizes).sum())

    return Quantum(min(sorted(fitting), key=rounding))


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


def cheapest_choices(
    blocks: Sequence[Sequence[ChoiceCost]], budget_bytes: int
) -> list[int] | None:
    """Return the choice of each block, by index, with the least time in total.

    Args:
        blocks: The choices of each block, in forward order.
        budget_bytes: The budget of every operator.

    Returns:
        The indices; `None` if nothing fits.

    Example:
        >>> keep, drop = ChoiceCost(6, 8, 0.0), ChoiceCost(1, 8, 2.0)
        >>> cheapest_choices([[keep, drop], [keep, drop]], 9)
        [1, 0]
    """
    if budget_bytes <= 0:
        return None
    quantum = Quantum(max(1, -(-budget_bytes // QUANTA)))
    best = np.full(quantum.room(budget_bytes) + 1, np.inf)
    best[0] = 0.0
    taken: list[np.ndarray] = []
    for choices in blocks:
        best, by = _add_block(best, choices, quantum, budget_bytes)
        taken.append(by)
    if not np.isfinite(best).any():
        return None
    return _trace(blocks, taken, int(np.argmin(best)), quantum)


def _add_block(
    best: np.ndarray,
    choices: Sequence[ChoiceCost],
    quantum: Quantum,
    budget_bytes: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the next row of the table, and the choice that reached each entry."""
    size = len(best)
    after = np.full(size, np.inf)
    by = np.full(size, -1, dtype=np.int32)
    for index, choice in enumerate(choices):
        # The blocks before it may retain what fits beside its peak.
        room = quantum.room(budget_bytes - choice.peak_bytes)
        need = quantum.need(choice.retained_bytes)
        relax(best, after, by, need, room, choice.seconds, index)
    return after, by


def relax(
    before: np.ndarray,
    after: np.ndarray,
    by: np.ndarray,
    need: int,
    room: int,
    seconds: float | np.ndarray,
    label: int | tuple[int, int],
) -> None:
    """Improve a row of a table from the row before it.

    Args:
        before: The least seconds for each number of retained quanta.
        after: The same with one more block; it is improved.
        by: What reached each entry of `after`; it is updated.
        need: How many quanta the block retains.
        room: How many quanta may be retained before it.
        seconds: What it takes; an array if that depends on the quanta before it.
        label: What stands in `by`.
    """
    count = min(room + 1, len(after) - need)
    if count <= 0:
        return
    paid = seconds[:count] if isinstance(seconds, np.ndarray) else seconds
    total = before[:count] + paid
    target = after[need : need + count]
    better = total < target
    target[better] = total[better]
    by[need : need + count][better] = label


def _trace(
    blocks: Sequence[Sequence[ChoiceCost]],
    taken: Sequence[np.ndarray],
    at: int,
    quantum: Quantum,
) -> list[int]:
    found = []
    for choices, by in zip(reversed(blocks), reversed(taken), strict=True):
        index = int(by[at])
        found.append(index)
        at -= quantum.need(choices[index].retained_bytes)
    return found[::-1]
