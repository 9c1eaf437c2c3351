"""Find, by name, everything that a training step can change.

The walk visits modules, containers and plain objects, and collects all tensors, private
random generators, and comparable Python values: numbers, strings, and lengths of
containers. The walk also collects every mutable *holder* (a dict, list or set, or the
attributes of an object): restoring the holders' contents restores the objects.

Parameters and buffers are named as in `named_parameters()` and `named_buffers()`; other
names are what a user would write: `batch['labels']`, `h.0.cache[2]`.

The walk does not enter objects of the standard library, torch (except modules), NumPy
or membudget. The walk enters at most `MAX_OBJECTS` nested plain objects below a module,
so that a module with a reference to its trainer does not pull in the data set.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

from membudget.state.rng import Stream, stream_of

TensorKind = Literal["parameter", "buffer", "attribute", "output"]
# A dict, list, set or deque, or a dataclass whose fields are slots.
Holder = Any

MAX_OBJECTS = 2
"""Maximum depth of plain objects to enter below a module, a batch or an output."""

MAX_VALUES = 1000
"""Python values in a container with more items than this are not compared."""

SIMPLE = (int, float, complex, str, bytes, type(None))
_OPAQUE = (frozenset(sys.stdlib_module_names) | {"torch", "numpy", "membudget"}) - {
    "__main__"
}
_TRANSPARENT = (UserDict, UserList, SimpleNamespace)
# Attributes of an empty `Module()`: torch's hooks and flags, not the model's state.
OF_TORCH = frozenset(vars(Module())) - {"training"}


@dataclass
class Found:
    """The tensors, random generators, values and containers that a walk found.

    Attributes:
        tensors: Each tensor with its kind, keyed by name.
        streams: Each random generator found, keyed by name.
        values: Each comparable Python value, keyed by name.
        holders: Mutable containers and attribute dicts, outermost first.
    """

    tensors: dict[str, tuple[TensorKind, Tensor]] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Visit:
    """An object to visit; `kind` applies only to tensors."""

    value: Any
    name: str
    kind: TensorKind
    objects: int = 0  # How many plain objects lie between it and a module or root.

    def inside(self, value: Any, suffix: str, *, deeper: bool = False) -> _Visit:
        name = self.name + suffix if self.name else suffix.removeprefix(".")
        return _Visit(value, name, self.kind, self.objects + deeper)


def walk(roots: Iterable[tuple[str, Any]], kind: TensorKind = "attribute") -> Found:
    """Find all tensors, generators, values and holders reachable from `roots`.

    Args:
        roots: Pairs of name and object; pass a model with an empty name, so that
            parameters get their usual names.
        kind: The kind to assign to tensors outside modules.
    """
    found = Found()
    pending = [_Visit(value, name, kind) for name, value in reversed([*roots])]
    seen: dict[int, Any] = {}
    while pending:
        visit = pending.pop()
        if isinstance(visit.value, SIMPLE):
            found.values[visit.name] = visit.value
        elif id(visit.value) not in seen:
            # Keeping the object alive keeps its id from being reused.
            seen[id(visit.value)] = visit.value
            # Reversed, so that the stack yields names in the order of definition.
            pending.extend(reversed(list(_enter(visit, found))))
    return found


def _enter(visit: _Visit, found: Found) -> Iterator[_Visit]:
    """Record the visited object, and yield its contents for later visits."""
    value = visit.value
    stream = stream_of(value)
    if stream is not None:
        found.streams[_unique(visit.name, found.streams)] = stream
    elif isinstance(value, Tensor):
        found.tensors[_unique(visit.name, found.tensors)] = (visit.kind, value)
    elif isinstance(value, Module):
        yield from _enter_module(visit, found)
    elif isinstance(value, dict | list | tuple | set | frozenset | deque):
        yield from _enter_container(visit, found)
        yield from _enter_object(visit, found)
    else:
        yield from _enter_object(visit, found)


def _unique(name: str, taken: Container[str]) -> str:
    """Append apostrophes to a name until it differs from all names in `taken`."""
    while name in taken:
        name += "'"
    return name


def _enter_module(visit: _Visit, found: Found) -> Iterator[_Visit]:
    module: Module = visit.value
    attributes = vars(module)
    found.holders.append(attributes)
    # The dicts of parameters, buffers, children and hooks are restored too.
    found.holders.extend(
        attributes[key]
        for key in sorted(OF_TORCH & attributes.keys())
        if isinstance(attributes[key], dict)
    )
    for key, parameter in module.named_parameters(recurse=False):
        yield dataclasses.replace(visit.inside(parameter, f".{key}"), kind="parameter")
    for key, buffer in module.named_buffers(recurse=False):
        yield dataclasses.replace(visit.inside(buffer, f".{key}"), kind="buffer")
    for key, value in list(attributes.items()):
        if key not in OF_TORCH:
            yield dataclasses.replace(visit.inside(value, f".{key}"), kind="attribute")
    for key, child in module.named_children():
        yield dataclasses.replace(visit.inside(child, f".{key}"), objects=0)


def _enter_container(visit: _Visit, found: Found) -> Iterator[_Visit]:
    container = visit.value
    if not isinstance(container, tuple | frozenset):
        found.holders.append(container)
    found.values[f"len({visit.name})"] = len(container)
    items: Any = enumerate(container)
    if isinstance(container, dict):
        items = list(container.items())
    elif isinstance(container, set | frozenset):
        # The order of a set differs between runs, so its items have no stable name;
        # only its length is compared.
        return
    for key, item in items:
        if len(container) <= MAX_VALUES or not isinstance(item, SIMPLE):
            yield visit.inside(item, f"[{key!r}]")


def _enter_object(visit: _Visit, found: Found) -> Iterator[_Visit]:
    value = visit.value
    if visit.objects >= MAX_OBJECTS or _is_opaque(value):
        return
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    if hasattr(value, "__dict__"):
        found.holders.append(attributes)
    elif dataclasses.is_dataclass(value):
        attributes = _slots_of(value)
        found.holders.append(value)
    for key, inner in list(attributes.items()):
        yield visit.inside(inner, f".{key}", deeper=True)


def _slots_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that has no `__dict__`."""
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _is_opaque(value: object) -> bool:
    """Return whether a walk skips an object's contents, which no step changes."""
    if isinstance(value, type | enum.Enum):
        return True
    # This covers functions and bound methods: their classes are in `builtins`.
    root = type(value).__module__.partition(".")[0]
    return root in _OPAQUE and not isinstance(value, _TRANSPARENT)


def items_of(holder: Holder) -> Any:
    """Return a shallow copy of a container's items or an object's attributes.

    `items_of` and `put_back` call methods of the built-in class, because a subclass may
    forbid deletion or have side effects.
    """
    if isinstance(holder, dict):
        return dict(_kind_of(holder).items(holder))
    if isinstance(holder, set):
        return set(holder)
    if isinstance(holder, list | deque):
        return list(holder)
    return _slots_of(holder)


def put_back(holder: Holder, content: Any) -> None:
    """Replace a container's items or an object's attributes with `content`."""
    if isinstance(holder, dict):
        if not _same_items(items_of(holder), content):
            _kind_of(holder).clear(holder)
            _kind_of(holder).update(holder, content)
    elif isinstance(holder, set | list | deque):
        kind = _kind_of(holder)
        kind.clear(holder)
        (kind.update if isinstance(holder, set) else kind.extend)(holder, content)
    else:
        for key, value in content.items():
            object.__setattr__(holder, key, value)


def _kind_of(holder: Holder) -> Any:
    """Return the built-in class, such as `dict`, that a container is an instance of."""
    kinds = (OrderedDict, dict, set, list, deque)
    return next(kind for kind in kinds if isinstance(holder, kind))


def _same_items(items: dict[Any, Any], content: dict[Any, Any]) -> bool:
    return len(items) == len(content) and all(
        key is old_key and value is old_value
        for (key, value), (old_key, old_value) in zip(
            items.items(), content.items(), strict=True
        )
    )
