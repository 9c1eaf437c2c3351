"""The fastest plan that fits, of all that the planners find; simulation has the word.

The step is cut into modules in several ways, from few large ones to many small ones;
for each cut the programme of `flat` picks choices. And the largest module is cut into
chains of pieces, along which the programme of `chain` finds stages: those reach further
down. Each answer is simulated, and where it does not fit, the programme is given less
until it does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from membudget.errors import BudgetError, OptionError, SearchWarning
from membudget.graph import ModuleCall, StepGraph
from membudget.planner.answers import Answers, Chosen
from membudget.planner.exact import MOST_VARIABLES, Exact, exact
from membudget.planner.flat import choose_options
from membudget.planner.improve import improved
from membudget.planner.overhead import NO_OVERHEADS, Overheads
from membudget.planner.pieces import pieces
from membudget.planner.regions import Region
from membudget.planner.simulate import simulate
from membudget.planner.staged import largest_call, staged
from membudget.planner.timeline import timeline
from membudget.planner.windows import Windows

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 10, 1 / 30)
"""The largest share of what is saved that a region may have, in each cut."""

MOST_OPERATORS = 3000
"""A cut with a larger region is left out: its minimum cuts would take minutes."""


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
        self._overheads = overheads
        self.plain_peak_bytes = timeline(graph).peak_bytes
        self._answers: list[Answers] = [
            _ByModule(self.graph, calls, overheads)
            for calls in _distinct_cuts(self.graph)
        ]
        self._answers += staged(self.graph, overheads)
        self._found: list[Chosen] = []

    def choose(self, budget_bytes: int, exact_s: float = 0.0) -> Chosen:
        """Return the fastest plan whose simulated peak fits.

        It is no slower than what was returned for a smaller budget before.

        Args:
            budget_bytes: For what the step allocates.
            exact_s: How long to search all schedules for a faster one, by an integer
                programme: worth it where a step has tens of operators, or is no chain.

        Raises:
            BudgetError: If none fits; it says the least budget for which one does.
            MissingExtraError: If SciPy is wanted for the search and not installed.

        Warns:
            SearchWarning: If the search is too large to be tried, or found nothing.
        """
        if self.plain_peak_bytes <= budget_bytes:
            plain = simulate(self.graph, ())
            return Chosen((), (), plain, plain.seconds, plain.seconds)
        fitting = self._fitting(budget_bytes, lambda a: a.candidates(budget_bytes))
        if not fitting:
            fitting = self._fitting(budget_bytes, lambda a: a.least)
        if exact_s > 0:
            fitting += self._searched(budget_bytes, exact_s, fitting)
        if not fitting:
            least = self.least_bytes()
            raise BudgetError(
                f"no plan fits into {budget_bytes:,} bytes above what is there before "
                f"the step; the least that one fits into is {least:,} bytes",
                asked_bytes=budget_bytes,
                least_bytes=least,
            )
        self._found.append(self._improved(min(fitting, key=_seconds), budget_bytes))
        # What fitted into less fits, too, and may be faster than what was found now.
        known = [c for c in self._found if c.simulation.peak_bytes <= budget_bytes]
        return min(known, key=_seconds)

    def _searched(
        self, budget_bytes: int, limit_s: float, fitting: Sequence[Chosen]
    ) -> list[Chosen]:
        """Return what a search of all schedules finds that is faster, if anything."""
        call = largest_call(self.graph)
        if call is None:
            return []
        region = Region(call.start, call.end)
        own_s = self._overheads.seconds(self.graph, region)
        known = min((chosen.seconds for chosen in fitting), default=math.inf)
        again_s = known - self.graph.seconds - own_s
        if again_s <= 0:
            return []
        found = exact(self.graph, budget_bytes, limit_s, again_s, region)
        if found.status in ("too large", "unknown"):
            warnings.warn(_unanswered(found, limit_s), SearchWarning, stacklevel=2)
        if found.region is None or found.simulation is None:
            return []
        seconds = found.simulation.seconds + own_s
        schedule = (found.region,)
        return [
            Chosen((call,), schedule, found.simulation, seconds, self.graph.seconds)
        ]

    def _improved(self, chosen: Chosen, budget_bytes: int) -> Chosen:
        regions, simulation = improved(self.graph, chosen.regions, budget_bytes)
        faster_s = chosen.simulation.seconds - simulation.seconds
        return replace(
            chosen,
            regions=tuple(regions),
            simulation=simulation,
            seconds=chosen.seconds - faster_s,
        )

    def _fitting(
        self, budget_bytes: int, of: Callable[[Answers], Sequence[Chosen]]
    ) -> list[Chosen]:
        found = [chosen for answers in self._answers for chosen in of(answers)]
        return [c for c in found if c.simulation.peak_bytes <= budget_bytes]

    def least_seconds(self, budget_bytes: int) -> float:
        """Return seconds that no plan of this planner's classes goes below.

        The programmes are solved with bytes rounded down. For a bound on any schedule
        see `planner.bound`.
        """
        if self.plain_peak_bytes <= budget_bytes:
            return self.graph.seconds
        return min(
            (answers.least_seconds(budget_bytes) for answers in self._answers),
            default=math.inf,
        )

    def least_bytes(self) -> int:
        """Return the least budget that some plan fits into."""
        peaks = [c.simulation.peak_bytes for a in self._answers for c in a.least]
        return min([self.plain_peak_bytes, *peaks])


def _unanswered(found: Exact, limit_s: float) -> str:
    programme = f"the search of all schedules is a programme of {found.variables:,}"
    if found.status == "too large":
        return (
            f"{programme} variables, and is not tried with more than "
            f"{MOST_VARIABLES:,}: the plan is the best of the other planners"
        )
    return (
        f"{programme} variables, and found no plan in {limit_s:g} s: the plan is the "
        "best of the other planners; give more seconds"
    )


def _seconds(chosen: Chosen) -> float:
    return chosen.seconds


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
        return self.chosen([self._calls[i] for i in picked], regions, own_s)


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
