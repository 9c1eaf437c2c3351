"""The fastest plan that fits, of all that the planners find; simulation has the word.

A choice for each module (`by_module`), stages along the largest one (`staged`), what
that one keeps under prices (`prices`): what is found for the budget is improved
(`improve`). With time to spare, all schedules are searched (`exact`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from membudget.errors import BudgetError, SearchWarning
from membudget.graph import StepGraph
from membudget.planner.answers import Chosen, simulated
from membudget.planner.by_module import by_module
from membudget.planner.exact import MOST_VARIABLES, Exact, exact
from membudget.planner.improve import improved
from membudget.planner.overhead import NO_OVERHEADS, Overheads
from membudget.planner.prices import priced
from membudget.planner.regions import Region
from membudget.planner.seconds import check_seconds, smoothed
from membudget.planner.staged import largest_call, staged
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

    def choose(
        self, budget_bytes: int, exact_s: float = 0.0, quickly: bool = False
    ) -> Chosen:
        """Return the fastest plan found whose simulated peak fits.

        It is no slower than what was returned for a smaller budget before.

        Args:
            budget_bytes: For what the step allocates.
            exact_s: How long to search all schedules for a faster one, by an integer
                programme: worth it where a step has tens of operators, or is no chain.
            quickly: Whether to leave out the search at random, which takes up to a
                second.

        Raises:
            BudgetError: If none fits; it says the least budget for which one does.
            MissingExtraError: If SciPy is wanted for the search and not installed.

        Warns:
            SearchWarning: If the search is too large to be tried, or found nothing.
        """
        if self.plain_peak_bytes <= budget_bytes:
            return simulated(self.graph, (), ())
        fitting = self._fitting(budget_bytes, quickly)
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
        again_s = known - self._dear.seconds - own_s
        if again_s <= 0:
            return []
        found = exact(self._dear, budget_bytes, limit_s, again_s, region)
        if found.status in ("too large", "unknown"):
            warnings.warn(_unanswered(found, limit_s), SearchWarning, stacklevel=2)
        if found.region is None:
            return []
        return [simulated(self._dear, (call,), (found.region,), own_s)]

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
