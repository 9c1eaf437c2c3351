"""Which regions an audit is about: those on the model, or those it puts there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import sub
from typing import Any

from torch.nn import Module

from membudget.apply import RegionStatus, apply
from membudget.attach import has_region, statistics_of
from membudget.engine.options import Statistics
from membudget.errors import OptionError
from membudget.selection import default_names


class RegionCounts:
    """What each region on some modules does from now on.

    Args:
        modules: The modules on which regions are looked for, at any depth.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        """Read what the regions have counted so far."""
        self._before = {
            id(statistics): (name, statistics, _counts(statistics))
            for root in modules
            for name, module in root.named_modules()
            if (statistics := statistics_of(module)) is not None
        }

    def since(self) -> tuple[RegionStatus, ...]:
        """Return what each region did since this was made."""
        return tuple(
            RegionStatus(name, *map(sub, _counts(statistics), before))
            for name, statistics, before in self._before.values()
        )

    def restore(self) -> None:
        """Forget what the regions counted since: an audit is none of their steps."""
        for _, statistics, before in self._before.values():
            statistics.forwards, statistics.recomputes, statistics.skipped = before


def _counts(statistics: Statistics) -> tuple[int, int, int]:
    return statistics.forwards, statistics.recomputes, statistics.skipped


@contextmanager
def counting(modules: Iterable[Module] = ()) -> Iterator[RegionCounts]:
    """Count what the regions on `modules` do, and forget it afterwards."""
    counts = RegionCounts(modules)
    try:
        yield counts
    finally:
        counts.restore()


@contextmanager
def with_regions(model: Module, selection: dict[str, Any]) -> Iterator[RegionCounts]:
    """Put regions on `model`, count what they do, and take them off."""
    applied = apply(model, **selection)
    try:
        yield RegionCounts([model])
    finally:
        applied.remove()


def regions_for(
    model: Module, selection: dict[str, Any]
) -> Callable[[], AbstractContextManager[RegionCounts]]:
    """Return the context of the budgeted run: regions that are there, or new ones.

    Args:
        model: The model that is audited.
        selection: What the user said to `audit` of regions, as keywords of `apply`.

    Raises:
        OptionError: If the model carries regions and others are asked for.
        SelectionError: If nothing can carry a region.
    """
    if any(has_region(module) for module in model.modules()):
        if selection:
            raise OptionError(
                f"the model carries regions already, and those are audited; "
                f"{', '.join(selection)} would ask for others. Leave that out, or call "
                f"remove() on what apply() returned"
            )
        return partial(counting, [model])
    if all(selection.get(key) is None for key in ("blocks", "names", "where")):
        selection = selection | {"names": default_names(model)}
    if selection.get("engine", "auto") != "replay" and selection.get("keep") is None:
        # The audit compares, and says more of a difference than a region that raises.
        selection = {"verify": False, **selection}
    # A wrong selection should be known before the plain step runs, not after.
    apply(model, **selection).remove()
    return partial(with_regions, model, selection)
