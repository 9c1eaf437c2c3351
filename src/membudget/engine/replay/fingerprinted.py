"""Verify a recording by fingerprints, without retaining the original tensors.

Fingerprinting is the low-memory alternative to `verify`, and follows four rules:

1. Each saved tensor is fingerprinted as late as possible: before an operator overwrites
   it, before the next operator if only the engine still references its storage, or at
   the end of the forward. The fingerprint thus covers unobserved writes and content
   computed after saving, and the tensor is freed before the next operator runs.
2. Fingerprints are compared when the backward pass recomputes the tensors, so that
   verification needs no extra replay.
3. If a fingerprint differs, gradients of the current step are already wrong, so the
   backward pass raises. Operator outputs that differ although all inputs match are
   kept from then on, so that the step can be repeated.
4. A sequence of operators counts as verified once a backward pass that compared its
   fingerprints has ended without a mismatch.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from membudget._torch import (
    at_end_of_backward,
    current_graph_task_id,
    detach_with_version,
    storage_uses,
    without_dispatch_modes,
)
from membudget.engine.replay.replayer import Replayer
from membudget.engine.replay.tape import ReplayHandle, TapeValue
from membudget.engine.replay.verified import OperatorPath, Verified
from membudget.engine.replay.verify import is_recomputed, keep_from_now_on
from membudget.errors import RecomputeMismatchError
from membudget.state.bits import content_of, has_bits, has_changed, may_be_a_workspace
from membudget.state.identity import address_of


class Fingerprinter:
    """Fingerprints the tensors that a forward drops; `taken` counts them."""

    __slots__ = ("_held", "taken")

    def __init__(self) -> None:
        """Create an empty fingerprinter, with no tensors registered."""
        self._held: dict[int, list[tuple[ReplayHandle, Tensor]]] = {}
        self.taken = 0

    def add(self, handle: ReplayHandle, tensor: Tensor) -> None:
        """Register a saved tensor and its handle, to be fingerprinted later."""
        value = getattr(handle, "value", None)  # The value may not be known yet.
        is_source = value is not None and not is_recomputed(value)
        if has_bits(tensor) and not may_be_a_workspace(tensor) and not is_source:
            held = self._held.setdefault(address_of(tensor), [])
            held.append((handle, detach_with_version(tensor)))

    def of(self, handle: ReplayHandle) -> Tensor | None:
        """Return a handle's tensor; `None` once the tensor has been fingerprinted."""
        for held in self._held.values():
            for other, tensor in held:
                if other is handle:
                    return tensor
        return None

    def take_ready(self) -> None:
        """Fingerprint the tensors that only the engine still references (Rule 1)."""
        for address, held in list(self._held.items()):
            # One use is the storage's Python object, which the tracker references.
            if storage_uses(address) <= len(held) + 1:
                self.take(address)

    def take_all(self) -> None:
        """Fingerprint all remaining tensors at the end of the forward."""
        for address in list(self._held):
            self.take(address)

    def before_write(self, address: int) -> None:
        """Fingerprint the tensors in a storage that an operator is about to overwrite.

        Some operators save a tensor before they fill it (RReLU saves its noise); such a
        tensor is not fingerprinted before it has been filled.
        """
        if all(hasattr(handle, "value") for handle, _ in self._held.get(address, ())):
            self.take(address)

    def take(self, address: int) -> None:
        """Fingerprint the saved tensors in one storage, and release them."""
        held = self._held.pop(address, ())
        self.taken += len(held)
        with without_dispatch_modes():
            for handle, tensor in held:
                handle.fingerprint = content_of(tensor)


class BackwardComparison:
    """Compares recomputed tensors of one call with fingerprints of the originals."""

    __slots__ = ("_is_ending", "_path", "_verified")

    def __init__(self, verified: Verified, path: OperatorPath):
        """Create the comparison for a forward whose operator sequence is `path`."""
        self._verified = verified
        self._path = path
        self._is_ending = False

    def compare(self, handle: ReplayHandle, tensor: Tensor, replayer: Replayer) -> None:
        """Check a recomputed tensor; when the backward ends, mark the call verified."""
        self.check(handle, tensor, replayer)
        if not self._is_ending and current_graph_task_id() >= 0:
            self._is_ending = True
            at_end_of_backward(self._end)

    def check(self, handle: ReplayHandle, tensor: Tensor, replayer: Replayer) -> None:
        """Compare a recomputed tensor with the fingerprint of the original.

        Raises:
            RecomputeMismatchError: If the fingerprints differ (Rule 3).
        """
        with without_dispatch_modes():
            differs = _differs(handle, tensor)
            wrong = _all_wrong(handle, replayer) if differs else []
        if wrong:
            raise self._error(handle, wrong)

    def _end(self) -> None:
        self._verified.add(self._path)

    def _error(
        self, handle: ReplayHandle, wrong: list[TapeValue]
    ) -> RecomputeMismatchError:
        # Only outputs with correct inputs are at fault; the others inherit the error.
        roots = {value.root or value for value in wrong}
        unrepeatable = self._verified.unrepeatable
        texts = [
            keep_from_now_on(root, unrepeatable)
            for root in roots
            if not _comes_of(root, roots)
        ]
        operation = (handle.value.root or handle.value).operation
        return RecomputeMismatchError(
            "the gradients of this step are wrong and incomplete. Discard them and run "
            "the step again:\n  " + "\n  ".join(texts),
            operator=str(operation and operation.operator),
            causes=("a hidden write", "an operator that is not deterministic"),
        )


def _differs(handle: ReplayHandle, tensor: Tensor) -> bool:
    noted, handle.fingerprint = handle.fingerprint, None
    assert noted is not None
    return is_recomputed(handle.value) and has_changed(tensor, noted)


def _all_wrong(first: ReplayHandle, replayer: Replayer) -> list[TapeValue]:
    """Return the tape value of each live handle whose recomputed tensor is wrong."""
    wrong = [first.value]
    for handle in replayer.living():
        if handle.fingerprint is None:
            continue
        try:
            tensor = replayer.take(handle, stays=True)
        # Out of memory, or an operator that cannot run again; report what was found.
        except Exception:
            break
        if _differs(handle, tensor):
            wrong.append(handle.value)
    replayer.release()
    return wrong


def _comes_of(value: TapeValue, others: Collection[TapeValue]) -> bool:
    """Return whether `value` was computed from any value in `others`."""
    seen: set[TapeValue] = set()
    found = [value]
    while found:
        operation = found.pop().operation
        for source in () if operation is None else operation.inputs():
            root = source.root or source
            if root in others:
                return True
            if root not in seen:
                seen.add(root)
                found.append(source)
    return False
