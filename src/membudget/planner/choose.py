"""The fastest plan that fits, of all that the planners find; simulation has the word.

A choice for each module (`by_module`), stages along the largest one (`staged`), what
that one keeps under prices (`prices`): what is found for the budget is improved
(`improve`).
"""

from __future__ import annotations

import math

from membudget.errors import BudgetError
from membudget.graph import StepGraph
from membudget.planner.answers import Chosen, simulated
from membudget.planner.by_module import by_module
from membudget.planner.improve import improved
from membudget.planner.overhead import NO_OVERHEADS, Overheads
from membudget.planner.prices import priced
from membudget.planner.seconds import check_seconds, smoothed
from membudget.planner.staged import staged
from membudget.planner.timeline import timeline


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
        # What runs again is dearer than it was in the forward.
        self._dear = overheads.added(self.graph)
        self._answers = [
            *by_module(self._dear, overheads),
            *staged(self._dear, overheads),
            *priced(self._dear, overheads),
        ]
        self._found: list[Chosen] = []

    def choose(self, budget_bytes: int, quickly: bool = False) -> Chosen:
        """Return the fastest plan found whose simulated peak fits.

        It is no slower than what was returned for a smaller budget before.

        Args:
            budget_bytes: For what the step allocates.
            quickly: Whether to leave out the search at random, which takes up to a
                second.

        Raises:
            BudgetError: If none fits; it says the least budget for which one does.
        """
        if self.plain_peak_bytes <= budget_bytes:
            return simulated(self.graph, (), ())
        fitting = self._fitting(budget_bytes, quickly)
        if not fitting:
            least = self.least_bytes()
            raise BudgetError(
                f"no plan fits into {budget_bytes:,} bytes above what is there before "
                f"the step; the least that one fits into is {least:,} bytes",
                asked_bytes=budget_bytes,
                least_bytes=least,
            )
        self._found.append(min(fitting, key=_seconds))
        # What fitted into less fits, too, and may be faster than what was found now.
        known = [c for c in self._found if c.simulation.peak_bytes <= budget_bytes]
        return self._with_own_seconds(min(known, key=_seconds))

    def _with_own_seconds(self, chosen: Chosen) -> Chosen:
        """Return a plan with the step's own seconds, and the engine's apart."""
        again_s = self._overheads.again(self.graph, chosen.simulation.recomputed)
        own_s = chosen.own_s + again_s
        return simulated(self.graph, chosen.calls, chosen.regions, own_s)

    def _fitting(self, budget_bytes: int, quickly: bool) -> list[Chosen]:
        found = [c for a in self._answers for c in a.candidates(budget_bytes)]
        if all(c.simulation.peak_bytes > budget_bytes for c in found):
            found += [c for answers in self._answers for c in answers.least]
        return improved(self._dear, found, budget_bytes, quickly)

    def least_seconds(self, budget_bytes: int) -> float:
        """Return the least seconds that the programmes come to, bytes rounded down.

        That is what their classes can do by their own count of bytes. Simulation counts
        fewer where two of their peaks are not at once, so that a plan which was made
        better may take less. For a bound on any schedule see `planner.bound`.
        """
        if self.plain_peak_bytes <= budget_bytes:
            return self.graph.seconds
        least_s = min(
            (answers.least_seconds(budget_bytes) for answers in self._answers),
            default=math.inf,
        )
        return least_s - (self._dear.seconds - self.graph.seconds)

    def least_bytes(self) -> int:
        """Return the least budget that some plan fits into."""
        peaks = [c.simulation.peak_bytes for a in self._answers for c in a.least]
        return min([self.plain_peak_bytes, *peaks])


def _seconds(chosen: Chosen) -> float:
    return chosen.seconds
