"""What was verified of a region, by signature.

A signature comprises everything that a recording depends on: the function, the shapes,
dtypes and devices of its arguments, the modes, and the policy. Calls with the same
signature are verified once; later ones only if they run a new sequence of operators,
or are due. With `sampling`, few of the new sequences are verified if their parts are.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Module

from membudget.engine.calls import counted, held_weakly
from membudget.engine.options import RegionOptions
from membudget.engine.replay.routes import Routes
from membudget.engine.sampling import Sampling, is_due_as
from membudget.state.autocast import autocast_state
from membudget.state.code import content_of

OutputIndices = set[tuple[int, int]]
OperatorPath = tuple[Any, ...]
RecordingKey = tuple[Any, ...]

_LEAVES = (int, float, bool, str, type(None), torch.dtype, torch.device)
MAX_DEPTH = 4
# Bounds of the caches; the oldest entry is dropped first.
_MOST_KEYS = 4096
_MOST_PATHS = 64
_MOST_NUMBERS = 16  # Signatures that differ in numbers alone, before others share one.
_ALIKE = 4  # Operators after which two sequences are taken to go on alike.


class Verified:
    """Verification results of all calls with one signature.

    The unit of verification is a *path*: the sequence of operators in a call. A call is
    verified from the operator at which it deviates from all known operator sequences.

    Attributes:
        unrepeatable: Outputs that differed in a replay, as pairs of operator number and
            output index.
        paths: Operator sequences of verified calls, oldest first.
        is_pending: Whether to verify the next call from the start, because a call ended
            partway through a known operator sequence: the shorter sequence may have
            hidden writes of its own.
        calls: Number of calls with this signature.
        sampling: Which calls are verified although their operators are known; `None`
            if none is, and sizes are part of the signature.
        is_sampled: Whether a sample of what the latest call reads is compared.
        has_subclasses: Whether the region saves tensor subclasses, whose operators are
            observed only by a dispatch mode.
        has_warned: Whether the user was warned about overwritten saved tensors.
        routes: What is known of the routes of its calls (Rule 11).
    """

    __slots__ = (
        *("_refs", "calls", "has_subclasses", "has_warned", "is_pending"),
        *("is_sampled", "paths", "routes", "sampling", "unrepeatable"),
    )

    def __init__(self, share: float | None = None) -> None:
        """Create an empty record for a signature with no calls so far."""
        self.unrepeatable: OutputIndices = set()
        self.paths: list[OperatorPath] = []
        self.is_pending = self.is_sampled = False
        self.sampling = None if share is None else Sampling(share)
        self.calls = 0
        self.has_subclasses = self.has_warned = False
        self.routes = Routes()
        self._refs: list[ReferenceType[Any]] = []

    def live_with(self, objects: list[Any], key: RecordingKey) -> None:
        """Be forgotten when one of the objects dies that the signature names."""
        self._refs = held_weakly(objects, VERIFIED, key)

    def add(self, path: OperatorPath) -> None:
        """Mark a sequence of operators as verified."""
        self.is_pending = False
        if path not in self.paths:
            self.paths.append(path)
            del self.paths[:-_MOST_PATHS]

    def along(self, path: Sequence[Any]) -> OperatorPath | None:
        """Return the newest verified operator sequence that begins with `path`."""
        for known in reversed(self.paths):
            if known[: len(path)] == tuple(path):
                return known
        return None

    def spliced(self, path: Sequence[Any]) -> OperatorPath | None:
        """Return how a verified sequence went on after the last operators of `path`.

        With sampling, layers that are dropped at random give a sequence that is not
        verified if its parts are; but the 2nd, 4th, 8th, ... sequence is. None is
        taken to be known if an output is unrepeatable, whose number is of its sequence.
        """
        is_strict = self.sampling is None or self.unrepeatable
        if is_strict or is_due_as(len(self.paths) + 1):
            return None
        last = tuple(path[-_ALIKE:])
        for known in reversed(self.paths):
            for end in range(len(known), _ALIKE - 1, -1):
                if known[end - _ALIKE : end] == last:
                    return (*path, *known[end:])
        return None

    def count(self) -> None:
        """Count a call, and decide whether its inputs are sampled."""
        self.calls, self.is_sampled = counted(self.calls)


VERIFIED: dict[RecordingKey, Verified] = {}
_NUMBERED: dict[RecordingKey, list[RecordingKey]] = {}  # By keys without numbers.


def verified(
    options: RegionOptions,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verified:
    """Return the verification results for a call's signature, and count the call.

    If a share of calls is sampled, sizes of tensors and numbers are not part of it.
    Else, a call with new numbers in each step is taken to be known after some of them.
    """
    called = (
        key_of(function, 0),
        *(key_of(argument, 0) for argument in args),
        *((name, key_of(argument, 0)) for name, argument in kwargs.items()),
    )
    share = options.share
    alike = called if share is None else _without_sizes(called)
    key = options.policy.key, share, autocast_state(), alike
    found = VERIFIED.get(key)
    if found is None and share is None:
        found = _alike_but_for_numbers(key)
    if found is None:
        found = VERIFIED[key] = Verified(share)
        found.live_with(_named_in(key), key)
        if len(VERIFIED) > _MOST_KEYS:
            del VERIFIED[next(iter(VERIFIED))]
    found.count()
    if found.sampling is not None:
        found.sampling.count(called)
    return found


def _alike_but_for_numbers(key: RecordingKey) -> Verified | None:
    """Return a record for a new signature, if many differ from it in numbers alone."""
    *context, called = key
    numberless = *context, _without_numbers(called)
    alike = [k for k in _NUMBERED.pop(numberless, ()) if k in VERIFIED]
    found = VERIFIED[alike[-1]] if len(alike) == _MOST_NUMBERS else None
    _NUMBERED[numberless] = alike if found else [*alike, key]
    if len(_NUMBERED) > _MOST_KEYS:
        del _NUMBERED[next(iter(_NUMBERED))]
    return found


def _without_numbers(key: Any) -> Any:
    """Return a key without the values of numbers."""
    kind = type(key)
    if kind is tuple:
        return tuple(map(_without_numbers, key))
    return kind if kind in (int, float) else key


def _without_sizes(key: Any) -> Any:
    """Return a key with ranks for shapes, and without the values of numbers."""
    if type(key) is tuple:
        return tuple(map(_without_sizes, key))
    return len(key) if type(key) is torch.Size else _without_numbers(key)


def key_of(value: Any, depth: int) -> Any:
    """Return a hashable key of the argument properties that a recording depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, _LEAVES):
        return type(value), value
    # Deeper values count by type alone, to bound the cost of each call.
    if depth >= MAX_DEPTH:
        return type(value)
    if isinstance(value, Module):
        return ref(value), value.training  # Weak: the cache owns no model.
    if isinstance(value, types.MethodType):
        return key_of(value.__self__, depth + 1), value.__func__
    if isinstance(value, types.FunctionType):
        cells = [content_of(cell) for cell in value.__closure__ or ()]
        return value.__code__, *(key_of(cell, depth + 1) for cell in cells)
    if isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.items())
        return ("partial", *(key_of(item, depth + 1) for item in inner))
    if isinstance(value, list | tuple):
        return type(value), *(key_of(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return type(value), *(key_of(item, depth + 1) for item in value.items())
    return type(value)


def _named_in(key: Any) -> list[Any]:
    """Return the objects that a key references weakly, such as modules."""
    if type(key) is ReferenceType:
        return [key()]
    items = key if type(key) is tuple else ()
    return [named for item in items for named in _named_in(item)]
