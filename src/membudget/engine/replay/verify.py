"""Verify a recording: replay each dropped tensor once and compare it bit for bit.

Raw kernels, NumPy and device libraries can write to tensors without going through the
dispatcher. Writes outside the dispatcher are *hidden*: they are not recorded, so a
replay would silently compute different values. In the first step with each new
signature, the original tensors therefore stay in memory until the region's forward
ends; then each dropped tensor is replayed and compared. An output that differs is
*unrepeatable*: it is kept in this step and in all later steps.

A signature comprises everything that a recording depends on: the function, the shapes,
dtypes and devices of its arguments, the modes, and the policy. Later calls with the
same signature are verified only if they run a new sequence of operators.

Verification needs memory for all originals and their replayed copies. `fingerprinted`
needs less memory: it compares fingerprints in the backward pass.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import is_fake, without_dispatch_modes
from membudget.engine.calls import counted
from membudget.engine.policy import Policy
from membudget.engine.replay.aliasing import Tracker
from membudget.engine.replay.execute import SourceFreedError, is_freed_parameter
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tape import ReplayHandle, TapeValue
from membudget.errors import UnrepeatableWarning
from membudget.state.autocast import autocast_state
from membudget.state.bits import PLAIN_CLASSES, same_bits
from membudget.state.copies import alias, copy_of
from membudget.state.identity import address_of

OutputIndices = set[tuple[int, int]]
OperatorPath = tuple[Any, ...]
RecordingKey = tuple[Any, ...]

_LEAVES = (int, float, bool, str, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 4
# Bounds of the caches; the oldest entry is dropped first.
_MOST_KEYS = 4096
_MOST_PATHS = 64


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
        is_sampled: Whether a sample of what the latest call reads is compared.
        has_subclasses: Whether the region saves tensor subclasses, whose operators are
            observed only by a dispatch mode.
        has_warned: Whether the user was warned about overwritten saved tensors.
    """

    __slots__ = (
        *("calls", "has_subclasses", "has_warned", "is_pending", "is_sampled"),
        *("paths", "unrepeatable"),
    )

    def __init__(self) -> None:
        """Create an empty record for a signature with no calls so far."""
        self.unrepeatable: OutputIndices = set()
        self.paths: list[OperatorPath] = []
        self.is_pending = self.is_sampled = False
        self.calls = 0
        self.has_subclasses = self.has_warned = False

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

    def count(self) -> None:
        """Count a call, and decide whether its inputs are sampled."""
        self.calls, self.is_sampled = counted(self.calls)


_VERIFIED: dict[RecordingKey, Verified] = {}


def verified(
    policy: Policy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verified:
    """Return the verification results for a call's signature, and count the call."""
    key = (
        policy,
        autocast_state(),
        _key(function, 0),
        *(_key(argument, 0) for argument in args),
        *((name, _key(argument, 0)) for name, argument in kwargs.items()),
    )
    found = _VERIFIED.get(key)
    if found is None:
        found = _VERIFIED[key] = Verified()
        if len(_VERIFIED) > _MOST_KEYS:
            del _VERIFIED[next(iter(_VERIFIED))]
    found.count()
    return found


def _key(value: Any, depth: int) -> Any:
    """Return a hashable key of the argument properties that a recording depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, _LEAVES):
        return type(value), value
    # Deeper values count by type alone, to bound the cost of each call.
    if depth >= _MAX_DEPTH:
        return type(value)
    if isinstance(value, Module):
        return ref(value), value.training  # Weak: the cache owns no model.
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
    except ValueError:  # The cell is still empty.
        return None


class Originals:
    """Original tensors that the forward drops, retained for verification."""

    __slots__ = ("_at", "_pairs", "_place")

    def __init__(self) -> None:
        """Create an empty collection of original tensors."""
        self._pairs: list[tuple[ReplayHandle, Tensor]] = []
        self._at: dict[int, list[int]] = {}
        self._place: dict[ReplayHandle, int] = {}

    def add(self, handle: ReplayHandle, tensor: Tensor) -> None:
        """Retain the original tensor of a handle."""
        self._place[handle] = len(self._pairs)
        self._at.setdefault(address_of(tensor), []).append(len(self._pairs))
        self._pairs.append((handle, alias(tensor)))

    def of(self, handle: ReplayHandle) -> Tensor | None:
        """Return the original tensor of a handle; `None` if it was not retained."""
        place = self._place.get(handle)
        return None if place is None else self._pairs[place][1]

    def before_write(self, address: int) -> None:
        """Copy the original tensors in a storage that is about to be overwritten.

        A handle represents the tensor's content at the time of saving. Only observed
        writes trigger a copy, so a *hidden* write changes the original tensor, as it
        would without the region.
        """
        for place in self._at.pop(address, ()):
            handle, original = self._pairs[place]
            # Some operators save a tensor before they fill it (RReLU its noise).
            if hasattr(handle, "value"):
                self._pairs[place] = handle, copy_of(original)

    def compare(
        self, replayer: Replayer, tracker: Tracker, unrepeatable: OutputIndices
    ) -> None:
        """Replay the dropped tensors; keep the originals of those that differ.

        Warns:
            UnrepeatableWarning: A replayed tensor differs from its original.
        """
        dropped = [p for p in self._pairs if p[0].value.operation is not None]
        # The user's modes must not see the comparison, but fake tensors need their
        # mode.
        plain = all(type(t) in PLAIN_CLASSES for _, t in dropped)
        with without_dispatch_modes() if plain else nullcontext():
            self._compare(dropped, replayer, tracker, unrepeatable)
        replayer.release()
        self._pairs.clear()
        self._place.clear()

    def _compare(
        self,
        dropped: list[tuple[ReplayHandle, Tensor]],
        replayer: Replayer,
        tracker: Tracker,
        unrepeatable: OutputIndices,
    ) -> None:
        # Forward order: an unrepeatable value becomes a source before its readers run.
        for handle, original in sorted(dropped, key=_number):
            value = handle.value
            # FSDP has freed the parameter, or a fake tensor has no content.
            if (
                not is_recomputed(value)
                or is_freed_parameter(original)
                or is_fake(original)
            ):
                continue
            try:
                replayed = _replayed(handle, replayer)
            except SourceFreedError:
                replayer.release()
                continue
            if same_bits(original, replayed):
                continue
            warnings.warn(
                keep_from_now_on(value, unrepeatable), UnrepeatableWarning, stacklevel=2
            )
            value.hold(original)
            tracker.note_source(value)
            replayer.release()


def is_recomputed(value: TapeValue) -> bool:
    """Return whether the backward pass recomputes a tape value."""
    root = value.root or value
    # No backward reads the statistics that a normalisation has updated, and a view of a
    # source computes nothing.
    return not (value.operation is None or root.is_state or root.operation is None)


def keep_from_now_on(value: TapeValue, unrepeatable: OutputIndices) -> str:
    """Mark an output to be kept in later steps; return a message for the user."""
    root = value.root or value
    operation = root.operation
    assert operation is not None
    unrepeatable.add((operation.call, root.index))
    return (
        f"output {root.index} of operator {operation.call} of a region, "
        f"{operation.operator}, did not reproduce when replayed: code that the "
        "dispatcher does not see wrote it, or the operator is not deterministic. "
        "It is kept from now on. Mark such code with membudget.opaque()."
    )


def _number(pair: tuple[ReplayHandle, Tensor]) -> int:
    operation = pair[0].value.operation
    return operation.number if operation is not None else 0


def _replayed(handle: ReplayHandle, replayer: Replayer) -> Tensor | None:
    try:
        return replayer.take(handle, stays=True)
    except SourceFreedError:
        raise
    except Exception:  # An operator that cannot run again.
        replayer.release()
        return None
