"""Find everything that a region can read besides its arguments.

A function reaches tensors, modules and random generators through its closure, its
defaults, the globals that its code refers to, the object it is bound to, and all
objects that these reference in turn. `reach` walks this object graph before every
forward, so it must be fast: the names of globals are cached per code object and class,
and module attributes that cannot reference a tensor are skipped.

The walk descends into containers, and into plain objects to a depth of `MAX_DEPTH`. It
may find tensors that the function never reads, which does no harm: a change of a tensor
is an error only if a recompute reads it (see `comparison`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from membudget._torch import NormalizationWithStatistics
from membudget.engine.families import (
    INERT,
    Opaque,
    Scripted,
    Uninitialised,
    family_of,
)
from membudget.engine.native import RERUN
from membudget.engine.slots import (
    MAX_DEPTH,
    Slots,
    attribute_names,
    attributes_of,
    class_slots,
    closed_over,
    global_slots,
    reaches_nothing,
)
from membudget.text import dotted

_MAX_ITEMS = 4096  # A longer container is taken for data, and skipped.


class Reached:
    """The objects that a region's function can reach.

    A tensor or a module is listed once for each name bound to it, all else once.

    Attributes:
        tensors: Parameters, buffers, attributes, closure variables.
        buffers: What a forward may update as state: buffers and attributes of modules.
        modules: All modules found.
        stateful_modules: Modules with code or hooks of users, which set attributes.
        writes_statistics: Whether a normalisation layer in training mode was found.
        runs_torchscript: Whether traced or scripted code was found.
        is_lazy: Whether a lazy module with uninitialised parameters was found.
        is_cut: Whether objects were found too deep to be looked into.
        silent: Ids of the buffers that kernels write to without a version bump.
        generators: Random generators of torch, Python and NumPy created by user code.
        containers: Containers with the ids of their items, or of a dict's keys.
        objects: The plain objects whose attributes were looked at.
        attributes: Dicts of modules, with the keys that were looked at.
        functions: The functions whose closures and defaults were looked at.
        slots: The globals that were looked at.
        names: Names of tensors and containers by `id`, recorded only on request.
        module_names: Paths of modules by `id`, recorded only on request.
    """

    __slots__ = (
        *("_seen", "attributes", "buffers", "containers", "functions", "generators"),
        *("is_cut", "is_lazy", "module_names", "modules", "names", "objects"),
        *("runs_torchscript", "silent", "slots", "stateful_modules", "tensors"),
        "writes_statistics",
    )

    def __init__(self, names: bool = False):
        """Create an empty result; object names are recorded only if `names` is set."""
        self.writes_statistics = self.runs_torchscript = False
        self.is_lazy = self.is_cut = False
        self.tensors: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.silent: set[int] = set()
        self.modules: list[Module] = []
        self.stateful_modules: list[Module] = []
        self.generators: list[Any] = []
        self.containers: list[tuple[Any, list[int]]] = []
        self.objects: list[Any] = []
        self.attributes: list[tuple[dict[str, Any], list[str]]] = []
        self.functions: list[types.FunctionType] = []
        self.slots: Slots = []
        self.names: dict[int, str] | None = {} if names else None
        self.module_names: dict[int, str] = {}
        self._seen: set[int] = set()

    def holds_state(self) -> bool:
        """Return whether any tensor, module or container was found."""
        return bool(self.tensors or self.modules or self.containers)

    def needs_repair(self) -> bool:
        """Return whether a rerun would repeat side effects that must be undone."""
        is_stateful = self.writes_statistics or self.runs_torchscript or self.is_lazy
        return is_stateful or bool(self.generators)

    def visit(self, value: Any, name: str = "", depth: int = 0) -> None:
        """Visit a value and all objects it references."""
        kind = type(value)
        if kind in INERT:
            return
        visitor = VISITORS.get(kind) or _visitor_of(kind)
        if id(value) in self._seen and visitor is not Reached._tensor:
            if visitor is Reached._module:
                self.modules.append(value)
            return
        self._seen.add(id(value))
        visitor(self, value, name, depth)

    def _note(self, value: Any, name: str) -> None:
        if self.names is not None:
            self.names.setdefault(id(value), name)

    def _tensor(self, value: Tensor, name: str, depth: int) -> None:
        self.tensors.append(value)
        self._note(value, name)

    def _uninitialised(self, value: Tensor, name: str, depth: int) -> None:
        self.is_lazy = True

    def _generator(self, value: Any, name: str, depth: int) -> None:
        self.generators.append(value)

    def _torchscript(self, value: Any, name: str, depth: int) -> None:
        """Collect a scripted module's tensors; other TorchScript objects are opaque."""
        self.runs_torchscript = True
        if isinstance(value, torch.jit.ScriptModule):
            buffers = list(value.buffers())
            self.buffers += buffers
            self.silent.update(map(id, buffers))
            for key, tensor in (*value.named_parameters(), *value.named_buffers()):
                self.visit(tensor, dotted(name, key), depth)

    def _container(self, value: Any, name: str, depth: int) -> None:
        if len(value) > _MAX_ITEMS:
            return
        self.containers.append((value, list(map(id, value))))
        self._note(value, name)
        is_dict = isinstance(value, dict)
        if INERT.issuperset(map(type, value.values() if is_dict else value)):
            return
        pairs = list(value.items()) if is_dict else enumerate(value)
        for key, item in pairs:
            if type(item) not in INERT:
                inner = f"{name}[{key!r}]" if self.names is not None else ""
                self.visit(item, inner, depth)

    def _object(self, value: Any, name: str, depth: int) -> None:
        if depth >= MAX_DEPTH:
            self.is_cut = True
            return
        self._class(type(value))
        self.objects.append(value)
        for key, item in list(attributes_of(value).items()):
            if type(item) not in INERT:
                self.visit(item, f"{name}.{key}", depth + 1)

    def _method(self, value: types.MethodType, name: str, depth: int) -> None:
        self.visit(value.__self__, name, depth)
        self.visit(value.__func__, name, depth)

    def _partial(self, value: functools.partial[Any], name: str, depth: int) -> None:
        self.visit(value.func, name, depth)
        self._container(value.args, "argument", depth)
        self._container(value.keywords, "argument", depth)

    def _function(self, value: types.FunctionType, name: str, depth: int) -> None:
        self.functions.append(value)
        for cell_name, content in closed_over(value).items():
            if type(content) not in INERT:
                self.visit(content, cell_name, depth)
        if value.__defaults__ or value.__kwdefaults__:
            self.visit(value.__defaults__, f"{value.__name__}'s default", depth)
            self.visit(value.__kwdefaults__, f"{value.__name__}'s default", depth)
        slots = global_slots(value)
        self.slots += slots
        for namespace, key, inner in slots:
            self.visit(namespace.get(key), key, depth + inner)

    def _skip(self, value: Any, name: str, depth: int) -> None:
        """Skip an instance of a library class, which references no user state."""

    def _class(self, kind: type) -> bool:
        """Visit the globals that a class refers to; return whether a user wrote it."""
        slots, is_by_user = class_slots(kind)
        if slots and id(kind) not in self._seen:
            self._seen.add(id(kind))
            self.slots += slots
            for namespace, key, depth in slots:
                self.visit(namespace.get(key), key, depth)
        return is_by_user

    def _note_buffers(self, value: Module) -> None:
        held = value.__dict__["_buffers"].values()
        buffers = [b for b in held if b is not None and not is_lazy(b)]
        self.buffers += buffers
        if isinstance(value, NormalizationWithStatistics):
            self.silent.update(map(id, buffers))
            self.writes_statistics |= value.training

    def _module(self, value: Module, name: str, depth: int) -> None:
        if RERUN and self.names is None:
            RERUN[0].walk(self, value, depth)
        else:
            self._walk(value, name, depth)

    def _walk(self, value: Module, name: str, depth: int) -> None:
        self.modules.append(value)
        if self._class(type(value)) or value._forward_pre_hooks:
            self.stateful_modules.append(value)
        if self.names is not None:
            self.module_names[id(value)] = name
        attributes = value.__dict__
        held = [attributes[key] for key in ("_parameters", "_buffers", "_modules")]
        for names in filter(None, held):
            self._named(names, name, depth)
        if attributes["_buffers"]:
            self._note_buffers(value)
        keys = attribute_names(value, attributes)
        if depth < MAX_DEPTH:
            self.attributes.append((attributes, keys))
        for key in keys:
            item = attributes.get(key)
            # A tensor with a history is a stored activation, not state.
            if isinstance(item, Tensor) and item.grad_fn is None:
                self.buffers.append(item)
            if depth < MAX_DEPTH and type(item) not in INERT:
                inner = dotted(name, key) if self.names is not None else ""
                self.visit(item, inner, depth + 1)

    def _named(self, held: dict[str, Any], name: str, depth: int) -> None:
        for key, item in held.items():
            if self.names is not None:
                self.visit(item, dotted(name, key), depth)
            elif type(item) is Parameter:  # As a visit does, in a tenth of its time.
                self.tensors.append(item)
            elif item is not None:
                self.visit(item, "", depth)


Visitor = Callable[[Reached, Any, str, int], None]

_BY_FAMILY: dict[type, Visitor] = {
    Tensor: Reached._tensor,
    Uninitialised: Reached._uninitialised,
    Module: Reached._module,
    Scripted: Reached._torchscript,
    torch.Generator: Reached._generator,
    list: Reached._container,
    functools.partial: Reached._partial,
    types.FunctionType: Reached._function,
    types.MethodType: Reached._method,
    object: Reached._object,
    Opaque: Reached._skip,
}
VISITORS: dict[type, Visitor] = {}


def _visitor_of(kind: type) -> Visitor:
    """Select and cache the method that visits instances of a class."""
    visitor = VISITORS[kind] = _BY_FAMILY[family_of(kind)]
    return visitor


# Shared by the functions that read nothing but tensor arguments.
NOTHING = Reached()


def reach(function: Any, others: Sequence[Any] = (), names: bool = False) -> Reached:
    """Find every object that `function` can read besides its tensor arguments.

    Args:
        function: The region's function.
        others: Arguments that are neither tensors nor containers, such as modules.
        names: Whether to record object names, which only error messages need.

    Returns:
        All tensors, modules, containers and generators that were found.
    """
    is_plain = type(function) is types.FunctionType and not (others or names)
    if is_plain and reaches_nothing(function):  # Spares it 1 µs.
        return NOTHING
    reached = Reached(names)
    reached.visit(function, "")
    for other in others:
        reached.visit(other, "argument")
    return reached
