"""What a choice for one region holds, and its peaks, beside the rest of the step.

The bytes alive are a sum over storages, and a region's choice moves those that the
region makes. So the timeline of a step under many regions is that of what no choice
moves, and one part for each region: what it holds between its forward and its backward,
and what it does while it runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from membudget.graph import StepGraph
from membudget.planner.flat import Option
from membudget.planner.regions import Region, made_in, saved_in
from membudget.planner.repeats import Repeats
from membudget.planner.simulate import Own, own
from membudget.planner.timeline import lifetimes, of_intervals


class Windows:
    """The regions of a step, and what their choices cost.

    Attributes:
        regions: The regions, in the order of the forward.
        choices: The choices of each region.
        fixed_bytes: At each moment, what no choice moves.
    """

    def __init__(
        self,
        graph: StepGraph,
        regions: Sequence[Region],
        kept_anyway: Sequence[frozenset[int]] = (),
    ):
        """Find the choices.

        Args:
            graph: The step.
            regions: The regions; they do not overlap.
            kept_anyway: For each of them, what every choice keeps; nothing if empty.
        """
        self._graph = graph
        self.regions = list(regions)
        kept = kept_anyway or [frozenset[int]()] * len(self.regions)
        repeats = Repeats(graph)
        self.choices = [
            repeats.choices(region, anyway)
            for region, anyway in zip(self.regions, kept, strict=True)
        ]
        self.fixed_bytes = self._find_fixed_bytes()
        self._starts = sorted(self.backward_start(region) for region in self.regions)

    def _find_fixed_bytes(self) -> list[int]:
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
        starts = [self.backward_start(region) for region in self.regions]
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

    def backward_start(self, region: Region) -> int:
        """Return the moment at which the backward first asks for what it saved."""
        saved = (self._graph.saved[i] for i in saved_in(self._graph, region))
        asked = [s.asked[0] for s in saved if s.asked]
        return min(asked, default=len(self.fixed_bytes))

    def backward_end(self, start: int) -> int:
        """Return when the backward of another region begins, after a moment."""
        later = bisect_right(self._starts, start)
        return [*self._starts, len(self.fixed_bytes)][later]

    def _option(
        self, seconds: float, region: Region, timeline: Own, start: int, gap: int
    ) -> Option:
        held = peak = 0
        ends = [*timeline.moments[1:], len(self.fixed_bytes)]
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
                peak = max(peak, self.fixed_bytes[moment] + most)
            if moment >= start and alive:
                peak = max(peak, alive + self._most(moment + 1, end))
        peak = max(peak, self.peak_between(timeline, start, self.backward_end(start)))
        return Option(held, max(peak, held + gap), seconds)

    def _gaps(
        self, starts: Sequence[int], timelines: Sequence[Sequence[Own]]
    ) -> list[int]:
        """Return the most fixed bytes while no region runs, for each region.

        Moments of the forward count for the region before them, those of the backward
        for the region whose backward comes next: what it and those before it hold is
        there.
        """
        busy = [False] * len(self.fixed_bytes)
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
        for moment in range(
            len(self.fixed_bytes) - 1, self._graph.backward_start - 1, -1
        ):
            current = before.get(moment, current)
            if current is not None and not busy[moment]:
                gaps[current] = max(gaps[current], self._most(moment, moment + 1))
        return gaps

    def peak_between(self, timeline: Own, first: int, last: int) -> int:
        """Return the most bytes over some moments, with what a region itself has."""
        ends = [*timeline.moments[1:], len(self.fixed_bytes)]
        most = self._most(first, min(last, next(iter(timeline.moments), last)))
        rows = zip(timeline.moments, ends, timeline.alive_bytes, strict=True)
        for moment, end, alive in rows:
            inside = max(moment, first), min(end, last)
            if inside[0] < inside[1]:
                most = max(most, alive + self._most(*inside))
        for moment, peak in zip(timeline.moments, timeline.peak_bytes, strict=True):
            if first <= moment < last:
                most = max(most, self.fixed_bytes[moment] + peak)
        return most

    def _most(self, start: int, end: int) -> int:
        operators = self._graph.operators
        inside = range(start, end)
        return max(
            (self.fixed_bytes[m] + operators[m].workspace_bytes for m in inside),
            default=0,
        )
