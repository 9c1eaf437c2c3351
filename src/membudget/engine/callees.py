"""Compute the signatures of calls.

A *signature* groups calls to a function that are expected to behave alike. A signature
combines the function, the modules that it references or receives, their training flags,
the state of autocast, shapes and dtypes of tensor arguments, and Boolean and string
arguments. Numeric arguments are excluded, because a function that takes the step number
would otherwise have a new signature in every step. Functions and modules are identified
by `id`, so a stored signature must be dropped as soon as one of these objects dies.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from membudget.state.autocast import autocast_state

Signature = tuple[Any, ...]

_MOST_ENTRIES = 256  # In a key, before closures and containers are cut off.
_MOST_ITEMS = 64  # Per container.


class _Entries(list[Any]):
    """The entries of a signature.

    Attributes:
        entered: Identities of the functions whose closures are in it: decorators let
            functions close over each other.
    """

    entered: frozenset[int] = frozenset()


def signature_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Signature, list[Any], int]:
    """Return the signature of a call, in less than a microsecond.

    Also return the objects that the signature identifies by `id`, and how many of these
    objects belong to the function itself rather than to its arguments.
    """
    key = _Entries([autocast_state()])
    parts: list[Any] = []
    # The common cases, functions and tensors, are inlined for speed.
    if type(function) is types.FunctionType:
        _describe_function(function, key, parts)
    else:
        _describe_callee(function, key, parts)
    held = len(parts)
    for value in args:
        if type(value) is Tensor:
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


def _describe(value: Any, key: _Entries, parts: list[Any]) -> None:
    kind = type(value)
    (_DESCRIBERS.get(kind) or _describer_of(kind))(value, key, parts)


def _describe_callee(value: Any, key: _Entries, parts: list[Any]) -> None:
    """Add a callee to a signature; identify user-defined callable objects by `id`."""
    kind = type(value)
    describe = _DESCRIBERS.get(kind) or _describer_of(kind)
    if describe is _describe_kind:
        describe = _describe_identity
    describe(value, key, parts)


def _describe_identity(value: Any, key: _Entries, parts: list[Any]) -> None:
    try:
        ref(value)
    except TypeError:  # A class with slots.
        key.append(type(value))
        return
    parts.append(value)
    key.append(id(value))


def _describe_tensor(value: Any, key: _Entries, parts: list[Any]) -> None:
    key += (value.shape, value.dtype)


def _describe_value(value: Any, key: _Entries, parts: list[Any]) -> None:
    key.append(value)


def _describe_kind(value: Any, key: _Entries, parts: list[Any]) -> None:
    key.append(type(value))


def _describe_module(value: Any, key: _Entries, parts: list[Any]) -> None:
    parts.append(value)
    key += (id(value), value.training)


def _describe_function(value: Any, key: _Entries, parts: list[Any]) -> None:
    # By code object: a lambda in a loop is a new function object in each iteration.
    code = value.__code__
    parts.append(code)
    key.append(id(code))
    closure = value.__closure__
    if closure is None or id(value) in key.entered or len(key) > _MOST_ENTRIES:
        return
    key.entered |= {id(value)}
    for cell in closure:
        try:
            content = cell.cell_contents
        except ValueError:  # The cell is still empty.
            continue
        kind = type(content)
        (_DESCRIBERS.get(kind) or _describer_of(kind))(content, key, parts)


def _describe_builtin(value: Any, key: _Entries, parts: list[Any]) -> None:
    key.append(type(value.__self__))
    key.append(value.__name__)


def _describe_method(value: Any, key: _Entries, parts: list[Any]) -> None:
    _describe_callee(value.__self__, key, parts)
    _describe_callee(value.__func__, key, parts)


def _describe_partial(value: Any, key: _Entries, parts: list[Any]) -> None:
    _describe_callee(value.func, key, parts)
    for item in (*value.args, *value.keywords.values()):
        _describe(item, key, parts)


def _describe_items(value: Any, key: _Entries, parts: list[Any]) -> None:
    """Add a container's modules to a call signature; other items change too often."""
    if len(key) > _MOST_ENTRIES:
        return
    key.append(type(value))
    for item in islice(value, _MOST_ITEMS):
        kind = type(item)
        describe = _DESCRIBERS.get(kind) or _describer_of(kind)
        if describe in _OF_CONTENT:
            describe(item, key, parts)


def _describe_mapping(value: Any, key: _Entries, parts: list[Any]) -> None:
    _describe_items(value.values(), key, parts)


Describer = Callable[[Any, _Entries, list[Any]], None]

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
