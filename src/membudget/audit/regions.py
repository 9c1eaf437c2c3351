"""Which regions an audit is about: those on the model, or those it puts there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import sub
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from membudget.apply import RegionStatus, apply
from membudget.carrier import has_region, statistics_of
from membudget.engine.statistics import Statistics
from membudget.errors import OptionError, SelectionError


def default_names(model: Module) -> list[str]:
    """Return the names of the modules that get a region if nobody says which.

    They are the children of the longest `ModuleList` or `Sequential` in the model, the
    outermost of those that are equally long. The blocks of a list of like blocks are
    not searched for a longer one: a region inside one block of many is not what is
    meant. A child without a `forward`, such as a list of lists, stands for its own
    children. A model without such a list gets a region on each direct child that has
    parameters.

    Args:
        model: Any module; it is left as it is.

    Returns:
        Names as in `model.named_modules()`, never empty.

    Raises:
        SelectionError: If the model has nothing to choose from.

    Example:
        >>> from torch.nn import Linear, Sequential
        >>> body = Sequential(*(Linear(4, 4) for _ in range(3)))
        >>> default_names(Sequential(body, Linear(4, 1)))
        ['0.0', '0.1', '0.2']
    """
    lists = list(_lists(model, ""))
    if lists:
        name, longest = max(lists, key=lambda item: len(item[1]))
        return list(_callable_children(longest, name))
    names = [
        name
        for name, child in model.named_children()
        if any(True for _ in child.parameters())
    ]
    if not names:
        raise SelectionError(
            f"{type(model).__name__} has no ModuleList, no Sequential and no child "
            f"with parameters, so there is nothing to put a region on by default. Say "
            f"which modules get one: blocks=BlockClass, names='h.*' or where=..."
        )
    return names


def _lists(module: Module, name: str) -> Iterator[tuple[str, ModuleList | Sequential]]:
    """Yield the lists in which blocks may stand, outermost first."""
    if isinstance(module, ModuleList | Sequential) and len(module):
        yield name, module
        kinds = {type(child) for child in module.children()}
        if len(module) > 1 and len(kinds) == 1:
            return
    for key, child in module.named_children():
        yield from _lists(child, _join(name, key))


def _callable_children(module: Module, name: str) -> Iterator[str]:
    for key, child in module.named_children():
        if isinstance(child, ModuleList | ModuleDict):
            yield from _callable_children(child, _join(name, key))
        else:
            yield _join(name, key)


def _join(owner: str, key: str) -> str:
    return f"{owner}.{key}" if owner else key


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
