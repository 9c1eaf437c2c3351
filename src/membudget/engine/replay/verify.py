"""Verify a recording: replay each dropped tensor once and compare it bit for bit.

Raw kernels, NumPy and device libraries can write to tensors without going through the
dispatcher. Writes outside the dispatcher are *hidden*: they are not recorded, so a
replay would silently compute different values. In the first step with each new
signature, the original tensors therefore stay in memory until the region's forward
ends; then each dropped tensor is replayed and compared. An output that differs is
*unrepeatable*: it is kept in this step and in all later steps.

Verification needs memory for all originals and their replayed copies. `fingerprinted`
needs less memory: it compares fingerprints in the backward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from membudget._torch import is_fake, without_dispatch_modes
from membudget.engine.replay.aliasing import Tracker
from membudget.engine.replay.execute import SourceFreedError, is_freed_parameter
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tape import ReplayHandle, TapeValue
from membudget.engine.replay.verified import OutputIndices
from membudget.errors import (
    ChangedSinceForwardError,
    CheckpointError,
    UnrepeatableWarning,
)
from membudget.state.bits import PLAIN_CLASSES, same_bits
from membudget.state.copies import alias, copy_of
from membudget.state.identity import address_of


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
        with _unseen_by_modes(tensor for _, tensor in dropped):
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
            if _kept_if_other(value, original, replayed, tracker, unrepeatable):
                replayer.release()


def keep_if_other(
    value: TapeValue,
    original: Tensor,
    take: Callable[[], Tensor],
    tracker: Tracker,
    unrepeatable: OutputIndices,
) -> bool:
    """Replay one value at once; keep its original, and return `True`, if they differ.

    Warns:
        UnrepeatableWarning: The replayed tensor differs from its original.
    """
    if not is_recomputed(value):
        return False
    with _unseen_by_modes([original]):
        replayed: Tensor | None = None
        try:
            replayed = take()
        except ChangedSinceForwardError:
            pass  # What it reads is another: the value does not come back.
        except CheckpointError:  # FSDP has freed a parameter that it reads.
            return False
        except Exception:  # An operator that cannot run again.
            pass
        original = alias(original)
        return _kept_if_other(value, original, replayed, tracker, unrepeatable)


def _unseen_by_modes(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Hide a comparison from the user's modes; fake tensors need theirs."""
    plain = all(type(tensor) in PLAIN_CLASSES for tensor in tensors)
    return without_dispatch_modes() if plain else nullcontext()


def _kept_if_other(
    value: TapeValue,
    original: Tensor,
    replayed: Tensor | None,
    tracker: Tracker,
    unrepeatable: OutputIndices,
) -> bool:
    if same_bits(original, replayed):
        return False
    warnings.warn(
        keep_from_now_on(value, unrepeatable), UnrepeatableWarning, stacklevel=2
    )
    value.hold(original)
    tracker.note_source(value)
    return True


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
