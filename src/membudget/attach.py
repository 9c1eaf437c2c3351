"""Attach a region to a module by changing its class, not its structure.

The module's class is replaced by a generated subclass that overrides `forward` (FSDP2
and parametrizations replace classes the same way). No module is added, no name changes,
`isinstance` checks still hold, and hooks on the module run once, because they surround
`forward`. A copied or unpickled module has the original class and no region. Removing
the region restores the module's class.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch.compiler import is_compiling
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from membudget.allocation import note_shortage
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region
from membudget.errors import SelectionError

_KEY = "_membudget_region"
_REPLACED = "_membudget_replaced_forward"
"""Where a forward waits that was set on the instance: it would hide the region."""

# By the class of the user's, which the generated class holds as its base.
_CLASSES: WeakValueDictionary[type[Module], type[Module]] = WeakValueDictionary()


class Carried(Protocol):
    """An attached object, such as a region, that runs its module's forward.

    Attributes:
        kept: What an error says if memory runs out in the forward; may be empty.
    """

    kept: str

    @property
    def statistics(self) -> Statistics | None:
        """Counters of the attached region; `None` if no region is attached."""

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the module's forward."""


class CarriedBudget(Carried):
    """What a model carries while a budget is open on it, which is no region."""

    statistics = None
    kept = ""


@dataclass(slots=True)
class ModuleRegion:
    """A region attached to one module, by a plan or otherwise."""

    options: RegionOptions
    statistics: Statistics
    is_planned: bool = False
    kept: str = ""

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the module's forward as a region."""
        return run_region(function, args, kwargs, self.options, self.statistics)


def put_region(module: Module, options: RegionOptions, name: str = "") -> Statistics:
    """Attach a region to one module and return its counters, labelled `name`."""
    region = ModuleRegion(options, Statistics(name))
    put(module, region, name)
    return region.statistics


def put(module: Module, carried: Carried, name: str) -> None:
    """Attach an object, such as a region, to a module, replacing any attached before.

    Raises:
        SelectionError: If a subclass cannot override the module's forward.
    """
    check_can_carry(name, module)
    if not has_region(module):
        module.__class__ = _class_with_region(type(module))
    replaced = module.__dict__.get("forward")
    if replaced is not None and not _wraps(replaced, type(module).forward):
        module.__dict__[_REPLACED] = module.__dict__.pop("forward")
    module.__dict__[_KEY] = carried


def _wraps(function: Any, inner: Any) -> bool:
    """Return whether a forward set on an instance calls the generated class's.

    It does if it was made of `module.forward` while the module carried something, as
    accelerate makes it, and was left there.
    """

    def is_inner(one: Any) -> bool:
        return getattr(one, "__func__", one) is inner

    return function is not None and is_inner(inspect.unwrap(function, stop=is_inner))


@contextmanager
def without_wrapper(module: Module) -> Iterator[None]:
    """Let a call of a module skip what was put around its forward since it carries."""
    forward = module.__dict__.get("forward")
    if not has_region(module) or not _wraps(forward, type(module).forward):
        yield
        return
    del module.__dict__["forward"]
    try:
        yield
    finally:
        module.__dict__["forward"] = forward


def carried_by(module: Module) -> Carried | None:
    """Return the region or other object attached to a module, or `None`."""
    carried: Carried | None = module.__dict__.get(_KEY)
    return carried


def remove_region(module: Module) -> None:
    """Remove the region or other object attached to a module, if there is one."""
    module.__dict__.pop(_KEY, None)
    replaced = module.__dict__.pop(_REPLACED, None)
    if replaced is not None:
        # Unless other code has replaced the forward again.
        module.__dict__.setdefault("forward", replaced)
    # FSDP2 may have subclassed the class since. Then it stays, and its forward finds no
    # region and runs the module's own.
    plain = vars(type(module)).get("_membudget_plain_class")
    if plain is not None:
        module.__class__ = plain


def has_region(module: Module) -> bool:
    """Return whether a module has a region or begins, ends or encloses a span."""
    return _KEY in module.__dict__


def statistics_of(module: Module) -> Statistics | None:
    """Return the counters of a module's region; `None` if there is no region."""
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

    # Trainers ask for the signature, to choose what a batch gives to the model.
    @functools.wraps(plain.forward)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, made):  # What wraps this forward outlives the region.
            return plain.forward(self, *args, **kwargs)
        carried: Carried | None = self.__dict__.get(_KEY)
        function = self.__dict__.get(_REPLACED) or super(made, self).forward
        if carried is None:
            return function(*args, **kwargs)
        if is_compiling():  # Which could not break the graph below, in a `try`.
            return carried.run(function, args, kwargs)
        try:
            return carried.run(function, args, kwargs)
        except Exception as error:
            if carried.kept:
                note_shortage(error, carried.kept)
            raise

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
    """Remove the region and its generated class from a result of `__reduce_ex__`."""
    parts = list(reduced)
    if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle rejects `__newobj__` for an object of another class than it names.
        parts[:2] = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
    parts[1] = tuple(plain if item is made else item for item in parts[1])
    if len(parts) > 2 and isinstance(parts[2], dict):
        names = {_REPLACED: "forward"}
        parts[2] = {names.get(k, k): v for k, v in parts[2].items() if k != _KEY}
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
    else:
        return
    raise SelectionError(f"module {name!r} cannot carry a region: {why}")
