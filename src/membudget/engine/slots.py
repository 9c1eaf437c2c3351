"""Slots: the globals and attributes through which code and modules may hold something.

The names are cached per code object, class and module. The values are looked up in
every walk of `reach`, because they may have been rebound.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

# Types whose values hold nothing; so frequent that they are skipped first.
INERT = frozenset(
    (
        *(int, float, bool, complex, str, bytes, type(None), type, range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.layout, types.ModuleType),
        *(types.BuiltinFunctionType, types.MethodWrapperType, type(Tensor.sin)),
    )
)
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}


@functools.cache
def is_library(module_name: str | None) -> bool:
    """Tell whether a module belongs to torch, Python, NumPy or us, not to the user."""
    root = (module_name or "").partition(".")[0]
    return root in {"torch", "membudget", "numpy"} or root in _STANDARD


# A global that code names, as namespace and key. It is looked up in every walk, because
# it may have been rebound.
Slots = list[tuple[dict[str, Any], str]]
CLASS_SLOTS: dict[type, Slots] = {}
_CODE_SLOTS: dict[int, tuple[types.CodeType, Slots]] = {}


def global_slots(function: types.FunctionType) -> Slots:
    """Return the globals that a function names, by its code object."""
    code = function.__code__
    known = _CODE_SLOTS.get(id(code))
    if known is None:
        # Keep the code object alive, so that its `id` is not reused.
        known = _CODE_SLOTS[id(code)] = (code, list(_named_globals(function)))
    return known[1]


def _named_globals(
    function: types.FunctionType,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the globals named by a user's function that can hold something."""
    if is_library(function.__module__):
        return
    namespace = function.__globals__
    for key in _all_names(function.__code__):
        value = namespace.get(key, namespace)
        kind = type(value)
        if value is namespace or (value is not None and kind in INERT):
            continue
        if kind is types.FunctionType and is_library(value.__module__):
            continue
        yield namespace, key


def _all_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _all_names(constant)
    return names


def class_slots(kind: type) -> Slots:
    """Return the globals that the methods of a user's class name."""
    slots: Slots = []
    for base in kind.__mro__:
        if is_library(base.__module__):
            continue
        for value in list(vars(base).values()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                slots.extend(global_slots(function))
    return slots


def attribute_names(module: Module, attributes: dict[str, Any]) -> list[str]:
    """Return the names of a module's own attributes that can hold something.

    The names are cached with the number of attributes, so that a new attribute is
    noticed. An attribute that is `None` now may hold a tensor later, and is included.
    """
    known = _ATTRIBUTES.get(module)
    if known is not None and known[0] == len(attributes):
        return known[1]
    names = [
        key
        for key, item in attributes.items()
        if key not in _MODULE_INTERNALS and (item is None or type(item) not in INERT)
    ]
    _ATTRIBUTES[module] = (len(attributes), names)
    return names


_MODULE_INTERNALS = frozenset(Module().__dict__)

_ATTRIBUTES: WeakKeyDictionary[Module, tuple[int, list[str]]] = WeakKeyDictionary()
