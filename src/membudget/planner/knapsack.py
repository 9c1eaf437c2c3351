"""Solve for one choice per module call, as a multiple-choice knapsack problem.

The forward is partitioned into module calls at several granularities, from few large
calls to many small ones, and each partition has its own solver. On a GPT with 12 layers
of width 256, one partition alone yields steps as fast as all solvers together.

A choice retains bytes between its block's forward and backward pass, and each of the
two passes has its own peak. Blocks nest like parentheses: while block r runs, forward
or backward, exactly the bytes retained by blocks 0 to r - 1 are also live.

    forward          │ backward
    0    1    2      │    2    1    0
    ├────┼────┼──────┼────┼────┼────┤     retained by 0
         ├────┼──────┼────┼────┤          retained by 1

A dynamic programme over (blocks, retained bytes) therefore finds the least time:

    best[r + 1][h + retained(c)] = min over choices c of best[r][h] + seconds(c)
                                   where h + peak_r(c) ≤ budget

The problem is the multiple-choice knapsack (Kellerer, Pferschy and Pisinger 2004,
chapter 11) with an additional constraint at every block. Bytes are rounded up to
multiples of a quantum, so rounding never hides bytes over the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.block_costs import BlockCosts, ChoiceCost, Option
from membudget.planner.blocks import module_blocks
from membudget.planner.choice import RERUN, Block, Choice
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.second_run import may_rerun
from membudget.planner.solver import Solver

T = TypeVar("T")

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 10, 1 / 30)
"""In each cut, the largest share of the step's saved bytes that one block may have."""

MOST_OPERATORS = 3000
"""A cut with a larger block is left out: its minimum cuts would take minutes."""

QUANTA = 4096
"""The budget is divided into so many quanta."""


def by_block(simulator: Simulator) -> list[Solver]:
    """Return two solvers for each way to cut the forward into module calls.

    The second solver only reruns blocks, as is usual by hand: it is not misled by the
    prices of replays, which are rough.
    """
    found: list[Solver] = []
    for calls in _distinct_cuts(simulator.graph):
        options, costs = _priced_options(simulator, calls)
        found.append(_ByBlock(simulator, calls, options, costs))
        found.append(_reruns(simulator, calls, options, costs))
    return found


def by_rerun(simulator: Simulator) -> list[Solver]:
    """Return a solver for each way to cut the forward, which only reruns blocks.

    Tensor parallelism computes on DTensors, of which a replay sees the operators, but
    not the conversions, so that it keeps what they save. A rerun does not.
    """
    return [
        _reruns(simulator, calls, *_priced_options(simulator, calls))
        for calls in _distinct_cuts(simulator.graph)
    ]


def _reruns(
    simulator: Simulator,
    calls: Sequence[ModuleCall],
    options: Sequence[Sequence[Option]],
    costs: Sequence[Sequence[ChoiceCost]],
) -> _ByBlock:
    # The first option recomputes nothing.
    taken = [
        [0, *(i for i, o in enumerate(of) if o.choice.engine == RERUN)]
        for of in options
    ]
    return _ByBlock(simulator, calls, _taken(options, taken), _taken(costs, taken))


def _priced_options(
    simulator: Simulator, calls: Sequence[ModuleCall]
) -> tuple[list[list[Option]], list[list[ChoiceCost]]]:
    """Return the options of each block and their costs, with those of regions."""
    blocks = [Block(call.start, call.end) for call in calls]
    numbers = BlockCosts(simulator.graph, blocks, known=simulator.known)
    for block, of in zip(blocks, numbers.options, strict=True):
        if may_rerun(simulator.graph, block):
            rerun = Choice(block.start, block.end, engine=RERUN)
            of.append(Option(rerun, simulator.rerun_s(block)))
    costs = [
        # What recomputes nothing needs no region.
        [
            first,
            *(
                _with_region(simulator, *pair)
                for pair in zip(of[1:], rest, strict=True)
            ),
        ]
        for of, (first, *rest) in zip(numbers.options, numbers.costs(), strict=True)
    ]
    return numbers.options, costs


def _with_region(simulator: Simulator, option: Option, cost: ChoiceCost) -> ChoiceCost:
    return replace(cost, seconds=cost.seconds + simulator.region_s(option.choice))


def _taken(
    of_blocks: Sequence[Sequence[T]], taken: Sequence[Sequence[int]]
) -> list[list[T]]:
    pairs = zip(of_blocks, taken, strict=True)
    return [[of[index] for index in indices] for of, indices in pairs]


class _ByBlock(Solver):
    """Solver for one partition of the forward; a solution is an option per block."""

    def __init__(
        self,
        simulator: Simulator,
        calls: Sequence[ModuleCall],
        options: Sequence[Sequence[Option]],
        costs: Sequence[Sequence[ChoiceCost]],
    ):
        super().__init__(simulator)
        self._calls = calls
        self._options = options
        self._costs = costs

    def solve(self, budget_bytes: int) -> list[int] | None:
        return cheapest_choices(self._costs, budget_bytes)

    def smallest(self) -> list[int]:
        return [
            min(range(len(of)), key=lambda i: (of[i].retained_bytes, of[i].peak_bytes))
            for of in self._costs
        ]

    def schedule(self, solution: Sequence[int]) -> Schedule:
        taken = [i for i, number in enumerate(solution) if number > 0]
        calls = [self._calls[i] for i in taken]
        choices = [self._options[i][solution[i]].choice for i in taken]
        return self._simulator.schedule(calls, choices)


def _distinct_cuts(graph: StepGraph) -> list[list[ModuleCall]]:
    cuts: list[list[ModuleCall]] = []
    for share in SHARES:
        cut = module_blocks(graph, share)
        if cut and cut not in cuts:
            cuts.append(cut)
    # Minimum cuts take too long for large blocks; the finest cut is the last resort.
    quick = [cut for cut in cuts if max(c.end - c.start for c in cut) <= MOST_OPERATORS]
    return quick or cuts[-1:]


@dataclass(frozen=True)
class Quantum:
    """The unit in which a dynamic programme counts bytes."""

    bytes: int

    def need(self, size_bytes: int) -> int:
        """Return a size in quanta, rounded up."""
        return -(-size_bytes // self.bytes)

    def room(self, left_bytes: int) -> int:
        """Return how many quanta fit in `left_bytes`; negative if `left_bytes` is."""
        return left_bytes // self.bytes


def best_quantum(sizes: Sequence[int], finest: int, coarsest: int) -> Quantum:
    """Return the quantum between two limits with the least total rounding error."""
    # For each size, the coarsest quantum that divides it almost exactly.
    fitting = {finest}
    for size in set(sizes):
        parts = -(-size // coarsest)
        if parts and size // parts >= finest:
            fitting.add(size // parts)
    all_sizes = np.array(sizes, dtype=np.int64)

    def rounding(quantum: int) -> int:
        return int((-(-all_sizes // quantum) * quantum - all_sizes).sum())

    return Quantum(min(sorted(fitting), key=rounding))


def cheapest_choices(
    blocks: Sequence[Sequence[ChoiceCost]], budget_bytes: int
) -> list[int] | None:
    """Return, per block, the index of its choice in the fastest fitting combination.

    The blocks are in forward order; the result is `None` if nothing fits.

    Example:
        >>> keep, drop = ChoiceCost(6, 8, 0.0), ChoiceCost(1, 8, 2.0)
        >>> cheapest_choices([[keep, drop], [keep, drop]], 9)
        [1, 0]
    """
    if budget_bytes <= 0:
        return None
    quantum = Quantum(max(1, -(-budget_bytes // QUANTA)))
    size = quantum.room(budget_bytes) + 1
    best = np.full(size, np.inf)
    best[0] = 0.0
    taken: list[np.ndarray] = []
    for choices in blocks:
        after, by = np.full(size, np.inf), np.full(size, -1, dtype=np.int32)
        for index, choice in enumerate(choices):
            # The blocks before it may retain what fits beside its peak.
            room = quantum.room(budget_bytes - choice.peak_bytes)
            need = quantum.need(choice.retained_bytes)
            relax(best, after, by, need, room, choice.seconds, index)
        best = after
        taken.append(by)
    if not np.isfinite(best).any():
        return None
    at = int(np.argmin(best))
    found: list[int] = []
    for choices, by in zip(reversed(blocks), reversed(taken), strict=True):
        found.insert(0, int(by[at]))
        at -= quantum.need(choices[found[0]].retained_bytes)
    return found


def relax(
    before: np.ndarray,
    after: np.ndarray,
    by: np.ndarray,
    need: int,
    room: int,
    seconds: float | np.ndarray,
    label: int,
) -> None:
    """Relax one row of a dynamic programme from the row before it.

    Args:
        before: Least time for each number of retained quanta, without the block.
        after: Least time including the block; updated in place.
        by: Label of the choice behind each entry of `after`; updated in place.
        need: Number of quanta that the block retains.
        room: Number of quanta that earlier blocks may retain.
        seconds: Time of the choice; an array if it depends on the quanta retained
            before.
        label: Label to store in `by` where the choice improves an entry.
    """
    count = min(room + 1, len(after) - need)
    if count <= 0:
        return
    paid = seconds[:count] if isinstance(seconds, np.ndarray) else seconds
    total = before[:count] + paid
    target = after[need : need + count]
    better = total < target
    if better.any():
        np.copyto(target, total, where=better)
        np.putmask(by[need : need + count], better, label)
