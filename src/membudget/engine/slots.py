"""Find the globals and attributes through which code and modules reference objects.

*Slots* are the places that hold references: globals that code names, and attributes of
modules. Their names are cached per code object, class and module; the values, which may
be rebound, are looked up by every `reach`.

Functions of an installed package name each other by the hundred: the configuration of a
transformers block leads through the methods of its class to all of the code that loads
checkpoints. Such functions are not replaced while a program runs, so they are followed
once, and what is cached is where state may lie beyond them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ReferenceType, ref

from torch.nn import Module

from membudget.engine.families import INERT, Opaque, family_of
from membudget.state.code import names_of
from membudget.state.packages import is_installed, is_library

Slots = list[tuple[dict[str, Any], str, int]]
"""Each as namespace, key, and how many functions lie before it, itself included."""

MAX_DEPTH = 3
"""So deep is looked into plain objects, and into the functions that methods call."""

_ANY = 1_000_000

CODE_SLOTS: dict[int, tuple[types.CodeType, Slots]] = {}

# Slots hold the namespaces of code that was run by `exec`; the oldest are dropped.
_MOST_CODES = 4096


def global_slots(function: types.FunctionType) -> Slots:
    """Return the slots that a function's code refers to."""
    code = function.__code__
    known = CODE_SLOTS.get(id(code))
    if known is None:
        # Keep the code object alive, so that its `id` is not reused.
        known = CODE_SLOTS[id(code)] = (code, _followed([function]))
        if len(CODE_SLOTS) > _MOST_CODES:
            del CODE_SLOTS[next(iter(CODE_SLOTS))]
    return known[1]


def reaches_nothing(function: types.FunctionType) -> bool:
    """Return whether a function's code can name nothing but its arguments."""
    if function.__defaults__ or function.__kwdefaults__ or global_slots(function):
        return False
    return all(type(content) in INERT for content in closed_over(function).values())


def closed_over(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables of a function's closure that were assigned."""
    found = {}
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # The cell is still empty.
            continue
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a plain object; none of one with `__slots__`."""
    found: dict[str, Any] = getattr(value, "__dict__", {})
    return found


def _followed(functions: Iterable[types.FunctionType], most: int = _ANY) -> Slots:
    """Return slots of functions, and of the installed functions that those name.

    No slot is returned before which more than `most` functions lie.
    """
    found: dict[tuple[int, str], tuple[dict[str, Any], str, int]] = {}
    reached = [(function, 1) for function in functions]
    seen = {id(function) for function, _ in reached}
    for function, depth in reached:
        is_fixed = is_installed(_file_of(function))
        held = _held(function) if depth > 1 else ()
        for namespace, key in (*_named_globals(function), *held):
            value = namespace[key]
            if not is_fixed or not _is_fixed(value):
                found.setdefault((id(namespace), key), (namespace, key, depth))
            elif type(value) is types.FunctionType and id(value) not in seen:
                if depth == most:
                    continue
                seen.add(id(value))
                reached.append((value, depth + 1))
    return list(found.values())


def _is_fixed(value: Any) -> bool:
    """Return whether what an installed package binds to a name stays as it is."""
    if type(value) is tuple:
        return all(item is None or _is_fixed(item) for item in value)
    if type(value) is types.FunctionType:
        return is_installed(_file_of(value))
    # A `None` may be a place that is filled later.
    kind: Any = type(value)
    return value is not None and family_of(kind) is Opaque


def _file_of(function: types.FunctionType) -> str | None:
    # Not `__module__`, which a wrapper takes over from what it wraps.
    return function.__globals__.get("__name__")


def _held(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what a function closed over, and its defaults, like globals."""
    held = closed_over(function)
    yield from ((held, name) for name in held)
    if function.__defaults__ or function.__kwdefaults__:
        name = f"{function.__name__}'s default"
        both = (
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        )
        yield {name: both}, name


def _named_globals(
    function: types.FunctionType,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield globals that user code refers to, except plain values and library code."""
    if is_library(function.__module__):
        return
    namespace = function.__globals__
    for key in names_of(function.__code__):
        value = namespace.get(key, namespace)
        kind = type(value)
        if value is namespace or (value is not None and kind in INERT):
            continue
        if kind is types.FunctionType and is_library(value.__module__):
            continue
        yield namespace, key


@functools.lru_cache(_MOST_CODES)
def class_slots(kind: type) -> tuple[Slots, bool]:
    """Return the globals that a class's methods refer to, and whether a user wrote it.

    Methods of library classes are skipped, which refer to no user state.
    """
    functions = []
    for base in kind.__mro__:
        if is_library(base.__module__):
            continue
        for value in list(vars(base).values()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                functions.append(function)
    # What loads and saves an object is called by its methods, but not by a forward.
    most = _ANY if issubclass(kind, Module) else MAX_DEPTH
    return _followed(functions, most), not is_library(kind.__module__)


def attribute_names(module: Module, attributes: dict[str, Any]) -> list[str]:
    """Return the names of a module's own attributes, whatever they hold now.

    What holds a number may hold a tensor later. The names are cached until an attribute
    is added or deleted.
    """
    # Not a WeakKeyDictionary, which takes 0.6 µs to look up a module.
    number = id(module)
    known = ATTRIBUTES.get(number)
    everything = [*attributes]
    if known is not None and known[0] == everything:
        return known[1]
    names = [key for key in everything if key not in _MODULE_INTERNALS]
    forget = ATTRIBUTES.pop  # At interpreter exit the global name may be gone.
    death = ref(module, lambda _: forget(number, None))
    ATTRIBUTES[number] = (everything, names, death)
    return names


_MODULE_INTERNALS = frozenset(Module().__dict__)

# All names and a module's own, by `id`; an entry is deleted when its module dies.
ATTRIBUTES: dict[int, tuple[list[str], list[str], ReferenceType[Module]]] = {}
