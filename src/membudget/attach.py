"""Which modules a user selects, and how each gets a region: by changing its class.

The module's class is replaced by a generated subclass that overrides `forward` alone
(FSDP2 and parametrizations replace classes the same way). No module is added, no name
changes, `isinstance` holds, and hooks on the module run once, because they surround
`forward`. A copy or a pickle of the module is a plain one. Removing the region restores
the class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region
from membudget.errors import OptionError, SelectionError


def select_modules(
    model: Module,
    blocks: type[Module] | tuple[type[Module], ...] | None,
    names: str | Iterable[str] | None,
    where: Callable[[str, Module], bool] | None,
    every: int = 1,
) -> dict[str, Module]:
    """Return the modules that match all given criteria, by name, in model order.

    Raises:
        SelectionError: If no criterion is given, or nothing matches.
        OptionError: If `every` is less than 1.
    """
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
    """Tell whether a dotted name matches a pattern, part by part.

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


_KEY = "_membudget_region"
_CLASSES: WeakKeyDictionary[type[Module], type[Module]] = WeakKeyDictionary()


class Carried(Protocol):
    """What runs between a module's call and its forward."""

    @property
    def statistics(self) -> Statistics | None:
        """Its counters, if any."""

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the module's forward."""


@dataclass(slots=True)
class ModuleRegion:
    """A region attached to one module."""

    options: RegionOptions
    statistics: Statistics

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the module's forward as a region."""
        return run_region(function, args, kwargs, self.options, self.statistics)


def put_region(module: Module, options: RegionOptions, name: str = "") -> Statistics:
    """Attach a region to one module and return its counters, which bear the name."""
    region = ModuleRegion(options, Statistics(name))
    put(module, region, name)
    return region.statistics


def put(module: Module, carried: Carried, name: str) -> None:
    """Attach something to one module, replacing what is attached.

    Raises:
        SelectionError: The module cannot carry anything.
    """
    check_can_carry(name, module)
    if not has_region(module):
        module.__class__ = _class_with_region(type(module))
    module.__dict__[_KEY] = carried


def carried_by(module: Module) -> Carried | None:
    """Return what is attached to a module."""
    carried: Carried | None = module.__dict__.get(_KEY)
    return carried


def remove_region(module: Module) -> None:
    """Remove what is attached to a module, if anything."""
    module.__dict__.pop(_KEY, None)
    # FSDP2 may have subclassed the class since. Then it stays, and its forward finds no
    # region and runs the module's own.
    plain = vars(type(module)).get("_membudget_plain_class")
    if plain is not None:
        module.__class__ = plain


def has_region(module: Module) -> bool:
    """Tell whether something is attached to a module."""
    return _KEY in module.__dict__


def statistics_of(module: Module) -> Statistics | None:
    """Return the counters of a module's region; `None` without a region."""
    carried = carried_by(module)
    return None if carried is None else carried.statistics


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
        carried: Carried | None = self.__dict__.get(_KEY)
        function = super(made, self).forward
        if carried is None:
            return function(*args, **kwargs)
        return carried.run(function, args, kwargs)

    def reduce(self: Module, protocol: Any) -> Any:
        return _without_region(super(made, self).__reduce_ex__(protocol), made, plain)

    # Set afterwards, because some classes rewrite a subclass's `forward` on creation.
    made.forward = forward
    made.__reduce_ex__ = reduce
    _CLASSES[plain] = made
    return cast("type[Module]", made)


def _without_region(
    reduced: Any, made: type[Module], plain: type[Module]
) -> tuple[Any, ...]:
    """Return the result of `__reduce_ex__` for the plain module."""
    parts = list(reduced)
    if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle rejects `__newobj__` for an object of another class than it names.
        parts[:2] = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
    parts[1] = tuple(plain if item is made else item for item in parts[1])
    if len(parts) > 2 and isinstance(parts[2], dict):
        parts[2] = {key: item for key, item in parts[2].items() if key != _KEY}
    return tuple(parts)


def check_can_carry(name: str, module: Module) -> None:
    """Reject a module whose forward cannot be overridden by a subclass."""
    if isinstance(module, torch.jit.ScriptModule):
        why = "it is a TorchScript module, whose class cannot be changed"
    elif isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        why = (
            "it is a lazy module, which changes its class in its first forward and so "
            "would lose the region; run one forward first"
        )
    elif "forward" in module.__dict__:
        why = (
            "its forward was replaced on the instance (by an offloading or device "
            "hook?), so a region would never run; remove that first"
        )
    else:
        return
    raise SelectionError(f"module {name!r} cannot carry a region: {why}")
