"""Plans for the largest module as a whole, which goes back through it by stages."""

from __future__ import annotations

from functools import cached_property

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.answers import Answers, Chosen, simulated
from membudget.planner.chain import Chain, Treatment
from membudget.planner.cuts import Piece, cut
from membudget.planner.links import Links
from membudget.planner.overhead import Overheads
from membudget.planner.pieces import pieces
from membudget.planner.regions import Region
from membudget.planner.timeline import timeline

LENGTHS = (12, 24, 48)
"""Of the chains that a module is cut into: few pieces hold less between them, many
make less at once."""


def staged(graph: StepGraph, overheads: Overheads) -> list[Answers]:
    """Return a way to plan for each length of chain."""
    largest = largest_call(graph)
    if largest is None:
        return []
    region = Region(largest.start, largest.end)
    chains: list[list[Piece]] = []
    for length in LENGTHS:
        chain = cut(graph, region, length)
        if chain not in chains:
            chains.append(chain)
    own_s = overheads.seconds(graph, region)
    return [_Staged(graph, largest, chain, own_s) for chain in chains]


def largest_call(graph: StepGraph) -> ModuleCall | None:
    """Return the outermost call that runs the most operators; `None` without any."""
    calls = pieces(graph, 1.0)
    return max(calls, key=lambda call: call.end - call.start, default=None)


class _Staged(Answers):
    """One chain."""

    def __init__(
        self, graph: StepGraph, call: ModuleCall, chain: list[Piece], own_s: float
    ):
        super().__init__(graph)
        self._call = call
        self._own_s = own_s
        self._links = Links(graph, Region(call.start, call.end), chain)
        self._chain = self._links.chain(timeline(graph).peak_bytes)

    @cached_property
    def _rounded_down(self) -> Chain:
        most_bytes = timeline(self._graph).peak_bytes
        return self._links.chain(most_bytes, rounds_up=False)

    def solve(self, budget_bytes: int) -> list[Treatment] | None:
        return self._chain.solve(budget_bytes)

    def least_seconds(self, budget_bytes: int) -> float:
        again_s = self._rounded_down.least_seconds(budget_bytes)
        return self._graph.seconds + again_s + self._own_s

    def smallest(self) -> None:
        return None

    def simulated(self, answer: list[Treatment]) -> Chosen:
        return simulated(
            self._graph, [self._call], [self._links.region(answer)], self._own_s
        )
