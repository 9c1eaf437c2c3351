"""Find the globals and attributes through which code and modules reference objects.

*Slots* are the places that hold references: globals that code names, and attributes of
modules. Their names are cached per code object, class and module; the values, which may
be rebound, are looked up by every `reach`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Module

# Types whose values reference no user state; so frequent that they are skipped first.
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
    """Return whether a module is part of torch, NumPy, membudget or Python itself."""
    root = (module_name or "").partition(".")[0]
    return root in {"torch", "membudget", "numpy"} or root in _STANDARD


# Globals that code refers to, each as namespace and key.
Slots = list[tuple[dict[str, Any], str]]
_CODE_SLOTS: dict[int, tuple[types.CodeType, Slots]] = {}


def global_slots(function: types.FunctionType) -> Slots:
    """Return the global variables that a function's code refers to."""
    code = function.__code__
    known = _CODE_SLOTS.get(id(code))
    if known is None:
        # Keep the code object alive, so that its `id` is not reused.
        known = _CODE_SLOTS[id(code)] = (code, list(_named_globals(function)))
    return known[1]


def reaches_nothing(function: types.FunctionType) -> bool:
    """Return whether a function's code can name nothing but its arguments."""
    if function.__defaults__ or function.__kwdefaults__ or global_slots(function):
        return False
    for cell in function.__closure__ or ():
        try:
            if type(cell.cell_contents) not in INERT:
                return False
        except ValueError:  # The cell is still empty.
            continue
    return True


def _named_globals(
    function: types.FunctionType,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield globals that user code refers to, except plain values and library code."""
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


@functools.cache
def class_slots(kind: type) -> tuple[Slots, bool]:
    """Return the globals that a class's methods refer to, and whether a user wrote it.

    Methods of library classes are skipped, which refer to no user state.
    """
    slots: Slots = []
    for base in kind.__mro__:
        if is_library(base.__module__):
            continue
        for value in list(vars(base).values()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                slots.extend(global_slots(function))
    return slots, not is_library(kind.__module__)


def attribute_names(module: Module, attributes: dict[str, Any]) -> list[str]:
    """Return names of a module's attributes that may hold tensors or other objects.

    The result is cached until the module's number of attributes changes. The result
    includes attributes that are `None`, because these may be set to a tensor later.
    """
    # Not a WeakKeyDictionary, which takes 0.6 µs to look up a module.
    number = id(module)
    known = _ATTRIBUTES.get(number)
    if known is not None and known[0] == len(attributes):
        return known[1]
    names = [
        key
        for key, item in attributes.items()
        if key not in _MODULE_INTERNALS and (item is None or type(item) not in INERT)
    ]
    forget = _ATTRIBUTES.pop  # At interpreter exit the global name may be gone.
    death = ref(module, lambda _: forget(number, None))
    _ATTRIBUTES[number] = (len(attributes), names, death)
    return names


_MODULE_INTERNALS = frozenset(Module().__dict__)

# By `id`; an entry is deleted when its module dies.
_ATTRIBUTES: dict[int, tuple[int, list[str], ReferenceType[Module]]] = {}
