"""Verify a recording: replay every dropped value once, and compare it bit for bit.

Some memory is written where no dispatcher sees it: by a raw kernel, through NumPy, by a
device library. Replaying the operators then gives something else, in silence. So in the
first step of each new signature the originals stay until the forward of the region has
ended; each dropped value is replayed and compared. What does not come back is *pinned*:
held in this step, and kept in every later one.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import is_fake, without_dispatch_modes
from membudget.engine.policy import Policy
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.running import SourceFreedError, is_freed
from membudget.engine.replay.tracker import Tracker, alias
from membudget.engine.replay.values import Handle, Value
from membudget.errors import PinnedWarning

Pins = set[tuple[int, int]]
Key = tuple[Any, ...]

_PLAIN = (Tensor, torch.nn.Parameter)
_LEAVES = (int, float, bool, str, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 4
_MOST_KEYS = 4096


class Verified:
    """What the first step of a signature found.

    Attributes:
        pins: What did not come back, by operator and index.
        operators: How many operators ran; `None` before the first step. A step that
            runs another number of them went another way, and the next is verified.
    """

    __slots__ = ("operators", "pins")

    def __init__(self) -> None:
        """Begin before the first step."""
        self.pins: Pins = set()
        self.operators: int | None = None


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

    __slots__ = ("_pairs",)

    def __init__(self) -> None:
        """Begin with none."""
        self._pairs: list[tuple[Handle, Tensor]] = []

    def add(self, handle: Handle, tensor: Tensor) -> None:
        """Remember what a handle stands for."""
        self._pairs.append((handle, alias(tensor)))

    def compare(self, replayer: Replayer, tracker: Tracker, pins: Pins) -> None:
        """Replay what was dropped, and pin what does not come back.

        Args:
            replayer: Makes the values again.
            tracker: Where new sources are noted.
            pins: What did not come back is added.

        Warns:
            PinnedWarning: For each value that is pinned.
        """
        dropped = [p for p in self._pairs if p[0].value.operation is not None]
        # A mode of the user's does not see the comparison; fake tensors need theirs.
        plain = all(type(t) in _PLAIN for _, t in dropped)
        with without_dispatch_modes() if plain else nullcontext():
            self._compare(dropped, replayer, tracker, pins)
        replayer.release()
        self._pairs.clear()

    def _compare(
        self,
        dropped: list[tuple[Handle, Tensor]],
        replayer: Replayer,
        tracker: Tracker,
        pins: Pins,
    ) -> None:
        for handle, original in sorted(dropped, key=_number):
            value = handle.value
            root = value.root or value
            # No backward reads statistics that a normalisation has written since.
            if value.operation is None or root.is_state:
                continue
            if root.operation is None or is_freed(original) or is_fake(original):
                continue  # A view of what is held; freed by FSDP; without content.
            try:
                replayed = _replayed(handle, replayer)
            except SourceFreedError:
                replayer.release()
                continue
            if same_bits(original, replayed):
                continue
            pins.add((root.operation.call, root.index))
            _warn(root)
            value.hold(original)
            tracker.note_source(value)
            replayer.release()


def _number(pair: tuple[Handle, Tensor]) -> int:
    operation = pair[0].value.operation
    return operation.number if operation is not None else 0


def _replayed(handle: Handle, replayer: Replayer) -> Tensor | None:
    try:
        return replayer.take(handle, stays=True)
    except SourceFreedError:
        raise
    except Exception:  # An operator that cannot run again gives nothing back.
        replayer.release()
        return None


def _warn(root: Value) -> None:
    operation = root.operation
    assert operation is not None
    warnings.warn(
        f"output {root.index} of operator {operation.call} of a region, "
        f"{operation.operator}, did not come back when it was replayed: something that "
        "the dispatcher does not show wrote it, or the operator is not deterministic. "
        "It is kept from now on. Mark such code with membudget.opaque().",
        PinnedWarning,
        stacklevel=2,
    )


def same_bits(original: Tensor, replayed: Tensor | None) -> bool:
    """Tell whether two tensors hold the same bytes, whatever their strides."""
    if replayed is None or original.shape != replayed.shape:
        return False
    if original.dtype is not replayed.dtype:
        return False
    if not _is_comparable(original):
        return True
    return torch.equal(_bytes(original), _bytes(replayed))


def _is_comparable(tensor: Tensor) -> bool:
    """Tell whether the bytes can be read, and mean something.

    oneDNN and cuDNN leave parts of their workspaces, vectors of bytes, unfilled.
    """
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not (tensor.dtype is torch.uint8 and tensor.dim() == 1)
    )


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8)
