"""Put regions on a model without editing or wrapping it, and take them off again.

A module gets a region by a change of class: its class becomes a subclass, made here,
that differs in `forward` alone (FSDP2 and parametrizations do the same to a module). No
module is added, no name changes, `isinstance` holds, and hooks on the module run once,
because they surround `forward`. A copy or a pickle of the module is a plain one. Taking
the region off gives the class back.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from membudget.engine.options import RegionOptions, checked_options
from membudget.engine.region import checkpoint, run_region
from membudget.engine.statistics import Statistics
from membudget.errors import OptionError, SelectionError

_KEY = "_membudget_region"
_CLASSES: WeakKeyDictionary[type[Module], type[Module]] = WeakKeyDictionary()


@dataclass(slots=True)
class _Region:
    """What a module with a region carries in its `__dict__`."""

    options: RegionOptions
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What one region did so far.

    Attributes:
        name: The module's name in the model.
        forwards: Calls that dropped saved tensors.
        recomputes: Times that the module was run again.
        skipped: Calls in which nothing needed a gradient, and nothing was dropped.
    """

    name: str
    forwards: int
    recomputes: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Status:
    """What the regions of a model did so far.

    Attributes:
        regions: One entry for each region, in the order of the model.
    """

    regions: tuple[RegionStatus, ...]

    def __str__(self) -> str:
        """Return a table, one line a region."""
        width = max([len("region"), *(len(region.name) for region in self.regions)])
        lines = [f"{'region':{width}}  forwards  recomputes  skipped"]
        for r in self.regions:
            note = "" if r.forwards or r.skipped else "  (did not run)"
            lines.append(
                f"{r.name:{width}}  {r.forwards:8d}  {r.recomputes:10d}  "
                f"{r.skipped:7d}{note}"
            )
        return "\n".join(lines)


class Applied:
    """Regions on a model.

    Attributes:
        names: The modules that carry them, in the order of the model.
    """

    def __init__(self, modules: dict[str, Module], statistics: dict[str, Statistics]):
        """Hold the modules; `apply` makes these objects."""
        self._modules = modules
        self._statistics = statistics

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that carry regions, in the order of the model."""
        return tuple(self._statistics)

    def status(self) -> Status:
        """Return what each region did so far: a region that never ran says so."""
        return Status(
            tuple(
                RegionStatus(name, s.forwards, s.recomputes, s.skipped)
                for name, s in self._statistics.items()
            )
        )

    def remove(self) -> None:
        """Take the regions off: the model is what it was. Twice is once."""
        for module in self._modules.values():
            remove_region(module)
        self._modules = {}


def apply(
    model: Module,
    *,
    blocks: type[Module] | tuple[type[Module], ...] | None = None,
    names: str | Iterable[str] | None = None,
    where: Callable[[str, Module], bool] | None = None,
    every: int = 1,
    **options: Any,
) -> Applied:
    """Put regions on the modules of `model` that match, and return a way to undo it.

    What is given of `blocks`, `names` and `where` must all agree. A region on a module
    that is inside another with a region is nested in it. Applying again to the same
    modules is one application, with the newer options.

    Args:
        model: Any module; it is changed in place.
        blocks: A class, or several, whose instances get a region.
        names: Patterns of module names as in `model.named_modules()`: `*` stands for
            any part of a name between two dots, `**` for any number of such names.
            `"h.*"` matches `h.0` and not `h.0.mlp`.
        where: Asked with the name and the module.
        every: Take every n-th of what matches, beginning with the first.
        **options: Options of the regions; see `checkpoint`.

    Returns:
        An object with `status()`, `remove()` and `names`.

    Raises:
        SelectionError: If nothing is asked for, nothing matches, or a module cannot
            carry a region.
        OptionError: If an option is unknown or cannot be meant.

    Example:
        >>> import membudget as mb, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> applied = mb.apply(model, blocks=torch.nn.Linear, every=2)
        >>> applied.names
        ('0', '2')
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> print(applied.status())
        region  forwards  recomputes  skipped
        0              1           1        0
        2              1           1        0
        >>> applied.remove()
    """
    checked = checked_options(options)
    modules = _select(model, blocks, names, where, every)
    for name, module in modules.items():
        _check_can_carry(name, module)
    statistics = {
        name: put_region(module, checked, name) for name, module in modules.items()
    }
    return Applied(modules, statistics)


def put_region(module: Module, options: RegionOptions, name: str = "") -> Statistics:
    """Put a region on one module.

    Args:
        module: The module.
        options: The region's options.
        name: What errors and `status()` call it.

    Returns:
        Where the region counts.
    """
    _check_can_carry(name, module)
    region = _Region(options, Statistics(name))
    if not has_region(module):
        module.__class__ = _class_with_region(type(module))
    module.__dict__[_KEY] = region
    return region.statistics


def remove_region(module: Module) -> None:
    """Take the region off one module, if it carries one."""
    module.__dict__.pop(_KEY, None)
    # Somebody else (FSDP2) may have changed the class on top; then it stays, and its
    # forward finds no region and runs the module's own.
    plain = vars(type(module)).get("_membudget_plain_class")
    if plain is not None:
        module.__class__ = plain


def has_region(module: Module) -> bool:
    """Tell whether a module carries a region."""
    return _KEY in module.__dict__


def statistics_of(module: Module) -> Statistics | None:
    """Return where a module's region counts; `None` without a region."""
    region: _Region | None = module.__dict__.get(_KEY)
    return None if region is None else region.statistics


def _class_with_region(plain: type[Module]) -> type[Module]:
    known = _CLASSES.get(plain)
    if known is not None:
        return known
    made: Any = type(
        plain.__name__,
        (plain,),
        {
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "_membudget_plain_class": plain,
        },
    )

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        region: _Region | None = self.__dict__.get(_KEY)
        function = super(made, self).forward
        if region is None:
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(function, *args, **kwargs)
        return run_region(function, args, kwargs, region.options, region.statistics)

    def reduce(self: Module, protocol: Any) -> Any:
        return _without_region(super(made, self).__reduce_ex__(protocol), made, plain)

    # Set afterwards: some classes rewrite the `forward` of a subclass when it is made.
    made.forward = forward
    made.__reduce_ex__ = reduce
    _CLASSES[plain] = made
    return cast("type[Module]", made)


def _without_region(
    reduced: Any, made: type[Module], plain: type[Module]
) -> tuple[Any, ...]:
    """Return what `__reduce_ex__` returned, of a plain module."""
    parts = list(reduced)
    if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle refuses this one for an object of another class than it names.
        parts[:2] = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
    parts[1] = tuple(plain if item is made else item for item in parts[1])
    if len(parts) > 2 and isinstance(parts[2], dict):
        parts[2] = {key: item for key, item in parts[2].items() if key != _KEY}
    return tuple(parts)


def _check_can_carry(name: str, module: Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        why = "it is a TorchScript module, whose class cannot be changed"
    elif "forward" in module.__dict__:
        why = (
            "its forward was replaced on the instance (by an offloading or device "
            "hook?), so a region would never run; remove that first"
        )
    else:
        return
    raise SelectionError(f"module {name!r} cannot carry a region: {why}")


def _select(
    model: Module,
    blocks: type[Module] | tuple[type[Module], ...] | None,
    names: str | Iterable[str] | None,
    where: Callable[[str, Module], bool] | None,
    every: int,
) -> dict[str, Module]:
    if every < 1:
        raise OptionError(f"every must be at least 1; got {every}")
    if blocks is None and names is None and where is None:
        raise SelectionError(
            "say which modules get a region: blocks=BlockClass, names='h.*' or "
            "where=lambda name, module: ..."
        )
    patterns = [names] if isinstance(names, str) else names and list(names)
    matching = {
        name: module
        for name, module in model.named_modules()
        if (blocks is None or isinstance(module, blocks))
        and (patterns is None or any(_matches(name, p) for p in patterns))
        and (where is None or where(name, module))
    }
    if not matching:
        asked = {"blocks": blocks, "names": patterns, "where": where}
        given = ", ".join(f"{k}={v!r}" for k, v in asked.items() if v is not None)
        some = [name for name, _ in model.named_modules() if name][:8]
        raise SelectionError(
            f"no module of {type(model).__name__} matches {given}. It has "
            f"{', '.join(map(repr, some)) or 'no submodules'}"
            f"{' and more' if len(some) == 8 else ''}."
        )
    return dict(list(matching.items())[::every])


def _matches(name: str, pattern: str) -> bool:
    """Match a dotted name part by part.

    Example:
        >>> _matches("h.0", "h.*"), _matches("h.0.mlp", "h.*")
        (True, False)
        >>> _matches("a.b.c", "**.c")
        True
    """
    return bool(name) and _parts_match(name.split("."), pattern.split("."))


def _parts_match(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_parts_match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatchcase(parts[0], patterns[0])
        and _parts_match(parts[1:], patterns[1:])
    )
