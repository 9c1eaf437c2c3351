"""Find the fastest schedule that fits a budget, among those of all solvers.

Three kinds of solver propose schedules: one choice per module call (`knapsack`), nested
recomputation of the largest module call (`nested`), and minimum cuts under memory
prices (`prices`). Local search (`search`) improves the proposed schedules, and the
simulation decides which of them fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter

from membudget.errors import BudgetError, OptionError
from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import BlockEngine
from membudget.planner.collector import collector_off
from membudget.planner.knapsack import by_block, by_rerun
from membudget.planner.moved import Host
from membudget.planner.mover import Mover
from membudget.planner.nested import deeply_nested, nested
from membudget.planner.overheads import NO_OVERHEADS, Overheads
from membudget.planner.prices import priced
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.search import improved, never
from membudget.planner.second_run import communicates
from membudget.planner.solver import Solver
from membudget.planner.timeline import timeline

SolverMaker = Callable[[Simulator], list[Solver]]

_seconds, _peak_bytes = attrgetter("seconds"), attrgetter("peak_bytes")

SOLVERS: tuple[SolverMaker, ...] = (by_block, nested, priced)

MOST_STARTS = 2
"""Schedules that move nothing from which those that move something begin."""


class Planner:
    """Planner for one step, reusable for any number of budgets.

    Attributes:
        graph: The step, with operator times averaged over identical module calls.
        simulator: Simulator of schedules, with the engine's overhead added to the
            forward.
        plain_peak_bytes: Peak of the step without recomputation.
        found: The schedules that were found for the budgets asked so far.
    """

    @collector_off()
    def __init__(
        self,
        graph: StepGraph,
        overheads: Overheads = NO_OVERHEADS,
        solvers: Sequence[SolverMaker] | None = None,
        host: Host | None = None,
    ):
        """Cut the step into blocks and compute their Pareto fronts.

        With a `host`, storages may be moved there, besides being kept or recomputed.
        Its window is one of those that are tried.

        Raises:
            OptionError: If the time of an operator is negative or not finite.
        """
        check_seconds(graph)
        self.graph = smoothed(graph)
        self.plain_peak_bytes = timeline(graph).peak_bytes
        self._overheads = overheads
        self.simulator = Simulator(self.graph, overheads)
        self._solvers = solvers_of(graph) if solvers is None else solvers
        self._kinds = [make(self.simulator) for make in self._solvers]
        self.found: list[Schedule] = []
        self._mover = (
            Mover(self.simulator, host)
            if host is not None and priced in self._solvers
            else None
        )

    def fastest(self, budget_bytes: int, quickly: bool = False) -> Schedule:
        """Return the fastest schedule found whose simulated peak fits the budget.

        The schedule is no slower than any returned earlier for a smaller budget. With
        `quickly`, annealing is skipped, which saves up to a second.

        Raises:
            BudgetError: If no schedule fits; the error names the smallest feasible
                budget.
        """
        return self.candidates(budget_bytes, quickly)[0]

    @collector_off()
    def candidates(
        self,
        budget_bytes: int,
        quickly: bool = False,
        is_late: Callable[[], bool] = never,
    ) -> list[Schedule]:
        """Return the fastest schedule that fits, then the fastest of other kinds.

        These have other engines, or move nothing to the host. The times of engines and
        copies are priced roughly, so another kind may be faster.
        Once `is_late`, no annealing begins, unless nothing fits without it.

        Raises:
            BudgetError: If no schedule fits; the error names the smallest feasible
                budget.
        """
        if self.plain_peak_bytes <= budget_bytes:
            return [plain_schedule(self.graph)]
        fitting = self._fitting(budget_bytes, quickly, is_late)
        if not fitting:
            least_bytes, before_bytes = self.least_bytes(), self.graph.static.total
            raise BudgetError(
                f"no plan fits in {budget_bytes:,} bytes above what is in use before "
                f"the step; the smallest feasible budget is {least_bytes:,} bytes",
                asked_bytes=budget_bytes + before_bytes,
                least_bytes=least_bytes + before_bytes,
                before_bytes=before_bytes,
            )
        self.found.append(min(fitting, key=_seconds))
        # What fits a smaller budget fits this one, too, and may be faster.
        known = [s for s in self.found if s.peak_bytes <= budget_bytes]
        of_kinds: dict[tuple[frozenset[BlockEngine], bool], Schedule] = {}
        for schedule in sorted([*known, *fitting], key=_seconds):
            engines = frozenset(choice.engine for choice in schedule.choices)
            moves = any(choice.offloaded for choice in schedule.choices)
            of_kinds.setdefault((engines, moves), schedule)
        return [self.simulator.with_plain_times(s) for s in of_kinds.values()]

    def _fitting(
        self, budget_bytes: int, quickly: bool, is_late: Callable[[], bool]
    ) -> list[Schedule]:
        kinds = [
            [s for solver in kind for s in solver.schedules(budget_bytes)]
            for kind in self._kinds
        ]
        if all(s.peak_bytes > budget_bytes for of in kinds for s in of):
            kinds.append(self._least)  # To anneal until they fit.
        found = improved(self.simulator, kinds, budget_bytes, quickly, is_late)
        if self._mover is None:
            return found
        best = sorted(found, key=_seconds)[:MOST_STARTS] or self._least_moving
        moving = self._mover.schedules(best, budget_bytes, quickly, is_late)
        return [*found, *moving]

    @cached_property
    def _least(self) -> list[Schedule]:
        """The smallest schedules of each solver, found from bytes alone."""
        found = least_schedules(self.simulator, self._solvers)
        return [self.simulator.schedule(s.calls, s.choices) for s in found]

    @cached_property
    def _least_moving(self) -> list[Schedule]:
        """The same with all that they keep moved; empty without a host."""
        return [] if self._mover is None else [*self._mover.least(self._least)]

    @collector_off()
    def smallest(self) -> Schedule:
        """Return the schedule with the smallest peak that is found from bytes alone."""
        least = [*self._least, *self._least_moving]
        found = min(least, key=_peak_bytes, default=None)
        if found is None or found.peak_bytes >= self.plain_peak_bytes:
            return replace(plain_schedule(self.graph), is_smallest=True)
        return replace(self.simulator.with_plain_times(found), is_smallest=True)

    def least_bytes(self) -> int:
        """Return the smallest budget for which a schedule is known."""
        return self.smallest().peak_bytes


def least_schedules(
    simulator: Simulator, solvers: Sequence[SolverMaker]
) -> list[Schedule]:
    """Return the smallest schedules of each solver, found from bytes alone.

    Each operator counts as one second, so that they do not depend on what was measured.
    """
    operators = tuple(replace(o, seconds=1.0) for o in simulator.graph.operators)
    graph = replace(simulator.graph, operators=operators)
    timeless = Simulator(graph, alike=simulator)
    makers = (deeply_nested if make is nested else make for make in solvers)
    found = (solver for make in makers for solver in make(timeless))
    return [schedule for solver in found for schedule in solver.least]


def solvers_of(graph: StepGraph) -> tuple[SolverMaker, ...]:
    """Return the solvers whose plans the engines can execute on a step."""
    forward = graph.operators[: graph.backward_start]
    return (by_rerun,) if any(map(communicates, forward)) else SOLVERS


def plain_schedule(graph: StepGraph) -> Schedule:
    """Return the schedule without regions, hence without overhead on the forward."""
    return Simulator(graph).schedule((), ())


def check_seconds(graph: StepGraph) -> None:
    """Reject operator times that are negative or not finite.

    Raises:
        OptionError: If the time of an operator is negative, infinite or NaN.
    """
    for index, operator in enumerate(graph.operators):
        if not 0 <= operator.seconds < math.inf:
            raise OptionError(
                f"operator {index} ({operator.name}) takes {operator.seconds} seconds; "
                "a planner needs finite times that are not negative"
            )


def smoothed(graph: StepGraph) -> StepGraph:
    """Average the times of corresponding operators over identical module calls.

    Calls that run the same operators on the same shapes should take the same time, so
    measured differences between them are noise.
    """
    groups: dict[tuple[object, ...], list[ModuleCall]] = {}
    for call in graph.calls:
        inside = graph.operators[call.start : call.end]
        key = tuple((o.name, o.read_bytes, o.written_bytes, o.flops) for o in inside)
        if key:
            groups.setdefault(key, []).append(call)
    seconds = [operator.seconds for operator in graph.operators]
    # Short calls first, so that long calls average what is smooth inside already.
    for alike in sorted(groups.values(), key=lambda of: of[0].end - of[0].start):
        for offset in range(alike[0].end - alike[0].start):
            indices = [call.start + offset for call in alike]
            mean = sum(seconds[i] for i in indices) / len(indices)
            for index in indices:
                seconds[index] = mean
    pairs = zip(graph.operators, seconds, strict=True)
    operators = (o if o.seconds == s else replace(o, seconds=s) for o, s in pairs)
    return replace(graph, operators=tuple(operators))
