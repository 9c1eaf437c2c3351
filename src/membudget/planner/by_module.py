"""Plans that make a choice for each of some modules.

The step is cut into modules in several ways, from few large ones to many small ones;
for each cut the programme of `flat` picks the choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.answers import Answers, Chosen, simulated
from membudget.planner.flat import choose_options
from membudget.planner.overhead import Overheads
from membudget.planner.pieces import pieces
from membudget.planner.regions import Region
from membudget.planner.windows import Windows

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 10, 1 / 30)
"""The largest share of what is saved that a region may have, in each cut."""

MOST_OPERATORS = 3000
"""A cut with a larger region is left out: its minimum cuts would take minutes."""


def by_module(graph: StepGraph, overheads: Overheads) -> list[Answers]:
    """Return a way to plan for each cut into modules."""
    return [_ByModule(graph, calls, overheads) for calls in _distinct_cuts(graph)]


class _ByModule(Answers):
    """A choice for each of some modules."""

    def __init__(
        self, graph: StepGraph, calls: Sequence[ModuleCall], overheads: Overheads
    ):
        super().__init__(graph)
        self._calls = calls
        regions = [Region(call.start, call.end) for call in calls]
        self._windows = Windows(graph, regions)
        self._own_s = [overheads.seconds(graph, region) for region in regions]
        self._options = [
            # The first choice keeps all that is wanted: no region is needed for that.
            [
                of[0],
                *(replace(option, seconds=option.seconds + own) for option in of[1:]),
            ]
            for of, own in zip(self._windows.options(), self._own_s, strict=True)
        ]

    def solve(self, budget_bytes: int) -> list[int] | None:
        return choose_options(self._options, budget_bytes)

    def least_seconds(self, budget_bytes: int) -> float:
        picked = choose_options(self._options, budget_bytes, rounds_up=False)
        if picked is None:
            return math.inf
        chosen = zip(self._options, picked, strict=True)
        return self._graph.seconds + sum(of[index].seconds for of, index in chosen)

    def smallest(self) -> list[int]:
        return [
            min(range(len(of)), key=lambda i: (of[i].held_bytes, of[i].peak_bytes))
            for of in self._options
        ]

    def simulated(self, answer: Sequence[int]) -> Chosen:
        windows = self._windows
        picked = [i for i, number in enumerate(answer) if number > 0]
        regions = [
            replace(windows.regions[i], kept=windows.choices[i][answer[i]].kept)
            for i in picked
        ]
        own_s = sum(self._own_s[i] for i in picked)
        return simulated(self._graph, [self._calls[i] for i in picked], regions, own_s)


def _distinct_cuts(graph: StepGraph) -> list[list[ModuleCall]]:
    cuts: list[list[ModuleCall]] = []
    for share in SHARES:
        cut = pieces(graph, share)
        if cut and cut not in cuts:
            cuts.append(cut)
    quick = [cut for cut in cuts if max(c.end - c.start for c in cut) <= MOST_OPERATORS]
    return quick or cuts[-1:]
