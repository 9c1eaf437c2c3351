"""What earlier calls of a function showed: most calls then need no verification.

A rerun is exact if the function does the same again and writes no memory behind the
version counters. Neither is assumed: the first call of each *signature* is verified,
and calls number 2, 4, 8, 16, ... after it.

A signature is what is known before a call: the function and the modules that it holds
or is given, their training flags, autocast, the shapes and dtypes of its tensors, and
its flags and strings. No numbers: a function that is given a step's number would never
be known. A *path* is what is known after it: the dtypes and ranks of the saved tensors,
in order. Once a call takes a path that none verified has taken, the next calls are
verified until one has taken it, or `_PATIENCE` of them have not.

All calls before the first backward are first calls. What goes unseen: a function that
begins to be inexact, on a known path, between two calls that are verified.

Functions and modules are known by their `id` and held weakly: when one dies, what is
known of it goes first, before its `id` names another.
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

from membudget._torch import is_any_autocast_enabled
from membudget.engine.compare import Metadata

Key = tuple[Any, ...]
Path = list[Metadata]

_MOST_KEYS = 4096
_MOST_ENTRIES = 256
_MOST_ITEMS = 64
_MOST_PATHS = 1024
_PATIENCE = 256


class Owner:
    """A function with the modules that it holds, whatever it is called with.

    Attributes:
        replays: Whether a rerun of it was found not to be exact, so that from then on
            regions whose engine is `"auto"` replay it.
    """

    __slots__ = ("_refs", "replays")

    def __init__(self, key: Key, parts: list[Any]):
        """Begin with nothing known, until one of `parts` dies."""
        self.replays = False
        self._refs = _held_weakly(parts, _OWNERS, key)


class Calls:
    """The calls of one signature.

    Attributes:
        owner: The function.
        fills_late: Whether an operator was found that fills a tensor only after it has
            saved it (RReLU its noise): a recompute must not stop there.
        path: What the last call on a verified path saved.
        writes_silently: Whether a call wrote a large buffer without its version rising.
    """

    __slots__ = (
        "_awaited",
        "_count",
        "_is_settled",
        "_patience",
        "_refs",
        "_verified",
        "fills_late",
        "owner",
        "path",
        "writes_silently",
    )

    def __init__(self, owner: Owner, key: Key, parts: list[Any]):
        """Begin before the first call."""
        self.owner = owner
        self.path: Path | None = None
        self.writes_silently = self.fills_late = False
        self._refs = _held_weakly(parts, _KNOWN, key)
        self._count = 0
        self._is_settled = False
        self._patience = _PATIENCE
        self._verified: set[int] = set()
        self._awaited: set[int] = set()

    def begin(self) -> bool:
        """Count a call, and tell whether to verify it."""
        self._count = count = self._count + 1
        if self._is_settled:
            return not count & (count - 1)
        self._patience -= 1
        if self._patience < 0:
            self._awaited.clear()
            self._is_settled = True
        return True

    def end(self, path: Path) -> None:
        """Note what a call saved, if that is not `path`."""
        key = _hash_of(path)
        if key in self._verified:
            self.path = path
        elif key not in self._awaited and len(self._awaited) < _MOST_PATHS:
            self._awaited.add(key)
            self._is_settled = False
            self._patience = _PATIENCE

    def verified(self, path: Path) -> None:
        """Note that a call that saved this was recomputed bit for bit."""
        if len(self._verified) >= _MOST_PATHS:
            self._verified.clear()
        key = _hash_of(path)
        self._verified.add(key)
        self._awaited.discard(key)
        self._is_settled = not self._awaited
        if self.path != path:
            self.path = path


def _hash_of(path: Path) -> int:
    """Return what stays the same where only the lengths of dimensions vary.

    A router saves other lengths in each call; that is no other path.
    """
    return hash(tuple([(dtype, len(shape)) for shape, dtype, _, _ in path]))


_KNOWN: dict[Key, Calls] = {}
_OWNERS: dict[Key, Owner] = {}


def calls_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Calls:
    """Return what is known of calls like this one."""
    key: list[Any] = [is_any_autocast_enabled()]
    parts: list[Any] = []
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
    full = tuple(key)
    return _KNOWN.get(full) or _first_calls(full, parts, held)


def forget_calls() -> None:
    """Let the next call of each function be the first one."""
    _KNOWN.clear()
    _OWNERS.clear()


def _first_calls(key: Key, parts: list[Any], held: int) -> Calls:
    # Without parts, the function is one of C++, which the key names.
    owner_key = tuple(map(id, parts[:held])) or key[:3]
    owner = _OWNERS.get(owner_key)
    if owner is None:
        owner = _OWNERS[owner_key] = Owner(owner_key, parts[:held])
    calls = _KNOWN[key] = Calls(owner, key, parts)
    for known in (_KNOWN, _OWNERS):
        if len(known) > _MOST_KEYS:
            known.pop(next(iter(known)), None)
    return calls


def _held_weakly(parts: list[Any], known: dict[Key, Any], key: Key) -> list[Any]:
    """Hold `parts` so that the entry under `key` goes with the first that dies."""
    return [ref(part, lambda _, pop=known.pop: pop(key, None)) for part in parts]


# What a value says of a call: each appends to the key, and to the parts what the key
# names by its `id`.


def _describe(value: Any, key: list[Any], parts: list[Any]) -> None:
    kind = type(value)
    (_DESCRIBERS.get(kind) or _describer_of(kind))(value, key, parts)


def _describe_callee(value: Any, key: list[Any], parts: list[Any]) -> None:
    """Describe what is called: an object of a user's class is known by itself."""
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
    key += (type(value), value)


def _describe_kind(value: Any, key: list[Any], parts: list[Any]) -> None:
    key.append(type(value))


def _describe_module(value: Any, key: list[Any], parts: list[Any]) -> None:
    parts.append(value)
    key += (id(value), value.training)


def _describe_function(value: Any, key: list[Any], parts: list[Any]) -> None:
    code = value.__code__
    parts.append(code)
    key.append(id(code))
    closure = value.__closure__
    if closure is None or len(key) > _MOST_ENTRIES:
        return
    for cell in closure:
        try:
            _describe(cell.cell_contents, key, parts)
        except ValueError:  # It is still empty.
            continue


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
    """Describe the modules alone: a log that grows says nothing of a call."""
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
    """Decide once for each class how its instances are described."""
    describer: Describer = _describe_kind
    if issubclass(kind, Module):
        describer = _describe_module
    elif issubclass(kind, type):
        describer = _describe_identity
    _DESCRIBERS[kind] = describer
    return describer
