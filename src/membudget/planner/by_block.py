"""Solver: one choice for each of some module calls, by the knapsack.

The step is cut into calls in several ways, from few large ones to many small ones, and
each cut is a solver of its own. On a GPT of 12 layers of width 256 one cut alone finds
what all solvers together find.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.block_costs import BlockCosts
from membudget.planner.blocks import module_blocks
from membudget.planner.choice import Block, Choice
from membudget.planner.costs import Overheads
from membudget.planner.knapsack import cheapest_choices
from membudget.planner.schedule import Schedule, Simulator, Solver

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 10, 1 / 30)
"""In each cut, the largest share of the step's saved bytes that one block may have."""

MOST_OPERATORS = 3000
"""A cut with a larger block is left out: its minimum cuts would take minutes."""


def by_block(simulator: Simulator, overheads: Overheads) -> list[Solver]:
    """Return a solver for each cut into module calls."""
    cuts = _distinct_cuts(simulator.graph)
    return [_ByBlock(simulator, calls, overheads) for calls in cuts]


class _ByBlock(Solver):
    """One cut; a solution is the index of a keep-set for each of its blocks."""

    def __init__(
        self, simulator: Simulator, calls: Sequence[ModuleCall], overheads: Overheads
    ):
        super().__init__(simulator)
        self._calls = calls
        blocks = [Block(call.start, call.end) for call in calls]
        numbers = BlockCosts(simulator.graph, blocks)
        self._keep_sets = numbers.keep_sets
        self._overhead_s = [overheads.recording_s(simulator.graph, b) for b in blocks]
        self._costs = [
            # The first keep-set recomputes nothing: it needs no region.
            [of[0], *(replace(c, seconds=c.seconds + own_s) for c in of[1:])]
            for of, own_s in zip(numbers.costs(), self._overhead_s, strict=True)
        ]

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
        choices = [
            Choice(call.start, call.end, self._keep_sets[i][solution[i]].kept)
            for i, call in zip(taken, calls, strict=True)
        ]
        overhead_s = sum(self._overhead_s[i] for i in taken)
        return self._simulator.schedule(calls, choices, overhead_s)


def _distinct_cuts(graph: StepGraph) -> list[list[ModuleCall]]:
    cuts: list[list[ModuleCall]] = []
    for share in SHARES:
        cut = module_blocks(graph, share)
        if cut and cut not in cuts:
            cuts.append(cut)
    quick = [cut for cut in cuts if max(c.end - c.start for c in cut) <= MOST_OPERATORS]
    return quick or cuts[-1:]
