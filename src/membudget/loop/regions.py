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


MOST_SETS = 64
"""Sets of regions that are kept with what they have verified; the oldest goes first."""


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
        self._past: Counter[tuple[str, str]] = Counter()
        self._on: PlanRegions = []
        self._kept: Callable[[], str] | None = None

    def switch(self, point: RecordedSize, schedule: Schedule, limit_bytes: int) -> None:
        """Put the regions of a schedule on the model, in place of those there."""
        regions = point.regions(schedule)
        found = self._sets.pop(regions, None)
        if found is None:
            offload = None if self._host is None else self._host.offload
            carried = carried_of_regions(self._model, regions, self._options, offload)
            found = self._noted(carried)
        self._sets[regions] = found  # The latest is the last.
        if len(self._sets) > MOST_SETS:
            self._past.update(_counted(self._sets.pop(next(iter(self._sets)))))
        self._put(found)
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
        totals = self._totals()
        names = [name for what, name in totals if what == "forwards"]
        return {n: (totals["forwards", n], totals["recomputes", n]) for n in names}

    def differences(self) -> Counter[str]:
        """Return how many calls of each region did not follow their plan, by name."""
        found = self._totals().items()
        return Counter({n: of for (what, n), of in found if what == "differences"})

    def _totals(self) -> Counter[tuple[str, str]]:
        totals = Counter(self._past)
        for regions in self._sets.values():
            totals.update(_counted(regions))
        return totals

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


def _counted(regions: PlanRegions) -> Counter[tuple[str, str]]:
    """Return what regions counted, each number by what it is and its region's name."""
    found: Counter[tuple[str, str]] = Counter()
    for name, _, carried in regions:
        if of := carried.statistics:
            found["forwards", of.label] += of.forwards
            found["recomputes", of.label] += of.recomputes
        differences = sum(p.differences for p in policies_of(carried))
        found["differences", name] += differences
    return found


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
