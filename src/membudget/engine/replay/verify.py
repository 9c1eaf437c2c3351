"""Verify a recording: replay every dropped value once, and compare it bit for bit.

Some memory is written where no dispatcher sees it: by a raw kernel, through NumPy, by a
device library. Replaying the operators then gives something else, in silence. So in the
first step of each new signature the originals stay until the forward of the region has
ended; each dropped value is replayed and compared. What does not come back is *pinned*:
held in this step, and kept in every later one.

That takes the memory of all originals and of their replay. Where there is none to
spare, `fingerprinted` does the same with fingerprints, and in the backward.
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
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.sources import (
    SourceFreedError,
    alias,
    copy_of,
    is_freed_parameter,
)
from membudget.engine.replay.tape import (
    ReplayHandle,
    Value,
)
from membudget.errors import UnrepeatableWarning
from membudget.state.bits import PLAIN_CLASSES, has_bits, may_be_a_workspace
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
    all known paths is verified from there on.

    Attributes:
        unrepeatable: What did not come back, by operator and index.
        paths: The operators of the calls that were verified, oldest first.
        is_pending: Whether a call ended inside of a known path: the next one is
            verified whole, because a hidden write may belong to the shorter path alone.
        calls: How many calls there were.
        has_subclasses: Whether tensor subclasses were saved, so that the recorder must
            stand among the modes to see what is done with them.
        has_warned: Whether somebody was told that saved tensors are written.
    """

    __slots__ = (
        "calls",
        "has_subclasses",
        "has_warned",
        "is_pending",
        "paths",
        "unrepeatable",
    )

    def __init__(self) -> None:
        """Begin before the first call."""
        self.unrepeatable: OutputIndices = set()
        self.paths: list[OperatorPath] = []
        self.is_pending = False
        self.calls = 0
        self.has_subclasses = self.has_warned = False

    def add(self, path: OperatorPath) -> None:
        """Note a path whose call was verified."""
        self.is_pending = False
        if path not in self.paths:
            self.paths.append(path)
            del self.paths[:-_MOST_PATHS]

    def along(self, path: Sequence[Any]) -> OperatorPath | None:
        """Return a known path that begins like another; `None` if there is none."""
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


class Originals:
    """The originals of what a forward dropped."""

    __slots__ = ("_at", "_pairs", "_place")

    def __init__(self) -> None:
        """Begin with none."""
        self._pairs: list[tuple[ReplayHandle, Tensor]] = []
        self._at: dict[int, list[int]] = {}
        self._place: dict[ReplayHandle, int] = {}

    def add(self, handle: ReplayHandle, tensor: Tensor) -> None:
        """Remember what a handle stands for."""
        self._place[handle] = len(self._pairs)
        self._at.setdefault(address_of(tensor), []).append(len(self._pairs))
        self._pairs.append((handle, alias(tensor)))

    def of(self, handle: ReplayHandle) -> Tensor | None:
        """Return what a handle stands for, while the forward runs."""
        place = self._place.get(handle)
        return None if place is None else self._pairs[place][1]

    def before_write(self, address: int) -> None:
        """Copy what lies in a storage that an operator is about to write.

        What a handle stands for is what autograd saved; what a *hidden* write makes of
        it is the original, as it is in the plain step.
        """
        for place in self._at.pop(address, ()):
            handle, original = self._pairs[place]
            # Some operators save what they are about to fill (RReLU its noise).
            if hasattr(handle, "value"):
                self._pairs[place] = handle, copy_of(original)

    def compare(
        self, replayer: Replayer, tracker: Tracker, unrepeatable: OutputIndices
    ) -> None:
        """Replay what was dropped, and pin what does not come back.

        Args:
            replayer: Makes the values again.
            tracker: Where new sources are noted.
            unrepeatable: What did not come back is added.

        Warns:
            UnrepeatableWarning: For each value that is pinned.
        """
        dropped = [p for p in self._pairs if p[0].value.operation is not None]
        # A mode of the user's does not see the comparison; fake tensors need theirs.
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
            # Freed by FSDP; without content.
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


def is_recomputed(value: Value) -> bool:
    """Tell whether operators make the content of a value, which a backward reads."""
    root = value.root or value
    # No backward reads statistics that a normalisation has written since; and a view of
    # what is held computes nothing.
    return not (value.operation is None or root.is_state or root.operation is None)


def keep_from_now_on(value: Value, unrepeatable: OutputIndices) -> str:
    """Keep what did not come back, from the next step on; return what happened."""
    root = value.root or value
    operation = root.operation
    assert operation is not None
    unrepeatable.add((operation.call, root.index))
    return (
        f"output {root.index} of operator {operation.call} of a region, "
        f"{operation.operator}, did not come back when it was replayed: something that "
        "the dispatcher does not show wrote it, or the operator is not deterministic. "
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
    except Exception:  # An operator that cannot run again gives nothing back.
        replayer.release()
        return None


def same_bits(original: Tensor, replayed: Tensor | None) -> bool:
    """Tell whether two tensors hold the same bytes in the same layout."""
    if replayed is None or original.shape != replayed.shape:
        return False
    if original.dtype is not replayed.dtype or _layout(original) != _layout(replayed):
        return False
    if not has_bits(original) or may_be_a_workspace(original):
        return True
    return torch.equal(_bytes(original), _bytes(replayed))


def _layout(tensor: Tensor) -> Any:
    """Return what a kernel may choose its way by, beside shape and dtype."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    if not tensor.numel():
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride for size, stride in sizes if size > 1]
    return tensor.is_conj(), tensor.is_neg(), strides


def _bytes(tensor: Tensor) -> Tensor:
    # A clone, because one element may have any stride, and no bytes can be seen by it.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(-1).view(torch.uint8)
