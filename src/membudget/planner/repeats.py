"""Equal regions have equal choices: each is solved once.

Two regions are equal if their operators take the same seconds and read and write what
they make in the same way, and the same of it is wanted. What is outside is a source.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from membudget.graph import StepGraph
from membudget.planner.keep import Choice, choices, is_held_anyway
from membudget.planner.regions import Region, made_in, storages_of, wanted_in


class Repeats:
    """The choices of regions of one step."""

    def __init__(self, graph: StepGraph):
        """Begin with none known."""
        self._graph = graph
        # What is kept stands there by its place among what the region makes.
        self._known: dict[Hashable, list[Choice]] = {}

    def choices(self, region: Region, kept_anyway: frozenset[int]) -> list[Choice]:
        """Return what `keep.choices` does."""
        made = sorted(made_in(self._graph, region))
        places = {storage: place for place, storage in enumerate(made)}
        if not places.keys() >= kept_anyway:
            return choices(self._graph, region, kept_anyway)
        signature = self._signature(region, places, kept_anyway)
        known = self._known.get(signature)
        if known is None:
            known = [
                replace(choice, kept=frozenset(places[s] for s in choice.kept))
                for choice in choices(self._graph, region, kept_anyway)
            ]
            self._known[signature] = known
        return [
            replace(choice, kept=frozenset(made[place] for place in choice.kept))
            for choice in known
        ]

    def _signature(
        self, region: Region, places: dict[int, int], kept_anyway: frozenset[int]
    ) -> Hashable:
        graph = self._graph
        operators = tuple(
            (
                operator.seconds,
                operator.is_view,
                operator.is_pinned,
                *(
                    tuple(places.get(s, -1) for s in storages_of(graph, values))
                    for values in (operator.inputs, operator.outputs)
                ),
            )
            for operator in graph.operators[region.start : region.end]
        )
        wanted = wanted_in(graph, region)
        storages = tuple(
            (
                graph.storages[storage].bytes,
                is_held_anyway(graph, graph.storages[storage]),
                storage in wanted,
                storage in kept_anyway,
            )
            for storage in places
        )
        return operators, storages
