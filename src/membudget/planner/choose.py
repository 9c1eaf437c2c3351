"""The fastest plan that fits, of all that the planners find; simulation has the word.

The step is cut into regions in several ways, from few large ones to many small ones;
for each cut the programme of `flat` picks choices; each answer is simulated, and where
it does not fit, the programme is given less until it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from membudget.errors import BudgetError, OptionError
from membudget.graph import ModuleCall, StepGraph
from membudget.planner.flat import choose_options
from membudget.planner.overhead import NO_OVERHEADS, Overheads
from membudget.planner.pieces import pieces
from membudget.planner.regions import Region
from membudget.planner.simulate import Simulation, simulate
from membudget.planner.timeline import timeline
from membudget.planner.windows import Windows

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 10, 1 / 30)
"""The largest share of what is saved that a region may have, in each cut."""

MOST_OPERATORS = 3000
"""A cut with a larger region is left out: its minimum cuts would take minutes."""

_MOST_TRIES = 12


@dataclass(frozen=True)
class Chosen:
    """A plan as the planner sees it.

    Attributes:
        calls: The calls that become regions.
        regions: Them, with what they keep.
        simulation: What comes of it.
        seconds: Of the step, with what the engine itself costs.
        plain_seconds: Of the plain step.
    """

    calls: tuple[ModuleCall, ...]
    regions: tuple[Region, ...]
    simulation: Simulation
    seconds: float
    plain_seconds: float

    @property
    def slowdown(self) -> float:
        """The time of the step, of the plain one."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 1.0


class Planner:
    """Plans one step, for any number of budgets."""

    def __init__(self, graph: StepGraph, overheads: Overheads = NO_OVERHEADS):
        """Cut the step and find what may be kept.

        Args:
            graph: The plain step, with seconds.
            overheads: What a region costs beside the operators that run again.

        Raises:
            OptionError: If an operator takes no finite time.
        """
        check_seconds(graph)
        self.graph = smoothed(graph)
        self.plain_peak_bytes = timeline(graph).peak_bytes
        self._cuts = [
            _Cut(self.graph, calls, overheads) for calls in _distinct_cuts(self.graph)
        ]

    def choose(self, budget_bytes: int) -> Chosen:
        """Return the fastest plan whose simulated peak fits.

        Args:
            budget_bytes: For what the step allocates.

        Raises:
            BudgetError: If none fits; it says the least budget for which one does.
        """
        if self.plain_peak_bytes <= budget_bytes:
            plain = simulate(self.graph, ())
            return Chosen((), (), plain, plain.seconds, plain.seconds)
        found = [
            chosen for cut in self._cuts for chosen in cut.candidates(budget_bytes)
        ]
        fitting = [c for c in found if c.simulation.peak_bytes <= budget_bytes]
        if not fitting:
            least = self.least_bytes()
            raise BudgetError(
                f"no plan fits into {budget_bytes:,} bytes above what is there before "
                f"the step; the least that one fits into is {least:,} bytes",
                asked_bytes=budget_bytes,
                least_bytes=least,
            )
        return min(fitting, key=lambda chosen: chosen.seconds)

    def least_bytes(self) -> int:
        """Return the least budget that some plan fits into."""
        peaks = [chosen.simulation.peak_bytes for c in self._cuts for chosen in c.least]
        return min([self.plain_peak_bytes, *peaks])


class _Cut:
    """One way to cut the step."""

    def __init__(
        self, graph: StepGraph, calls: Sequence[ModuleCall], overheads: Overheads
    ):
        self._graph = graph
        self._calls = tuple(calls)
        self._windows = Windows(graph, [Region(c.start, c.end) for c in calls])
        self._own_s = [overheads.seconds(graph, r) for r in self._windows.regions]
        self._options = [
            # The first choice keeps all that is wanted: no region is needed for that.
            [
                of[0],
                *(replace(option, seconds=option.seconds + own) for option in of[1:]),
            ]
            for of, own in zip(self._windows.options(), self._own_s, strict=True)
        ]

    def candidates(self, budget_bytes: int) -> list[Chosen]:
        """Return answers that may fit; the fastest that does is among them."""
        found = list(self.least)
        inner, step, before = budget_bytes, 0, None
        for _ in range(_MOST_TRIES):
            picked = choose_options(self._options, inner)
            if picked is None:
                break
            if picked != before:
                found.append(self._simulated(picked))
                step = found[-1].simulation.peak_bytes - budget_bytes
                if step <= 0:
                    break
            before = picked
            # The same answer comes again where the options' grain is coarser.
            inner -= step
            step *= 2
        return found

    @cached_property
    def least(self) -> list[Chosen]:
        """The answers with the least peak, by what they hold and by the programme."""
        picked = [
            min(range(len(of)), key=lambda i: (of[i].held_bytes, of[i].peak_bytes))
            for of in self._options
        ]
        found = [self._simulated(picked)]
        low, high = 0, found[0].simulation.peak_bytes
        for _ in range(_MOST_TRIES):
            middle = (low + high) // 2
            answer = choose_options(self._options, middle)
            if answer is None:
                low = middle
            else:
                high = middle
                picked = answer
        return [*found, self._simulated(picked)]

    def _simulated(self, picked: Sequence[int]) -> Chosen:
        regions = []
        calls = []
        own_s = 0.0
        parts = zip(
            self._calls,
            self._windows.regions,
            self._windows.choices,
            picked,
            self._own_s,
            strict=True,
        )
        for call, region, of_region, index, own in parts:
            if index > 0:
                own_s += own
                calls.append(call)
                kept = of_region[index].kept
                regions.append(Region(region.start, region.end, kept))
        simulation = simulate(self._graph, regions)
        seconds = simulation.seconds + own_s
        plain_s = self._graph.seconds
        return Chosen(tuple(calls), tuple(regions), simulation, seconds, plain_s)


def _distinct_cuts(graph: StepGraph) -> list[list[ModuleCall]]:
    cuts: list[list[ModuleCall]] = []
    for share in SHARES:
        cut = pieces(graph, share)
        if cut and cut not in cuts:
            cuts.append(cut)
    quick = [cut for cut in cuts if max(c.end - c.start for c in cut) <= MOST_OPERATORS]
    return quick or cuts[-1:]


def check_seconds(graph: StepGraph) -> None:
    """Refuse times that are none.

    Raises:
        OptionError: If an operator takes NaN, infinite or negative seconds.
    """
    for index, operator in enumerate(graph.operators):
        if not 0 <= operator.seconds < math.inf:
            raise OptionError(
                f"operator {index} ({operator.name}) takes {operator.seconds} seconds; "
                "a planner needs finite times that are not negative"
            )


def smoothed(graph: StepGraph) -> StepGraph:
    """Return the graph with equal times for the operators of equal blocks.

    Blocks that run the same operators on the same shapes take the same time, and what a
    stopwatch says of one of them is noise.
    """
    groups: dict[tuple[object, ...], list[ModuleCall]] = {}
    for call in graph.calls:
        inside = graph.operators[call.start : call.end]
        key = tuple((o.name, o.read_bytes, o.written_bytes, o.flops) for o in inside)
        if key:
            groups.setdefault(key, []).append(call)
    operators = list(graph.operators)
    for alike in sorted(groups.values(), key=lambda of: of[0].end - of[0].start):
        for offset in range(alike[0].end - alike[0].start):
            indices = [call.start + offset for call in alike]
            mean = sum(operators[i].seconds for i in indices) / len(indices)
            for index in indices:
                operators[index] = replace(operators[index], seconds=mean)
    return replace(graph, operators=tuple(operators))
