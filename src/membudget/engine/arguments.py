"""Hold a region's arguments so that a recompute gets them unchanged.

Each tensor argument is stored in an object of its own (see `held`). Lists, dicts, sets,
dataclasses and tuples are copied recursively: if the function appends to a list
argument, the recompute still gets the list as it was passed.

Nested tensors need a special rule: torch ties the ragged size of a jagged tensor to the
*object* that holds its offsets, so a tensor with recomputed offsets cannot be combined
with tensors from the forward. A jagged tensor that autograd saves is therefore kept,
unless it shares its offsets with an argument. A strided nested tensor is always kept:
torch does not expose its sizes, so a recomputed one could not be checked.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    tree_iter,
)
from membudget._torch_accelerator import is_on_accelerator
from membudget.engine.held import (
    ArgumentPlace,
    HeldTensor,
    Hooks,
    kind_of,
    nothing_surrounds,
)

Memo = dict[int, Any]


class _HeldContainer:
    """Stores a container argument item by item; rebuilds it on recompute."""

    __slots__ = ("items", "key", "make")

    def __init__(self, key: int, items: Any, make: Callable[[Any], Any]):
        self.key = key
        self.items = items
        self.make = make

    def rebuild(self, memo: Memo) -> Any:
        if self.key not in memo:
            memo[self.key] = self.make([rebuild(item, memo) for item in self.items])
        return memo[self.key]


class _PlainContainer(_HeldContainer):
    """A container argument without tensors, rebuilt only if it was changed."""

    __slots__ = ("names", "original")

    def __init__(self, original: Any, items: list[Any]):
        super().__init__(id(original), items, _maker(original))
        self.names = _names_in(original)
        self.original = original

    def rebuild(self, memo: Memo) -> Any:
        # By identity: `==` on an arbitrary item might run user code.
        before = (*self.names, *self.items)
        now = (*_names_in(self.original), *(i for _, i in _entries(self.original)))
        same = len(now) == len(before) and all(map(is_, now, before))
        return self.original if same else super().rebuild(memo)


def rebuild(value: Any, memo: Memo) -> Any:
    """Rebuild an argument stored as a tensor or container; return others unchanged."""
    if isinstance(value, HeldTensor):
        # A tensor passed twice must be one tensor again: attention asks `query is key`.
        key = id(value)
        if key not in memo:
            memo[key] = value.rebuild()
        return memo[key]
    return value.rebuild(memo) if isinstance(value, _HeldContainer) else value


class HeldArguments:
    """The arguments of one region call, stored for its recomputes.

    Attributes:
        tensors: All tensor arguments, including those inside containers, in order.
        others: Arguments that are neither tensors, containers nor plain values, such as
            modules, generators and functions.
        is_nested: Whether any argument is a container, or any tensor is passed twice.
    """

    __slots__ = (
        *("_alone", "_args", "_kwargs", "_memo"),
        *("is_nested", "others", "tensors"),
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Store the arguments; any active saved-tensor hooks pack the tensors."""
        self.tensors: list[HeldTensor]
        self.others: list[Any] = []
        self.is_nested = False
        self._alone = nothing_surrounds()
        if len(args) == 1 and type(args[0]) is Tensor and not kwargs:
            # A block's usual call; 1 µs cheaper than with the search below.
            held = kind_of(args[0], self._alone)(args[0], FIRST)
            self._args = self.tensors = [held]
            self._kwargs = kwargs
            return
        self.tensors = []
        self._memo: Memo = {}
        hold = self._hold
        self._args = [
            value if type(value) in _LEAVES else hold(value, (None, i))
            for i, value in enumerate(args)
        ]
        self._kwargs = kwargs and {
            name: value if type(value) in _LEAVES else hold(value, (None, name))
            for name, value in kwargs.items()
        }
        self._memo = _DONE

    def rebuild(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments for one recompute."""
        kwargs = self._kwargs
        if not (self.is_nested or kwargs):  # The common case needs no memo.
            return [
                value.rebuild() if isinstance(value, HeldTensor) else value
                for value in self._args
            ], kwargs
        memo: Memo = {}
        args = [rebuild(value, memo) for value in self._args]
        return args, {k: rebuild(v, memo) for k, v in kwargs.items()}

    def begin_check(self) -> None:
        """Fingerprint all tensor arguments before the function runs."""
        for held in self.tensors:
            held.begin_check()

    def end_check(self) -> None:
        """Mark tensor arguments that the function wrote to without a version bump."""
        for held in self.tensors:
            held.end_check()

    def changed(self) -> list[HeldTensor]:
        """Return the tensor arguments that have changed since the region began."""
        return [held for held in self.tensors if held.has_changed()]

    def devices(self) -> list[torch.device]:
        """Return each device of the accelerator that holds a tensor argument."""
        devices = (held.device for held in self.tensors)
        return list(dict.fromkeys(filter(is_on_accelerator, devices)))

    def _hold(self, value: Any, place: ArgumentPlace) -> Any:
        memo = self._memo
        key = id(value)
        if key in memo:
            self.is_nested = True
            return memo[key]
        if isinstance(value, Tensor):
            held = memo[key] = kind_of(value, self._alone)(value, place)
            self.tensors.append(held)
            return held
        if isinstance(value, _CONTAINERS) or _is_record(value):
            self.is_nested = True
            memo[key] = held = self._hold_container(value, place)
            return held
        self.others.append(value)
        return value

    def _hold_container(self, value: Any, place: ArgumentPlace) -> Any:
        # A container may contain itself; the inner reference stands for itself.
        self._memo[id(value)] = value
        items = [
            item if type(item) in _LEAVES else self._hold(item, (place, key))
            for key, item in _entries(value)
        ]
        if any(isinstance(item, HeldTensor | _HeldContainer) for item in items):
            return _HeldContainer(id(value), items, _maker(value))
        # A tuple without tensors cannot change, so it needs no copy.
        return value if isinstance(value, tuple) else _PlainContainer(value, items)


_DONE: Memo = {}  # Nothing more is held after __init__.

FIRST: ArgumentPlace = (None, 0)

_LEAVES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))

_CONTAINERS = (list, tuple, dict, set)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key, item) pairs of a container; error messages show the keys."""
    if isinstance(value, dict):
        yield from value.items()
    elif _is_record(value):
        yield from (
            vars(value).items()
            if hasattr(value, "__dict__")
            else (
                (field.name, getattr(value, field.name))
                for field in dataclasses.fields(value)
            )
        )
    else:
        yield from enumerate(value)


def _names_in(value: Any) -> list[Any]:
    """Return the keys or attributes of a container whose items have names."""
    has_names = isinstance(value, dict) or _is_record(value)
    return [name for name, _ in _entries(value)] if has_names else []


def _maker(value: Any) -> Callable[[Any], Any]:
    """Return a function that rebuilds a container like `value` from a list of items.

    The keys and attributes of a container are copied before the region can change them.
    """
    if isinstance(value, tuple):
        return getattr(value, "_make", type(value))
    if isinstance(value, set):
        return type(value)
    keys = [key for key, _ in _entries(value)]
    empty = copy.copy(value)
    if isinstance(value, list):
        empty.clear()
        return lambda items: _refilled_list(empty, items)
    # The template must not keep the tensors alive.
    _refill(empty, keys, [None] * len(keys))
    return lambda items: _refill(copy.copy(empty), keys, items)


def _refilled_list(empty: list[Any], items: list[Any]) -> list[Any]:
    fresh = copy.copy(empty)
    fresh.extend(items)
    return fresh


def _refill(container: Any, keys: list[Any], items: list[Any]) -> Any:
    """Store items under their keys, even in frozen or fixed-size containers.

    Some containers (Hugging Face model outputs) are both a dict and a dataclass, and
    store each item twice.
    """
    attributes = getattr(container, "__dict__", {})
    for key, item in zip(keys, items, strict=True):
        if isinstance(container, dict):
            dict.__setitem__(container, key, item)
        if not isinstance(container, dict) or key in attributes:
            object.__setattr__(container, key, item)
    return container


def packed_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], hooks: Hooks
) -> HeldArguments:
    """Hold the arguments of a call, whose tensors the given hooks pack."""
    push_saved_tensors_hooks(*hooks)
    try:
        return HeldArguments(args, kwargs)
    finally:
        pop_saved_tensors_hooks()


def must_keep(nested: Tensor, arguments: HeldArguments) -> bool:
    """Return whether a rerun region must keep a nested tensor that autograd saves."""
    return nested.layout is not torch.jagged or has_own_offsets(
        nested, arguments.rebuild()
    )


def has_own_offsets(nested: Tensor, given: Any) -> bool:
    """Return whether a tensor is jagged and no tensor in `given` shares its offsets."""
    offsets = _offsets_of(nested)
    return offsets is not None and not any(
        isinstance(t, Tensor) and _offsets_of(t) is offsets for t in tree_iter(given)
    )


def _offsets_of(tensor: Any) -> Tensor | None:
    """Return the offsets object of a jagged tensor; `None` for any other tensor."""
    if not tensor.is_nested or tensor.layout is not torch.jagged:
        return None
    offsets: Tensor = tensor.offsets()
    return offsets
