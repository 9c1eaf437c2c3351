"""Describe objects, and the code that they run, in the same words in every process.

A description names classes, numbers, texts, and for each tensor its shape, strides,
dtype, device and storage. It follows code: the functions of each class, and what these
name in turn, such as a helper function or a number at the top of a file. Code counts as
it was compiled, so that a file edited since it was imported makes no difference, and
code typed into a notebook can be described; `code` has the details.

Not described are the contents of tensors, objects of the standard library, of torch
(except modules) and of NumPy, and what lies below `MAX_OBJECTS` nested plain objects.
"""

from __future__ import annotations

import argparse
import enum
import functools
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import (
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Module

from membudget.state.code import (
    IndescribableError,
    Parts,
    attributes_of,
    class_parts,
    code_parts,
    flat,
    function_parts,
    name_of,
)
from membudget.state.identity import is_leaf
from membudget.state.packages import is_built_in, root_of
from membudget.state.walk import MAX_OBJECTS, MAX_VALUES

MOST_OBJECTS = 200_000
"""A description of more objects takes longer than what it might save."""

_LEAST_ADDRESS = 1 << 40
"""A larger integer is an address, a hash or a seed, and another one in each process."""

_PLAIN = (int, float, complex, str, bytes, type(None), type(...))
_SHOWN = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(enum.Enum, range, slice),
)
_TRANSPARENT = (UserDict, UserList, SimpleNamespace, argparse.Namespace)
_WRAPPERS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
    property: ("fget", "fset"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    type(cache(len)): ("__wrapped__",),
}
_TABLES = {key for key, value in vars(Module()).items() if isinstance(value, dict)}
_HOOKS = _TABLES - {"_parameters", "_buffers", "_modules"}


def describe(root: Any) -> Iterator[str]:
    """Yield the description of an object, line by line.

    Raises:
        IndescribableError: If the object leads to compiled code, to modules that carry
            regions, or to too many other objects.

    Example:
        >>> list(describe([1, None, "a"]))
        ['list 3 of 3', 'int 1', 'NoneType None', "str 'a'"]
    """
    pending = [(root, 0)]
    seen: dict[int, tuple[int, int, Any]] = {}
    visited = 0
    while pending:
        visited += 1
        if visited > MOST_OBJECTS:
            raise IndescribableError(f"it leads to more than {MOST_OBJECTS:,} objects")
        value, depth = pending.pop()
        kind = type(value)
        if issubclass(kind, _PLAIN) and not issubclass(kind, enum.Enum):
            yield f"{kind.__qualname__} {_plain(value)}"
            continue
        number, least, _ = seen.get(id(value), (len(seen), MAX_OBJECTS + 1, None))
        if depth >= least:
            yield f"object {number} again"
            continue
        # Keeping the object alive keeps its id from being reused.
        seen[id(value)] = number, depth, value
        parts_of = next(parts for of, parts in _KINDS if issubclass(kind, of))
        text, parts = parts_of(value)
        if parts_of is _object:
            depth += 1
            parts = parts if depth <= MAX_OBJECTS else []
        elif parts_of is _module:
            depth = 0
        yield f"{text} of {len(parts)}"
        pending.extend((part, depth) for part in reversed(parts))


def _plain(value: Any) -> str:
    is_address = isinstance(value, int) and abs(value) >= _LEAST_ADDRESS
    return "(an address)" if is_address else repr(value)


def _tensor(tensor: Tensor) -> Parts:
    parts: list[Any] = [type(tensor)]
    place: tuple[Any, ...] = ()
    try:
        place = tensor.stride(), tensor.storage_offset()
        parts.append(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # Sparse or nested.
        pass
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)
    facts = tensor.dtype, tensor.layout, tensor.device, shape, place
    hooks = getattr(tensor, "_backward_hooks", None) or {}
    parts += [*hooks.values(), *attributes_of(tensor)]
    return f"tensor {facts} {tensor.requires_grad} {is_leaf(tensor)}", parts


def _storage(storage: UntypedStorage) -> Parts:
    return f"storage {storage.nbytes()}", []


def _module(module: Module) -> Parts:
    attributes = dict(sorted(vars(module).items()))
    is_compiled = attributes.get("_compiled_call_impl") is not None
    if is_compiled or _is_compiled(module):
        raise IndescribableError(f"{type(module).__name__} is compiled")
    if any(root_of(type(value)) == "membudget" for value in attributes.values()):
        raise IndescribableError(f"{type(module).__name__} carries a region")
    for name in _HOOKS & attributes.keys():
        # Keyed by numbers that are counted in the process.
        attributes[name] = list(attributes[name].values())
    return "module", [type(module), *flat(attributes.items())]


def _is_compiled(value: Any) -> bool:
    """Return whether torch runs an object, but not by the Python code that it has."""
    is_script = isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction)
    return is_script or type(value).__module__.startswith("torch._dynamo.")


def _file(module: ModuleType) -> Parts:
    return f"file {vars(module).get('__name__')}", []


def _wrapper(value: Any) -> Parts:
    names = next(names for kind, names in _WRAPPERS.items() if isinstance(value, kind))
    return name_of(type(value)), [getattr(value, name) for name in names]


def _mapping(items: dict[Any, Any]) -> Parts:
    # Methods of the built-in class: those of a subclass may have side effects.
    return _contents(items, flat(dict.items(items)))


def _sequence(items: Any) -> Parts:
    base: Any = next(k for k in (list, tuple, deque) if isinstance(items, k))
    return _contents(items, base.__iter__(items))


def _contents(items: Any, parts: Iterable[Any]) -> Parts:
    if len(items) > MAX_VALUES:
        parts = (part for part in parts if not isinstance(part, _PLAIN))
    return f"{type(items).__qualname__} {len(items)}", [*parts, *attributes_of(items)]


def _set(items: set[Any]) -> Parts:
    # Sorted: the order of texts in a set is another one in each process.
    shown = sorted(map(_shown, items)) if len(items) <= MAX_VALUES else []
    return f"{type(items).__qualname__} {len(items)} {shown}", []


def _object(value: Any) -> Parts:
    kind = type(value)
    if _is_compiled(value):
        raise IndescribableError(f"{kind.__qualname__} is compiled")
    is_opaque = is_built_in(root_of(kind)) and not isinstance(value, _TRANSPARENT)
    if is_opaque or isinstance(value, enum.Enum):
        return f"{name_of(kind)} {_shown(value)}", []
    return name_of(kind), [kind, *attributes_of(value)]


def _shown(value: Any) -> str:
    """Return an object in words that hold no address; its name, if it has one."""
    is_number = root_of(type(value)) == "numpy" and getattr(value, "shape", None) == ()
    if is_number or isinstance(value, _SHOWN + _PLAIN):
        return repr(value)
    return " ".join(
        str(getattr(value, name, ""))
        for name in ("__module__", "__qualname__", "__name__", "dtype", "shape")
    )


_KINDS: tuple[tuple[Any, Callable[[Any], Parts]], ...] = (
    (Tensor, _tensor),
    (UntypedStorage, _storage),
    (Module, _module),
    (type, class_parts),
    (CodeType, code_parts),
    (FunctionType, function_parts),
    (ModuleType, _file),
    (tuple(_WRAPPERS), _wrapper),
    (dict, _mapping),
    ((list, tuple, deque), _sequence),
    ((set, frozenset), _set),
    (object, _object),
)
