"""Verify a recording: replay each dropped value once and compare it bit for bit.

Some memory is written where no dispatcher sees it: by a raw kernel, through NumPy, by a
device library. Replaying the operators then silently gives another result. So in the
first step of each new signature, the original tensors stay in memory until the region's
forward ends; then each dropped value is replayed and compared. An output that differs
is *unrepeatable*: it is held in this step, and kept in every later one.

A signature is everything on which the recording depends: the function, the shapes,
dtypes and devices of its arguments, the modes, and the policy. Later calls of a
signature are verified only if they leave all verified paths.

Verification takes the memory of all originals and of their replay. Where that does not
fit, `fingerprinted` compares fingerprints instead, in the backward pass.
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
from membudget.engine.policy import Policy
from membudget.engine.replay.aliasing import Tracker
from membudget.engine.replay.execute import SourceFreedError, is_freed_parameter
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tape import ReplayHandle, TapeValue
from membudget.errors import UnrepeatableWarning
from membudget.state.bits import PLAIN_CLASSES, same_bits
from membudget.state.copies import alias, copy_of
from membudget.state.identity import address_of

OutputIndices = set[tuple[int, int]]

OperatorPath = tuple[Any, ...]

RecordingKey = tuple[Any, ...]

_LEAVES = (int, float, bool, str, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 4
_MOST_KEYS = 4096
_MOST_PATHS = 64


class Verified:
    """What the calls of one signature have shown so far.

    What is verified is a *path*: the operators of a call, in order. A call that leaves
    all known paths is verified from that operator on.

    Attributes:
        unrepeatable: The outputs that differed when replayed, by operator number and
            output index.
        paths: The paths of verified calls, oldest first.
        is_pending: Whether a call ended inside a known path. The next call is then
            verified whole, because a hidden write may occur on the shorter path alone.
        calls: The number of calls.
        has_subclasses: Whether the region saves tensor subclasses, whose operators only
            a recorder on the mode stack sees.
        has_warned: Whether the user was warned that saved tensors are overwritten.
    """

    __slots__ = (
        *("calls", "has_subclasses", "has_warned", "is_pending", "paths"),
        "unrepeatable",
    )

    def __init__(self) -> None:
        """Start before the first call."""
        self.unrepeatable: OutputIndices = set()
        self.paths: list[OperatorPath] = []
        self.is_pending = False
        self.calls = 0
        self.has_subclasses = self.has_warned = False

    def add(self, path: OperatorPath) -> None:
        """Mark a path as verified."""
        self.is_pending = False
        if path not in self.paths:
            self.paths.append(path)
            del self.paths[:-_MOST_PATHS]

    def along(self, path: Sequence[Any]) -> OperatorPath | None:
        """Return a verified path that starts with `path`; `None` if there is none."""
        for known in reversed(self.paths):
            if known[: len(path)] == tuple(path):
                return known
        return None

    def is_sampled(self) -> bool:
        """Tell whether this call compares sources: calls number 1, 2, 4, 8, ... do."""
        return self.calls & (self.calls - 1) == 0


_VERIFIED: dict[RecordingKey, Verified] = {}


def verified(
    policy: Policy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Verified:
    """Return the verification state shared by calls that are recorded alike."""
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
    """Return what a value has in common with others that lead to the same recording."""
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
    except ValueError:  # The cell is still empty.
        return None


class Originals:
    """The original tensors that a forward dropped."""

    __slots__ = ("_at", "_pairs", "_place")

    def __init__(self) -> None:
        """Start with none."""
        self._pairs: list[tuple[ReplayHandle, Tensor]] = []
        self._at: dict[int, list[int]] = {}
        self._place: dict[ReplayHandle, int] = {}

    def add(self, handle: ReplayHandle, tensor: Tensor) -> None:
        """Store the tensor for which a handle stands."""
        self._place[handle] = len(self._pairs)
        self._at.setdefault(address_of(tensor), []).append(len(self._pairs))
        self._pairs.append((handle, alias(tensor)))

    def of(self, handle: ReplayHandle) -> Tensor | None:
        """Return the tensor for which a handle stands, while the forward runs."""
        place = self._place.get(handle)
        return None if place is None else self._pairs[place][1]

    def before_write(self, address: int) -> None:
        """Copy the originals in a storage that an operator is about to write.

        A handle stands for the content at the moment autograd saved it. Only observed
        writes are preceded by a copy, so a *hidden* write changes the original, as it
        changes the saved tensor in the plain step.
        """
        for place in self._at.pop(address, ()):
            handle, original = self._pairs[place]
            # Some operators save a tensor before they fill it (RReLU its noise).
            if hasattr(handle, "value"):
                self._pairs[place] = handle, copy_of(original)

    def compare(
        self, replayer: Replayer, tracker: Tracker, unrepeatable: OutputIndices
    ) -> None:
        """Replay the dropped values; keep those that differ, as sources.

        Warns:
            UnrepeatableWarning: For each value that differs.
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
    """Tell whether an operation computes the value for a backward pass."""
    root = value.root or value
    # No backward reads the statistics that a normalisation has updated, and a view of a
    # source computes nothing.
    return not (value.operation is None or root.is_state or root.operation is None)


def keep_from_now_on(value: TapeValue, unrepeatable: OutputIndices) -> str:
    """Keep an output in later steps; return a message about it."""
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
