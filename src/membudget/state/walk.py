"""What a step can change: everything that the audited objects hold, each once, by name.

The walk goes through modules, containers and plain objects, and gives

* every tensor: parameters, buffers, and tensors held as attributes or in containers;
* every private random generator;
* every Python value that can be compared (numbers, strings, lengths of containers);
* every holder, a dict, list, set or the attributes of an object, which is what has to
  be put back for the objects to be as they were.

Names are those of `named_parameters()` and `named_buffers()` for what modules register,
and otherwise the expression that a user would write: `batch['labels']`, `h.0.cache[2]`.

Not entered: objects of the standard library, of torch (modules excepted), of NumPy and
of membudget itself, and what lies more than `MAX_OBJECTS` plain objects below a module,
so that a module which knows its trainer does not drag the data set in.
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
"""How many plain objects below a module, a batch or an output are entered."""

MAX_VALUES = 1000
"""Of a container with more items than this, Python values are not compared."""

_SIMPLE = (int, float, complex, str, bytes, type(None))
_OPAQUE = (frozenset(sys.stdlib_module_names) | {"torch", "numpy", "membudget"}) - {
    "__main__"
}
_TRANSPARENT = (UserDict, UserList, SimpleNamespace)
# What a plain `Module()` has: hooks and flags of torch, not state of the model.
_OF_TORCH = frozenset(vars(Module())) - {"training"}


@dataclass
class Found:
    """What a walk found.

    Attributes:
        tensors: Each tensor with its kind, by name.
        streams: Each private random stream, by name.
        values: Each Python value that can be compared, by name.
        holders: Each mutable holder, outermost first.
    """

    tensors: dict[str, tuple[TensorKind, Tensor]] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """One object to visit: its name, what a tensor there is, and how deep it lies."""

    value: Any
    name: str
    kind: TensorKind
    objects: int = 0

    def inside(self, value: Any, suffix: str, *, deeper: bool = False) -> _Place:
        name = self.name + suffix if self.name else suffix.removeprefix(".")
        return _Place(value, name, self.kind, self.objects + deeper)


def walk(roots: Iterable[tuple[str, Any]], kind: TensorKind = "attribute") -> Found:
    """Find what `roots` hold.

    Args:
        roots: The objects to walk, with the name under which each is reported; a
            model's own name is empty, so that its parameters have their usual names.
        kind: What a tensor is that no module holds.

    Returns:
        What was found, in an order that is the same for the same objects.
    """
    found = Found()
    pending = [_Place(value, name, kind) for name, value in reversed([*roots])]
    seen: dict[int, Any] = {}
    while pending:
        place = pending.pop()
        if isinstance(place.value, _SIMPLE):
            found.values[place.name] = place.value
        elif id(place.value) not in seen:
            # The object is kept with its id, so that no later object can have the same.
            seen[id(place.value)] = place.value
            pending.extend(reversed(list(_enter(place, found))))
    return found


def _enter(place: _Place, found: Found) -> Iterator[_Place]:
    """Note what stands at `place`, and yield what it holds."""
    value = place.value
    stream = stream_of(value)
    if stream is not None:
        found.streams[_unique(place.name, found.streams)] = stream
    elif isinstance(value, Tensor):
        found.tensors[_unique(place.name, found.tensors)] = (place.kind, value)
    elif isinstance(value, Module):
        yield from _enter_module(place, found)
    elif isinstance(value, dict | list | tuple | set | frozenset | deque):
        yield from _enter_container(place, found)
        yield from _enter_object(place, found)
    else:
        yield from _enter_object(place, found)


def _unique(name: str, taken: Container[str]) -> str:
    """Return a name that is free: a model may have an attribute called `batch`."""
    while name in taken:
        name += "'"
    return name


def _enter_module(place: _Place, found: Found) -> Iterator[_Place]:
    module: Module = place.value
    attributes = vars(module)
    found.holders.append(attributes)
    # The dicts of parameters, buffers, children and hooks are put back too.
    found.holders.extend(
        attributes[key]
        for key in sorted(_OF_TORCH & attributes.keys())
        if isinstance(attributes[key], dict)
    )
    for key, parameter in module.named_parameters(recurse=False):
        yield dataclasses.replace(place.inside(parameter, f".{key}"), kind="parameter")
    for key, buffer in module.named_buffers(recurse=False):
        yield dataclasses.replace(place.inside(buffer, f".{key}"), kind="buffer")
    for key, value in list(attributes.items()):
        if key not in _OF_TORCH:
            yield dataclasses.replace(place.inside(value, f".{key}"), kind="attribute")
    for key, child in module.named_children():
        yield dataclasses.replace(place.inside(child, f".{key}"), objects=0)


def _enter_container(place: _Place, found: Found) -> Iterator[_Place]:
    container = place.value
    if not isinstance(container, tuple | frozenset):
        found.holders.append(container)
    found.values[f"len({place.name})"] = len(container)
    items: Any = enumerate(container)
    if isinstance(container, dict):
        items = list(container.items())
    elif isinstance(container, set | frozenset):
        # A set has no order that is the same in another run, so nothing in it has a
        # name; that its length is compared has to do.
        return
    for key, item in items:
        if len(container) <= MAX_VALUES or not isinstance(item, _SIMPLE):
            yield place.inside(item, f"[{key!r}]")


def _enter_object(place: _Place, found: Found) -> Iterator[_Place]:
    value = place.value
    if place.objects >= MAX_OBJECTS or _is_opaque(value):
        return
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    if attributes:
        found.holders.append(attributes)
    elif dataclasses.is_dataclass(value):
        attributes = _slots_of(value)
        found.holders.append(value)
    for key, inner in list(attributes.items()):
        yield place.inside(inner, f".{key}", deeper=True)


def _slots_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that has no `__dict__`."""
    names = [field.name for field in dataclasses.fields(record)]
    return {name: getattr(record, name) for name in names if hasattr(record, name)}


def _is_opaque(value: object) -> bool:
    """Tell whether an object holds nothing that a user's step should change."""
    if isinstance(value, type | enum.Enum):
        return True
    # Functions are of a class of the standard library, and so are bound methods.
    root = type(value).__module__.partition(".")[0]
    return root in _OPAQUE and not isinstance(value, _TRANSPARENT)


def copy_of(holder: Holder) -> Any:
    """Return a copy of what a holder holds, not of the things in it.

    The methods of the built-in classes are called, here and in `put_back`, not those
    of a subclass, which may refuse to delete or may act on what is set.
    """
    if isinstance(holder, dict):
        return dict(_kind_of(holder).items(holder))
    if isinstance(holder, set):
        return set(holder)
    if isinstance(holder, list | deque):
        return list(holder)
    return _slots_of(holder)


def put_back(holder: Holder, content: Any) -> None:
    """Make a holder hold `content` again, and nothing else, if it does not."""
    if isinstance(holder, dict):
        if not _same_items(copy_of(holder), content):
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
    """Return the built-in class of which a holder is an instance."""
    kinds = (OrderedDict, dict, set, list, deque)
    return next(kind for kind in kinds if isinstance(holder, kind))


def _same_items(items: dict[Any, Any], content: dict[Any, Any]) -> bool:
    return len(items) == len(content) and all(
        key is old_key and value is old_value
        for (key, value), (old_key, old_value) in zip(
            items.items(), content.items(), strict=True
        )
    )
