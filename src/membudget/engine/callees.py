"""Compute call signatures, and find the objects that code and modules may reference.

A *signature* groups calls to a function that are expected to behave alike. A signature
combines the function, the modules that it references or receives, their training flags,
whether autocast is on, shapes and dtypes of tensor arguments, and Boolean and string
arguments. Numeric arguments are excluded, because a function that takes the step number
would otherwise have a new signature in every step. Functions and modules are identified
by `id`, so a stored signature must be dropped as soon as one of these objects dies.

*Slots* are the globals and attributes through which code and modules may reference
other objects. The names of slots (globals and attributes) are cached per code object,
class and module; the values, which may be rebound, are looked up by every `reach`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from membudget._torch import is_any_autocast_enabled

Signature = tuple[Any, ...]

_MOST_ENTRIES = 256  # In a key, before closures and containers are cut off.
_MOST_ITEMS = 64  # Per container.


def signature_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Signature, list[Any], int]:
    """Return the signature of a call, in less than a microsecond.

    Also return the objects that the signature identifies by `id`, and how many of these
    objects belong to the function itself rather than to its arguments.
    """
    key: list[Any] = [is_any_autocast_enabled()]
    parts: list[Any] = []
    _describe_callee(function, key, parts)
    held = len(parts)
    for value in args:
        if type(value) is Tensor:  # The common case, inlined for speed.
            key += (value.shape, value.dtype)
        else:
            _describe(value, key, parts)
    if kwargs:
        key += kwargs
        for value in kwargs.values():
            _describe(value, key, parts)
    return tuple(key), parts, held


# One describer per kind of value: it appends to `key`, and appends to `parts` every
# object that the key identifies by `id`.


def _describe(value: Any, key: list[Any], parts: list[Any]) -> None:
    kind = type(value)
    (_DESCRIBERS.get(kind) or _describer_of(kind))(value, key, parts)


def _describe_callee(value: Any, key: list[Any], parts: list[Any]) -> None:
    """Add a callee to a signature; identify user-defined callable objects by `id`."""
    kind = type(value)
    describe = _DESCRIBERS.get(kind) or _describer_of(kind)
    if describe is _describe_kind:
        describe = _describe_identity
    describe(value, key, parts)


def _describe_identity(value: Any, key: list[Any], parts: list[Any]) -> None:
    try:
        ref(value)
    except TypeError:  # A class with slots.
        key.append(type(value))
        return
    parts.append(value)
    key.append(id(value))


def _describe_tensor(value: Any, key: list[Any], parts: list[Any]) -> None:
    key += (value.shape, value.dtype)


def _describe_value(value: Any, key: list[Any], parts: list[Any]) -> None:
    key.append(value)


def _describe_kind(value: Any, key: list[Any], parts: list[Any]) -> None:
    key.append(type(value))


def _describe_module(value: Any, key: list[Any], parts: list[Any]) -> None:
    parts.append(value)
    key += (id(value), value.training)


def _describe_function(value: Any, key: list[Any], parts: list[Any]) -> None:
    # By code object: a lambda in a loop is a new function object in each iteration.
    code = value.__code__
    parts.append(code)
    key.append(id(code))
    closure = value.__closure__
    # The limit also ends the recursion into functions that close over each other.
    if closure is None or len(key) > _MOST_ENTRIES:
        return
    for cell in closure:
        try:
            content = cell.cell_contents
        except ValueError:  # The cell is still empty.
            continue
        _describe(content, key, parts)


def _describe_builtin(value: Any, key: list[Any], parts: list[Any]) -> None:
    key.append(type(value.__self__))
    key.append(value.__name__)


def _describe_method(value: Any, key: list[Any], parts: list[Any]) -> None:
    _describe_callee(value.__self__, key, parts)
    _describe_callee(value.__func__, key, parts)


def _describe_partial(value: Any, key: list[Any], parts: list[Any]) -> None:
    _describe_callee(value.func, key, parts)
    for item in (*value.args, *value.keywords.values()):
        _describe(item, key, parts)


def _describe_items(value: Any, key: list[Any], parts: list[Any]) -> None:
    """Add a container's modules to a call signature; other items change too often."""
    if len(key) > _MOST_ENTRIES:
        return
    key.append(type(value))
    for item in islice(value, _MOST_ITEMS):
        kind = type(item)
        describe = _DESCRIBERS.get(kind) or _describer_of(kind)
        if describe in _OF_CONTENT:
            describe(item, key, parts)


def _describe_mapping(value: Any, key: list[Any], parts: list[Any]) -> None:
    _describe_items(value.values(), key, parts)


Describer = Callable[[Any, list[Any], list[Any]], None]

_DESCRIBERS: dict[type, Describer] = {
    Tensor: _describe_tensor,
    Parameter: _describe_tensor,
    **dict.fromkeys((int, float), _describe_kind),
    **dict.fromkeys(
        (bool, str, type(None), torch.dtype, torch.device), _describe_value
    ),
    types.FunctionType: _describe_function,
    types.BuiltinFunctionType: _describe_builtin,
    types.MethodType: _describe_method,
    functools.partial: _describe_partial,
    list: _describe_items,
    tuple: _describe_items,
    dict: _describe_mapping,
}


_OF_CONTENT = (_describe_module, _describe_items, _describe_mapping)


def _describer_of(kind: type) -> Describer:
    """Select and cache the function that adds instances of a class to signatures."""
    describer: Describer = _describe_kind
    if issubclass(kind, Module):
        describer = _describe_module
    elif issubclass(kind, type):
        describer = _describe_identity
    _DESCRIBERS[kind] = describer
    return describer


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
CLASS_SLOTS: dict[type, Slots] = {}
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


def class_slots(kind: type) -> Slots:
    """Return the global variables that methods of a user-defined class refer to."""
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
    """Return names of a module's attributes that may hold tensors or other objects.

    The result is cached until the module's number of attributes changes. The result
    includes attributes that are `None`, because these may be set to a tensor later.
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
