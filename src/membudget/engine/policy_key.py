"""Recognise policy functions that are made anew in each call.

A policy function is often a closure of one call: torch's documentation makes one that
counts matrix products in each forward. Were each of them another policy, every call of
such a region would be verified as a first call.

Two functions count as one policy if they have the same code, and closed over equal
values when they were first used. A function that closes over anything else than values,
modules and functions is equal to itself alone.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn import Module

from membudget._torch import OperatorOverload, OperatorPacket
from membudget.state.code import IndescribableError, content_of

_VALUES = (
    *(int, float, complex, bool, str, bytes, types.NoneType, type),
    *(torch.dtype, torch.device, OperatorOverload, OperatorPacket),
)
_DEEPEST = 6
_UNBOUND = object()  # Like any object, it is not described.

# By function; `None` for what cannot be described. Each function is described once, as
# what it counts changes from call to call.
_DESCRIBED: WeakKeyDictionary[Any, Hashable] = WeakKeyDictionary()


def policy_key(function: Any) -> Hashable:
    """Return what policy functions share that select the same outputs.

    The key holds values alone: modules, and what cannot be described, are referenced
    weakly.
    """
    if isinstance(function, types.MethodType):
        return _weak(function.__self__), function.__func__
    if not isinstance(function, types.FunctionType | functools.partial):
        return _weak(function)
    if function not in _DESCRIBED:
        _DESCRIBED[function] = None
        with suppress(IndescribableError):
            _DESCRIBED[function] = _described(function, 0)
    return _DESCRIBED[function] or ref(function)


def _weak(value: Any) -> Hashable:
    """Return a weak reference, equal to others to the same object, if there can be."""
    try:
        found = ref(value)
        hash(found)
    except TypeError:
        return cast(Hashable, value)
    return found


def _described(value: Any, depth: int) -> Hashable:
    if isinstance(value, _VALUES):
        return type(value), value
    if depth == _DEEPEST:
        raise IndescribableError("it is too deep")
    parts: Any
    if isinstance(value, Module):
        return ref(value)
    if isinstance(value, types.FunctionType):
        defaults = value.__defaults__, value.__kwdefaults__
        cells = tuple(content_of(c, _UNBOUND) for c in value.__closure__ or ())
        return value.__code__, _described((*defaults, cells), depth)
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, set | frozenset):
        return type(value), frozenset(_described(item, depth + 1) for item in value)
    else:
        raise IndescribableError(f"it is of {type(value)}")
    return type(value), *(_described(part, depth + 1) for part in parts)
