"""Which calls of a region are recorded alike: the first of them is verified, no other.

A signature is what the recording depends on: the function, the shapes, dtypes and
devices of what it is called with, the modes, and what is kept.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from membudget.engine.policy import Policy

Pins = set[tuple[int, int]]
Path = tuple[Any, ...]
Key = tuple[Any, ...]

_LEAVES = (int, float, bool, str, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 4
_MOST_KEYS = 4096
_MOST_PATHS = 64


class Verified:
    """What the calls of one signature have shown so far.

    What is verified is a *path*: the operators of a call, in order. A call that leaves
    all known paths is verified from there on.

    Attributes:
        pins: What did not come back, by operator and index.
        paths: The operators of the calls that were verified, oldest first.
        is_pending: Whether a call ended inside of a known path: the next one is
            verified whole, because a hidden write may belong to the shorter path alone.
        calls: How many calls there were.
        has_subclasses: Whether tensor subclasses were saved, so that the recorder must
            stand among the modes to see what is done with them.
        has_warned: Whether somebody was told that saved tensors are written.
    """

    __slots__ = ("calls", "has_subclasses", "has_warned", "is_pending", "paths", "pins")

    def __init__(self) -> None:
        """Begin before the first call."""
        self.pins: Pins = set()
        self.paths: list[Path] = []
        self.is_pending = False
        self.calls = 0
        self.has_subclasses = self.has_warned = False

    def add(self, path: Path) -> None:
        """Note a path whose call was verified."""
        self.is_pending = False
        if path not in self.paths:
            self.paths.append(path)
            del self.paths[:-_MOST_PATHS]

    def along(self, path: Sequence[Any]) -> Path | None:
        """Return a known path that begins like another; `None` if there is none."""
        for known in reversed(self.paths):
            if known[: len(path)] == tuple(path):
                return known
        return None

    def is_sampled(self) -> bool:
        """Tell whether this call compares sources: calls number 1, 2, 4, 8, ... do."""
        return self.calls & (self.calls - 1) == 0


_VERIFIED: dict[Key, Verified] = {}


def verified(
    policy: Policy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verified:
    """Return what was verified of calls that are recorded alike."""
    key = (
        policy,
        torch.is_autocast_enabled("cpu"),
        _key(function, 0),
        *(_key(argument, 0) for argument in args),
        *((name, _key(argument, 0)) for name, argument in kwargs.items()),
    )
    found = _VERIFIED.get(key)
    if found is None:
        found = _VERIFIED[key] = Verified()
        if len(_VERIFIED) > _MOST_KEYS:
            del _VERIFIED[next(iter(_VERIFIED))]
    found.calls += 1
    return found


def _key(value: Any, depth: int) -> Any:
    """Return what a value has in common with others that are computed with alike."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, _LEAVES):
        return type(value), value
    if depth >= _MAX_DEPTH:
        return type(value)
    if isinstance(value, Module):
        return ref(value), value.training
    if isinstance(value, types.MethodType):
        return _key(value.__self__, depth + 1), value.__func__
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return value.__code__, *(_key(cell, depth + 1) for cell in cells)
    if isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.items())
        return ("partial", *(_key(item, depth + 1) for item in inner))
    if isinstance(value, list | tuple):
        return type(value), *(_key(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return type(value), *(_key(item, depth + 1) for item in value.items())
    return type(value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is still empty.
        return None
