"""Verify a recording by fingerprints, without holding any original.

As `verify`, for steps with no memory to spare. The rules:

1. A fingerprint is taken at the last moment before the tensor can change: before an
   operator writes it, before the first operator that finds only the engine's references
   to its storage, or at the end of the forward. So it includes hidden writes after the
   tensor was saved and content filled in after saving, and the memory is freed before
   the next operator allocates.
2. It is compared when a backward pass takes the value, which is recomputed then anyway.
3. On a difference the gradients of this step are already wrong, so the backward raises.
   The outputs at fault are kept from then on, so that the step can be run again: those
   that differ although all their inputs are right.
4. The path counts as verified once a backward pass has ended.
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
from membudget.engine.replay.verify import (
    OperatorPath,
    Verified,
    is_recomputed,
    keep_from_now_on,
)
from membudget.errors import RecomputeMismatchError
from membudget.state.bits import content_of, has_bits, has_changed, may_be_a_workspace
from membudget.state.identity import address_of


class Fingerprinter:
    """Fingerprints the tensors that a forward drops.

    Attributes:
        taken: How many it has taken.
    """

    __slots__ = ("_held", "taken")

    def __init__(self) -> None:
        """Start with none."""
        self._held: dict[int, list[tuple[ReplayHandle, Tensor]]] = {}
        self.taken = 0

    def add(self, handle: ReplayHandle, tensor: Tensor) -> None:
        """Note a saved tensor and its handle."""
        value = getattr(handle, "value", None)  # The value may not be known yet.
        is_source = value is not None and not is_recomputed(value)
        if has_bits(tensor) and not may_be_a_workspace(tensor) and not is_source:
            held = self._held.setdefault(address_of(tensor), [])
            held.append((handle, detach_with_version(tensor)))

    def of(self, handle: ReplayHandle) -> Tensor | None:
        """Return the tensor of a handle, until its fingerprint is taken."""
        for held in self._held.values():
            for other, tensor in held:
                if other is handle:
                    return tensor
        return None

    def take_ready(self) -> None:
        """Fingerprint the tensors to which only the engine still refers (Rule 1)."""
        for address, held in list(self._held.items()):
            # One use is the storage's Python object, which the tracker references.
            if storage_uses(address) <= len(held) + 1:
                self.take(address)

    def take_all(self) -> None:
        """Fingerprint the remaining tensors: the forward has ended."""
        for address in list(self._held):
            self.take(address)

    def before_write(self, address: int) -> None:
        """Fingerprint the tensors in a storage that an operator is about to write.

        If a value is not known yet, its operator saved the tensor before filling it
        (RReLU its noise), and this may be the write that fills it.
        """
        if all(hasattr(handle, "value") for handle, _ in self._held.get(address, ())):
            self.take(address)

    def take(self, address: int) -> None:
        """Fingerprint the tensors in one storage."""
        held = self._held.pop(address, ())
        self.taken += len(held)
        with without_dispatch_modes():
            for handle, tensor in held:
                handle.fingerprint = content_of(tensor)


class BackwardComparison:
    """Compares what a backward pass takes from one call with the fingerprints."""

    __slots__ = ("_is_ending", "_path", "_verified")

    def __init__(self, verified: Verified, path: OperatorPath):
        """Create the comparison when the forward, which ran `path`, has ended."""
        self._verified = verified
        self._path = path
        self._is_ending = False

    def compare(self, handle: ReplayHandle, tensor: Tensor, replayer: Replayer) -> None:
        """Compare a value; mark the path as verified when the backward pass ends."""
        self.check(handle, tensor, replayer)
        if not self._is_ending and current_graph_task_id() >= 0:
            self._is_ending = True
            at_end_of_backward(self._end)

    def check(self, handle: ReplayHandle, tensor: Tensor, replayer: Replayer) -> None:
        """Compare the recomputed tensor of a handle.

        Raises:
            RecomputeMismatchError: It differs (Rule 3).
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
    """Return all values of live handles that differ, starting with the first."""
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
    """Tell whether a value was computed from any of the others."""
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
