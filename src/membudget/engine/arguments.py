"""The arguments of a region, held so that a recompute can have them once more.

A tensor is held detached, so that the region's frame never keeps the graph above it
alive, and through the saved-tensor hooks that surround the region, if there are any:
so an offloader moves a region's inputs, and an outer region drops those of an inner
one. Parameters are held as they are. Lists, dicts, sets, dataclasses and tuples are
copied as deep as they go: what the function appends to a list it was given, the
recompute does not find there.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn import Parameter

from membudget._torch import (
    is_forward_ad_on,
    storage_address,
    top_saved_tensors_hooks,
)

Memo = dict[int, Any]
Place = tuple[Any, Any]


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor's content; -1 where torch keeps none."""
    try:
        return tensor._version
    except RuntimeError:  # An inference tensor tracks no version.
        return -1


def address_of(tensor: Tensor) -> int:
    """Return where the tensor's storage lies; 0 where it has none (a sparse tensor)."""
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


def is_parameter(tensor: Tensor) -> bool:
    """Tell whether `tensor` is a `Parameter`, whose own `isinstance` takes 0.7 µs."""
    return type(tensor) is not Tensor and isinstance(tensor, Parameter)


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the stride; `None` where there is none (a sparse tensor)."""
    return tensor.stride() if tensor.layout is torch.strided else None


def with_stride(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Return `tensor` with the layout that it had before an offloader packed it.

    `torch.autograd.graph.save_on_cpu` hands back contiguous tensors, and a kernel may
    round differently on another layout: the recompute would not be bitwise equal.
    """
    if stride is None or tensor.stride() == stride:
        return tensor
    # An expanded dimension is one element, seen many times.
    once = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)]
    laid_out = torch.empty_strided(
        once.shape, stride, dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(once).expand(tensor.shape)


class HeldTensor:
    """One tensor among the arguments.

    Attributes:
        place: Where it was given: the owner and the key, nested.
        version: The version of its content when the region began.
        changed_by_region: Whether the function itself wrote into it.
    """

    __slots__ = (
        "changed_by_region",
        "origin",
        "packed",
        "place",
        "requires_grad",
        "stride",
        "tangent",
        "unpack",
        "version",
    )

    def __init__(self, tensor: Tensor, place: Place, hooks: tuple[Any, Any] | None):
        """Hold `tensor`, through `hooks` if there are any."""
        self.place = place
        self.requires_grad = tensor.requires_grad
        self.changed_by_region = False
        self.unpack: Callable[[Any], Tensor] | None = None
        self.origin: ReferenceType[Tensor] | None = None
        self.tangent = unpack_dual(tensor).tangent if is_forward_ad_on() else None
        if is_parameter(tensor):
            self.packed: Any = tensor
        else:
            self.packed = tensor.detach()
            if not self.requires_grad:
                self.origin = ref(tensor)
            if hooks is not None:
                self.stride = stride_of(tensor)
                self.packed, self.unpack = hooks[0](self.packed), hooks[1]
        if self.unpack is None:
            self.version = version_of(tensor)

    @property
    def name(self) -> str:
        """Where it was given, as text: `argument 0` or `argument 'cache'['k']`."""
        return _place_name(self.place)

    def note_forward_end(self) -> None:
        """Notice whether the function wrote into its argument."""
        if self.unpack is None and version_of(self.packed) != self.version:
            self.changed_by_region = True

    def has_changed(self) -> bool:
        """Tell whether the content is another than when the region began.

        A caller who exchanges the storage (`x.data = y`) changes nothing here: the
        region holds an alias of the old one.
        """
        return self.unpack is None and version_of(self.packed) != self.version

    def rebuild(self) -> Tensor:
        """Return the tensor as a leaf that requires a gradient if the argument did."""
        tensor: Tensor = self.packed
        if self.unpack is not None:
            tensor = with_stride(self.unpack(tensor), self.stride)
        elif is_parameter(tensor):
            return tensor
        elif self.origin is not None:
            # The very object that the caller gave, if it still is what it was.
            origin = self.origin()
            if origin is None or address_of(origin) != address_of(tensor):
                return tensor
            return origin
        tensor = tensor.detach()
        if self.requires_grad:
            tensor.requires_grad_()
        return tensor if self.tangent is None else make_dual(tensor, self.tangent)


class _HeldContainer:
    """A container whose items are held one by one, and made again for a recompute."""

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
    """A container without tensors: itself, as long as nobody changed it."""

    __slots__ = ("original",)

    def __init__(self, original: Any, items: list[Any]):
        super().__init__(id(original), items, _maker(original))
        self.original = original

    def rebuild(self, memo: Memo) -> Any:
        now = [item for _, item in _entries(self.original)]
        same = len(now) == len(self.items) and all(map(is_, now, self.items))
        return self.original if same else super().rebuild(memo)


def rebuild(value: Any, memo: Memo) -> Any:
    """Return what a held value stands for; everything else stands for itself."""
    if isinstance(value, HeldTensor):
        # A tensor that was given twice is one tensor: attention asks `query is key`.
        key = id(value)
        if key not in memo:
            memo[key] = value.rebuild()
        return memo[key]
    return value.rebuild(memo) if isinstance(value, _HeldContainer) else value


class HeldArguments:
    """All arguments of one call of a region.

    Attributes:
        tensors: The tensors among them, nested ones included, in order.
        others: What is neither a tensor nor a container nor a plain value: modules,
            generators, functions, objects.
    """

    __slots__ = ("_args", "_hooks", "_kwargs", "_memo", "others", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Hold them; the innermost saved-tensor hooks of the caller are asked now."""
        self.tensors: list[HeldTensor] = []
        self.others: list[Any] = []
        self._hooks = top_saved_tensors_hooks()
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
        self._memo = {}

    def rebuild(self) -> tuple[list[Any], dict[str, Any]]:
        """Return fresh arguments for one recompute."""
        memo: Memo = {}
        args = [rebuild(value, memo) for value in self._args]
        kwargs = self._kwargs
        return args, kwargs and {k: rebuild(v, memo) for k, v in kwargs.items()}

    def cuda_devices(self) -> set[int]:
        """Return the indices of the CUDA devices on which the tensors lie."""
        packed = (held.packed for held in self.tensors)
        return {t.get_device() for t in packed if isinstance(t, Tensor) and t.is_cuda}

    def _hold(self, value: Any, place: Place) -> Any:
        if isinstance(value, Tensor):
            held = self._memo.get(id(value))
            if held is None:
                held = self._memo[id(value)] = HeldTensor(value, place, self._hooks)
                self.tensors.append(held)
            return held
        if not _is_container(value):
            self.others.append(value)
            return value
        known = self._memo.get(id(value))
        if known is None:
            known = self._memo[id(value)] = self._hold_container(value, place)
        return known

    def _hold_container(self, value: Any, place: Place) -> Any:
        # A container may hold itself: what leads back to it stands for itself.
        self._memo[id(value)] = value
        items = [
            item if type(item) in _LEAVES else self._hold(item, (place, key))
            for key, item in _entries(value)
        ]
        if any(isinstance(item, HeldTensor | _HeldContainer) for item in items):
            return _HeldContainer(id(value), items, _maker(value))
        return value if isinstance(value, tuple) else _PlainContainer(value, items)


_LEAVES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_CONTAINERS = (list, tuple, dict, set)


def _is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or _is_record(value)


def _place_name(place: Place) -> str:
    owner, key = place
    return f"argument {key!r}" if owner is None else f"{_place_name(owner)}[{key!r}]"


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container with the key under which an error names each."""
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


def _maker(value: Any) -> Callable[[Any], Any]:
    """Return the function that makes a container like `value` from a list of items.

    What is not an item (the keys, a subclass's attributes) is copied here and now,
    before the function can change it.
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
    # The model of the container must not keep the tensors themselves alive.
    _refill(empty, keys, [None] * len(keys))
    return lambda items: _refill(copy.copy(empty), keys, items)


def _refilled_list(empty: list[Any], items: list[Any]) -> list[Any]:
    fresh = copy.copy(empty)
    fresh.extend(items)
    return fresh


def _refill(container: Any, keys: list[Any], items: list[Any]) -> Any:
    """Put items under their keys, past the guards of frozen or fixed containers.

    Some containers (the outputs of Hugging Face models) are a dict and a dataclass at
    once, and hold each item twice.
    """
    attributes = getattr(container, "__dict__", {})
    for key, item in zip(keys, items, strict=True):
        if isinstance(container, dict):
            dict.__setitem__(container, key, item)
        if not isinstance(container, dict) or key in attributes:
            object.__setattr__(container, key, item)
    return container
