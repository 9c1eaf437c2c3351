"""What a region can read besides its arguments.

A function reaches tensors, modules and random generators through its closure, its
defaults, the globals that its code names, the object it is bound to, and whatever those
hold in turn. `reach` walks that graph before every forward, so it must be fast. Facts
that hold for a code object or a class (the globals it names) are cached, and of a
module's attributes the walk visits only those that can hold something.

The walk descends into containers, and into plain objects to a depth of `_MAX_DEPTH`. It
may find more than the function reads, which is harmless: a change counts only when a
recompute reads it (see `comparison`).
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from membudget._torch import NormalizationWithStatistics, torchscript_types
from membudget.engine.callees import (
    CLASS_SLOTS,
    INERT,
    attribute_names,
    class_slots,
    global_slots,
    is_library,
)
from membudget.text import dotted

_MAX_DEPTH = 3

_MAX_ITEMS = 4096


class Reached:
    """What a walk found, each object once.

    Attributes:
        tensors: All tensors: parameters, buffers, attributes, closed-over ones.
        buffers: The tensors that a forward may advance as state: modules' buffers and
            plain tensor attributes.
        modules: All modules.
        stateful_modules: Modules of the user's own classes, whose forward may bind
            attributes.
        writes_statistics: Whether a normalisation in training was found.
        runs_torchscript: Whether traced or scripted code was found.
        is_lazy: Whether a lazy module was found that has yet to create its parameters.
        silent: The buffers (by `id`) that are written without a version bump.
        generators: Private random generators of torch, Python and NumPy.
        containers: Lists and dicts with their lengths, to find those that grow.
        names: Names of tensors and containers by `id`; only on request.
        module_names: The paths of modules by `id`; only on request.
    """

    # Most walks find nothing of these, so they are class attributes, which cost
    # nothing.
    writes_statistics = runs_torchscript = is_lazy = False

    def __init__(self, names: bool = False):
        """Start with nothing found."""
        self.tensors: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.silent: set[int] = set()
        self.modules: list[Module] = []
        self.stateful_modules: list[Module] = []
        self.generators: list[Any] = []
        self.containers: list[tuple[Any, int]] = []
        self.names: dict[int, str] | None = {} if names else None
        self.module_names: dict[int, str] = {}
        self._seen: set[int] = set()

    def holds_state(self) -> bool:
        """Tell whether anything was found that can change."""
        return bool(self.tensors or self.modules or self.containers)

    def needs_repair(self) -> bool:
        """Tell whether a second run would repeat effects that have to be undone."""
        return (
            self.writes_statistics
            or self.runs_torchscript
            or self.is_lazy
            or bool(self.generators)
        )

    def visit(self, value: Any, name: str = "", depth: int = 0) -> None:
        """Visit a value and everything it holds."""
        kind = type(value)
        if kind in INERT:
            return
        visitor = _VISITORS.get(kind) or _visitor_of(kind)
        if id(value) in self._seen:
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
        """Collect the tensors of a scripted module; other script objects are opaque."""
        self.runs_torchscript = True
        if isinstance(value, torch.jit.ScriptModule):
            buffers = list(value.buffers())
            self.buffers += buffers
            self.silent.update(map(id, buffers))
            for key, tensor in (*value.named_parameters(), *value.named_buffers()):
                self.visit(tensor, dotted(name, key), depth)

    def _sequence(self, value: Any, name: str, depth: int) -> None:
        if len(value) > _MAX_ITEMS:
            return
        self.containers.append((value, len(value)))
        self._note(value, name)
        for i, item in enumerate(value):
            if type(item) not in INERT:
                self.visit(
                    item, f"{name}[{i}]" if self.names is not None else "", depth
                )

    def _mapping(self, value: dict[Any, Any], name: str, depth: int) -> None:
        if len(value) > _MAX_ITEMS:
            return
        self.containers.append((value, len(value)))
        self._note(value, name)
        for key, item in list(value.items()):
            if type(item) not in INERT:
                inner = f"{name}[{key!r}]" if self.names is not None else ""
                self.visit(item, inner, depth)

    def _object(self, value: Any, name: str, depth: int) -> None:
        if depth >= _MAX_DEPTH:
            return
        self.visit_call(type(value))
        for key, item in list(getattr(value, "__dict__", {}).items()):
            if type(item) not in INERT:
                self.visit(item, f"{name}.{key}", depth + 1)

    def _method(self, value: types.MethodType, name: str, depth: int) -> None:
        self.visit(value.__self__, name, depth)
        self.visit(value.__func__, name, depth)

    def _partial(self, value: functools.partial[Any], name: str, depth: int) -> None:
        self.visit(value.func, name, depth)
        self._sequence(value.args, "argument", depth)
        self._mapping(value.keywords, "argument", depth)

    def _function(self, value: types.FunctionType, name: str, depth: int) -> None:
        closure = value.__closure__
        if closure is not None:
            free = value.__code__.co_freevars
            for cell_name, cell in zip(free, closure, strict=True):
                try:
                    content = cell.cell_contents
                except ValueError:  # The cell is still empty.
                    continue
                if type(content) not in INERT:
                    self.visit(content, cell_name, depth)
        if value.__defaults__ or value.__kwdefaults__:
            self.visit(value.__defaults__, f"{value.__name__}'s default", depth)
            self.visit(value.__kwdefaults__, f"{value.__name__}'s default", depth)
        for namespace, key in global_slots(value):
            self.visit(namespace.get(key), key, depth + 1)

    def visit_call(self, kind: type) -> None:
        """Visit the globals that the methods of a user's class name."""
        slots = CLASS_SLOTS.get(kind)
        if slots is None:
            slots = CLASS_SLOTS[kind] = class_slots(kind)
        for namespace, key in slots:
            self.visit(namespace.get(key), key, 1)

    def _note_buffers(self, value: Module) -> None:
        buffers = [
            b
            for b in value.__dict__["_buffers"].values()
            if b is not None and not is_lazy(b)
        ]
        self.buffers += buffers
        if isinstance(value, NormalizationWithStatistics):
            self.silent.update(map(id, buffers))
            self.writes_statistics |= value.training

    def _module(self, value: Module, name: str, depth: int) -> None:
        self.modules.append(value)
        attributes = value.__dict__
        self.visit_call(type(value))
        if not is_library(type(value).__module__):
            self.stateful_modules.append(value)
        naming = self.names is not None
        if naming:
            self.module_names[id(value)] = name
        for held in ("_parameters", "_buffers", "_modules"):
            for key, item in attributes[held].items():
                if item is not None:
                    self.visit(item, dotted(name, key) if naming else "", depth)
        if attributes["_buffers"]:
            self._note_buffers(value)
        for key in attribute_names(value, attributes):
            item = attributes.get(key)
            if isinstance(item, Tensor) and item.grad_fn is None:
                self.buffers.append(item)
            if depth < _MAX_DEPTH:
                self.visit(item, dotted(name, key) if naming else "", depth + 1)


Visitor = Callable[[Reached, Any, str, int], None]

_VISITORS: dict[type, Visitor] = {
    Tensor: Reached._tensor,
    torch.nn.Parameter: Reached._tensor,
    torch.Generator: Reached._generator,
    random.Random: Reached._generator,
    list: Reached._sequence,
    tuple: Reached._sequence,
    set: Reached._sequence,
    dict: Reached._mapping,
    functools.partial: Reached._partial,
    types.FunctionType: Reached._function,
    types.MethodType: Reached._method,
}


def _visitor_of(kind: type) -> Visitor:
    """Choose the visitor for a class, once."""
    visitor: Visitor = Reached._object
    if issubclass(kind, UninitializedParameter | UninitializedBuffer):
        visitor = Reached._uninitialised
    elif issubclass(kind, Tensor):
        visitor = Reached._tensor
    elif issubclass(kind, torchscript_types):
        visitor = Reached._torchscript
    elif issubclass(kind, Module):
        visitor = Reached._module
    elif issubclass(kind, random.Random | torch.Generator) or _is_numpy_generator(kind):
        visitor = Reached._generator
    elif issubclass(kind, list | tuple | set):
        visitor = Reached._sequence
    elif issubclass(kind, dict):
        visitor = Reached._mapping
    elif issubclass(kind, type) or is_library(kind.__module__):
        visitor = _skip
    _VISITORS[kind] = visitor
    return visitor


def _skip(reached: Reached, value: Any, name: str, depth: int) -> None:
    """Skip an instance of a class that holds nothing of the user's."""


def _is_numpy_generator(kind: type) -> bool:
    numpy_random: Any = sys.modules.get("numpy.random")
    return numpy_random is not None and issubclass(
        kind, numpy_random.Generator | numpy_random.RandomState
    )


def reach(function: Any, others: Sequence[Any] = (), names: bool = False) -> Reached:
    """Walk everything that `function` can read besides its tensor arguments.

    Args:
        function: The region's function.
        others: Arguments that are neither tensors nor containers, such as modules.
        names: Whether to record names, for a message; a forward does not.

    Returns:
        What was found.
    """
    reached = Reached(names)
    reached.visit(function, "")
    for other in others:
        reached.visit(other, "argument")
    return reached
