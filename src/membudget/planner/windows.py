"""What a choice for one region holds, and its peaks, beside the rest of the step.

The bytes alive are a sum over storages, and a region's choice moves those that the
region makes. So the timeline of a step under many regions is that of what no choice
moves, and one part for each region: what it holds between its forward and its backward,
and what it does while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.flat import Option
from membudget.planner.keep import choices
from membudget.planner.regions import Region, made_in, saved_in
from membudget.planner.simulate import Own, own
from membudget.planner.timeline import lifetimes, of_intervals


class Windows:
    """The regions of a step, and what their choices cost.

    Attributes:
        regions: The regions, in the order of the forward.
        choices: The choices of each region.
    """

    def __init__(self, graph: StepGraph, calls: Sequence[ModuleCall]):
        """Cut the step.

        Args:
            graph: The step.
            calls: The calls that become regions; they do not overlap.
        """
        self._graph = graph
        self.regions = [Region(call.start, call.end) for call in calls]
        self.choices = [choices(graph, region) for region in self.regions]
        self._fixed = self._fixed_bytes()

    def _fixed_bytes(self) -> list[int]:
        """Return the bytes at each moment that no choice moves."""
        moved = {s for region in self.regions for s in made_in(self._graph, region)}
        fixed = of_intervals(self._graph, lifetimes(self._graph, without=moved))
        return list(fixed.alive_bytes)

    def options(self) -> list[list[Option]]:
        """Return the options of each region, in the order of its choices."""
        timelines = [
            [
                own(self._graph, Region(region.start, region.end, choice.kept))
                for choice in of_region
            ]
            for region, of_region in zip(self.regions, self.choices, strict=True)
        ]
        starts = [self._backward_start(region) for region in self.regions]
        gaps = self._gaps(starts, timelines)
        return [
            [
                self._option(choice.seconds, region, timeline, start, gap)
                for choice, timeline in zip(of_region, of_timelines, strict=True)
            ]
            for region, of_region, of_timelines, start, gap in zip(
                self.regions, self.choices, timelines, starts, gaps, strict=True
            )
        ]

    def _backward_start(self, region: Region) -> int:
        """Return the moment at which the backward first asks for what it saved."""
        graph = self._graph
        made = made_in(graph, region)
        asked = [
            saved.asked[0]
            for saved in (graph.saved[index] for index in saved_in(graph, region))
            if saved.asked and graph.values[saved.value].storage in made
        ]
        return min(asked, default=len(self._fixed))

    def _option(
        self, seconds: float, region: Region, timeline: Own, start: int, gap: int
    ) -> Option:
        held = peak = 0
        ends = [*timeline.moments[1:], len(self._fixed)]
        rows = zip(
            timeline.moments,
            ends,
            timeline.alive_bytes,
            timeline.peak_bytes,
            strict=True,
        )
        for moment, end, alive, most in rows:
            if moment < start and end > self._graph.backward_start:
                held = max(held, alive)
            if moment < region.end or moment >= start:
                peak = max(peak, self._fixed[moment] + most)
            if moment >= start and alive:
                peak = max(peak, alive + self._most(moment + 1, end))
        return Option(held, max(peak, held + gap), seconds)

    def _gaps(
        self, starts: Sequence[int], timelines: Sequence[Sequence[Own]]
    ) -> list[int]:
        """Return the most fixed bytes while no region runs, for each region.

        Moments of the forward count for the region before them, those of the backward
        for the region whose backward comes next: what it and those before it hold is
        there.
        """
        busy = [False] * len(self._fixed)
        for region, start, of_region in zip(
            self.regions, starts, timelines, strict=True
        ):
            end = max((m + 1 for own in of_region for m in own.moments), default=start)
            for first, last in ((region.start, region.end), (start, end)):
                busy[first:last] = [True] * (min(last, len(busy)) - first)
        gaps = [0] * len(self.regions)
        after = {region.end: i for i, region in enumerate(self.regions)}
        before = {start: i for i, start in enumerate(starts)}
        current = None
        for moment in range(self._graph.backward_start):
            current = after.get(moment, current)
            if current is not None and not busy[moment]:
                gaps[current] = max(gaps[current], self._most(moment, moment + 1))
        current = None
        for moment in range(len(self._fixed) - 1, self._graph.backward_start - 1, -1):
            current = before.get(moment, current)
            if current is not None and not busy[moment]:
                gaps[current] = max(gaps[current], self._most(moment, moment + 1))
        return gaps

    def _most(self, start: int, end: int) -> int:
        operators = self._graph.operators
        inside = range(start, end)
        return max(
            (self._fixed[m] + operators[m].workspace_bytes for m in inside), default=0
        )
