"""Verify a recording: replay every dropped value once, and compare it bit for bit.

Some memory is written where no dispatcher sees it: by a raw kernel, through NumPy, by a
device library. Replaying the operators then gives something else, in silence. So in the
first step of each new signature the originals stay until the forward of the region has
ended; each dropped value is replayed and compared. What does not come back is *pinned*:
held in this step, and kept in every later one.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from membudget._torch import tree_iter, without_dispatch_modes
from membudget.engine.policy import Policy
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tracker import Tracker, alias
from membudget.engine.replay.values import Handle, Value
from membudget.errors import PinnedWarning

Pins = set[tuple[int, int]]
Signature = tuple[Any, ...]

# What was verified: by the code that a region runs, and by the signature.
_PLAIN = (Tensor, torch.nn.Parameter)
_VERIFIED: WeakKeyDictionary[Any, dict[Signature, Pins]] = WeakKeyDictionary()


def signature_of(
    policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Signature:
    """Return what calls must have in common to be recorded alike."""
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
    return policy, torch.is_autocast_enabled("cpu"), shapes


def verified(function: Callable[..., Any]) -> dict[Signature, Pins]:
    """Return what was verified of the code of a function."""
    owner: Any = function
    while hasattr(owner, "func"):  # A partial.
        owner = owner.func
    if isinstance(owner, types.MethodType):
        owner = owner.__self__
    if isinstance(owner, types.FunctionType):
        owner = owner.__code__
    try:
        return _VERIFIED.setdefault(owner, {})
    except TypeError:  # It takes no weak reference.
        return _VERIFIED.setdefault(type(owner), {})


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
            if same_bits(original, _replayed(handle, replayer)):
                continue
            assert root.operation is not None
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
