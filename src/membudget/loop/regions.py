"""Put the regions of one schedule after another on a model.

Schedules that decide alike share their regions, with all that these have verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from torch.nn import Module

from membudget.allocation import note_shortage
from membudget.attach import Carried, ModuleRegion, put, remove_region
from membudget.engine.options import Statistics, checked_options
from membudget.errors import SelectionError
from membudget.loop.host_room import HostRoom
from membudget.loop.point import RecordedSize, RegionPlans
from membudget.planned import PlanRegions, carried_of_regions, policies_of
from membudget.planner.schedule import Schedule
from membudget.report.kept_text import kept_text
from membudget.selection import default_names
from membudget.sharding import around_units, ranks_around

AGAIN = (
    "The next forward runs under a tighter plan; to run this one again, call it by "
    "step() of what budget() returned"
)
OUTSIDE = (
    "To run such a micro-batch again under a tighter plan, call it by step() of what "
    "budget() returned"
)
SMALLEST = "No plan that keeps less is known: use a smaller micro-batch"
NEVER = (
    "step() ran the micro-batch again under tighter plans, and found no memory: use a "
    "smaller one"
)

ON_RANKS = (
    "{} ranks train the model together, and none of them can run a micro-batch again "
    "alone: start them again with a smaller budget or smaller micro-batches"
)


class RegionSets:
    """The regions that a model can carry, of which one set is on it.

    Attributes:
        inner: What the model itself would carry under the plan in force.
        ranks: How many processes train the model together, as far as is known.
    """

    def __init__(self, model: Module, verify: float, host: HostRoom | None = None):
        """Start without regions.

        Args:
            model: The model.
            verify: The share of calls that they verify.
            host: What moves tensors to the host; `None` if nothing does.
        """
        self._host = host
        self.ranks = 1
        self.inner: Carried | None = None
        self._model = model
        self._options = {"verify": verify}
        self._sets: dict[RegionPlans | None, PlanRegions] = {}
        self._on: PlanRegions = []
        self._kept: Callable[[], str] | None = None

    def switch(self, point: RecordedSize, schedule: Schedule, limit_bytes: int) -> None:
        """Put the regions of a schedule on the model, in place of those there."""
        regions = point.regions(schedule)
        if regions not in self._sets:
            offload = None if self._host is None else self._host.offload
            carried = carried_of_regions(self._model, regions, self._options, offload)
            self._sets[regions] = self._noted(carried)
        self._put(self._sets[regions])
        self._kept = partial(_kept_under, point, schedule, limit_bytes)

    def recompute_all(self) -> None:
        """Put a region on each block that keeps nothing inside."""
        if None not in self._sets:
            options = checked_options({"engine": "auto", **self._options})
            try:
                around = set(around_units(self._model))  # There FSDP gathers.
                names = [n for n in default_names(self._model) if n not in around]
            except SelectionError:
                names = [""]
            self._sets[None] = self._noted(
                {n: ModuleRegion(options, Statistics(n), True) for n in names}
            )
        self._put(self._sets[None])
        self._kept = _nothing_kept

    def clear(self) -> None:
        """Take the regions off the model."""
        for _, module, _ in self._on:
            if module is not self._model:
                remove_region(module)
        self._on, self.inner, self._kept = [], None, None

    def kept_text(self) -> str:
        """Return what is kept under the plan in force; empty if there is none."""
        if self._kept is None:
            return ""
        return f"{type(self._model).__name__}: {self._kept()}"

    def counted(self) -> dict[str, tuple[int, int]]:
        """Return forwards and recomputes of each region, by name."""
        totals: dict[str, tuple[int, int]] = {}
        for _, _, carried in self._all():
            if of := carried.statistics:
                forwards, recomputes = totals.get(of.label, (0, 0))
                totals[of.label] = forwards + of.forwards, recomputes + of.recomputes
        return totals

    def differences(self) -> Counter[str]:
        """Return how many calls of each region did not follow their plan, by name."""
        totals: Counter[str] = Counter()
        for name, _, carried in self._all():
            totals[name] += sum(p.differences for p in policies_of(carried))
        return totals

    def _all(self) -> PlanRegions:
        return [region for regions in self._sets.values() for region in regions]

    def _put(self, regions: PlanRegions) -> None:
        if regions is self._on:
            return
        self.clear()
        self._on = regions
        for name, module, carried in regions:
            if module is self._model:
                self.inner = carried
            else:
                put(module, carried, name)

    def _noted(self, carried: dict[str, Carried]) -> PlanRegions:
        # Now, in its forward: it may have been wrapped or sharded after the budget.
        self.ranks = max(self.ranks, ranks_around(self._model))
        modules = dict(self._model.named_modules())
        return [(name, modules[name], of) for name, of in carried.items()]


def explain(error: BaseException, sets: Iterable[RegionSets], remedy: str) -> None:
    """Say what the plans in force keep, and what helps, if memory ran out."""
    sets = tuple(sets)
    ranks = max(of.ranks for of in sets)
    if ranks > 1 and remedy in (AGAIN, OUTSIDE):
        remedy = ON_RANKS.format(ranks)

    def text() -> str:
        return ". ".join([*filter(None, (of.kept_text() for of in sets)), remedy])

    note_shortage(error, text)


def _kept_under(point: RecordedSize, schedule: Schedule, limit_bytes: int) -> str:
    return kept_text(point.profile.graph, point.simulated(schedule), limit_bytes)


def _nothing_kept() -> str:
    return "memory ran out without a plan: every block is recomputed as a whole"
