"""The base class of solvers, whose estimates the simulation corrects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from membudget.planner.schedule import Schedule, Simulator

MAX_ATTEMPTS = 12
"""Attempts of a solver at one budget; the reductions double, so 12 are many."""


class Solver(ABC):
    """Base class of solvers; solutions may be of any type that supports equality."""

    def __init__(self, simulator: Simulator):
        """Create a solver for the step of a simulator."""
        self._simulator = simulator

    @abstractmethod
    def solve(self, budget_bytes: int) -> Any:
        """Return the solver's estimate of the best solution; `None` if none fits."""

    def smallest(self) -> Any:
        """Return the solution with the fewest bytes; `None` if the solver has none."""
        return None

    @abstractmethod
    def schedule(self, solution: Any) -> Schedule:
        """Convert a solution to a schedule."""

    def schedules(self, budget_bytes: int) -> Iterator[Schedule]:
        """Yield ever tighter schedules until the simulated peak of one fits the budget.

        Solvers round bytes and estimate peaks, so the simulated peak may exceed the
        budget. Each attempt lowers the target by the previous schedule's excess over
        the budget; while the solver returns the same solution, the reduction doubles.
        """
        target, reduction, previous = budget_bytes, 0, None
        for _ in range(MAX_ATTEMPTS):
            solution = self.solve(target)
            if solution is None:
                # The solver's peaks are upper bounds: its smallest may fit after all.
                smallest = self.smallest()
                if smallest is not None and smallest != previous:
                    yield self.schedule(smallest)
                return
            if solution != previous:
                yield (schedule := self.schedule(solution))
                reduction = schedule.peak_bytes - budget_bytes
                if reduction <= 0:
                    return
            target, reduction, previous = target - reduction, 2 * reduction, solution

    @property
    def least(self) -> list[Schedule]:
        """The schedules with the smallest peaks that the solver can find."""
        solution = self.smallest()
        found = [] if solution is None else [self.schedule(solution)]
        # Bisection for the smallest budget that the solver believes feasible.
        low = 0
        high = found[0].peak_bytes if found else self._simulator.simulate(()).peak_bytes
        for _ in range(MAX_ATTEMPTS):
            middle = (low + high) // 2
            tighter = self.solve(middle)
            if tighter is None:
                low = middle
            else:
                high, solution = middle, tighter
        return found if solution is None else [*found, self.schedule(solution)]
