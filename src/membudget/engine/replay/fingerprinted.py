"""Verify a recording in the memory of the step itself, by fingerprints.

As `verify`, and for the same reason; but no original stays. The rules:

1. A fingerprint is taken at the last moment at which somebody could write the tensor:
   before an operator writes it, before the first operator at which only this file still
   holds its memory, or when the forward ends. So a hidden write after the saving is
   seen, and what an operator fills after it was saved; and the memory goes before the
   next operator takes any.
2. It is compared when the backward takes the value, which is made then anyway.
3. The step cannot be put right any more where they differ: it raises. What is at fault
   is pinned, so that the step can be run again; and that is what differs although
   nothing that it was made of does.
4. The path counts as verified when a backward has ended.
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
from membudget.engine.replay.tape import (
    ReplayHandle,
    Value,
)
from membudget.engine.replay.verify import (
    OperatorPath,
    Verified,
    is_recomputed,
    keep_from_now_on,
)
from membudget.errors import RecomputeMismatchError
from membudget.state.bits import (
    content_of,
    has_bits,
    has_changed,
    may_be_a_workspace,
)
from membudget.state.identity import address_of


class Fingerprinter:
    """Takes the fingerprints of what a forward drops.

    Attributes:
        taken: How many it has taken.
    """

    __slots__ = ("_held", "taken")

    def __init__(self) -> None:
        """Begin with none."""
        self._held: dict[int, list[tuple[ReplayHandle, Tensor]]] = {}
        self.taken = 0

    def add(self, handle: ReplayHandle, tensor: Tensor) -> None:
        """Note what stands for a tensor that autograd saves."""
        value = getattr(handle, "value", None)  # It may be found later.
        is_source = value is not None and not is_recomputed(value)
        if has_bits(tensor) and not may_be_a_workspace(tensor) and not is_source:
            held = self._held.setdefault(address_of(tensor), [])
            held.append((handle, detach_with_version(tensor)))

    def of(self, handle: ReplayHandle) -> Tensor | None:
        """Return what a handle stands for, as long as it has no fingerprint."""
        for held in self._held.values():
            for other, tensor in held:
                if other is handle:
                    return tensor
        return None

    def take_ready(self) -> None:
        """Take those of what nobody else holds any more (Rule 1)."""
        for address, held in list(self._held.items()):
            # One use is the object of the storage, to which the tracker refers.
            if storage_uses(address) <= len(held) + 1:
                self.take(address)

    def take_all(self) -> None:
        """Take those that are left: the forward has ended."""
        for address in list(self._held):
            self.take(address)

    def before_write(self, address: int) -> None:
        """Take those of a storage that an operator is about to write.

        Some operators save what they are about to fill (RReLU its noise).
        """
        if all(hasattr(handle, "value") for handle, _ in self._held.get(address, ())):
            self.take(address)

    def take(self, address: int) -> None:
        """Take those of one storage."""
        held = self._held.pop(address, ())
        self.taken += len(held)
        with without_dispatch_modes():
            for handle, tensor in held:
                handle.fingerprint = content_of(tensor)


class BackwardComparison:
    """Compares what a backward takes from one call with its fingerprints."""

    __slots__ = ("_is_ending", "_path", "_verified")

    def __init__(self, verified: Verified, path: OperatorPath):
        """Begin when the forward has ended.

        Args:
            verified: Where to note what differs, and that the path is verified.
            path: The operators that the forward ran.
        """
        self._verified = verified
        self._path = path
        self._is_ending = False

    def compare(self, handle: ReplayHandle, tensor: Tensor, replayer: Replayer) -> None:
        """Compare what a backward takes; the path is verified when that ends."""
        self.check(handle, tensor, replayer)
        if not self._is_ending and current_graph_task_id() >= 0:
            self._is_ending = True
            at_end_of_backward(self._end)

    def check(self, handle: ReplayHandle, tensor: Tensor, replayer: Replayer) -> None:
        """Compare what was made again for a handle.

        Raises:
            RecomputeMismatchError: If it is something else (Rule 3).
        """
        with without_dispatch_modes():
            differs = _differs(handle, tensor)
            wrong = _all_wrong(handle, replayer) if differs else []
        if wrong:
            raise self._error(handle, wrong)

    def _end(self) -> None:
        self._verified.add(self._path)

    def _error(
        self, handle: ReplayHandle, wrong: list[Value]
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
            "the gradients of this step are wrong and not whole. Drop them and run the "
            "step again:\n  " + "\n  ".join(texts),
            operator=str(operation and operation.operator),
            causes=("a hidden write", "an operator that is not deterministic"),
        )


def _differs(handle: ReplayHandle, tensor: Tensor) -> bool:
    noted, handle.fingerprint = handle.fingerprint, None
    assert noted is not None
    return is_recomputed(handle.value) and has_changed(tensor, noted)


def _all_wrong(first: ReplayHandle, replayer: Replayer) -> list[Value]:
    """Return what is wrong of all that the region has still to serve."""
    wrong = [first.value]
    for handle in replayer.living():
        if handle.fingerprint is None:
            continue
        try:
            tensor = replayer.take(handle, stays=True)
        except Exception:  # No memory, or an operator that cannot run again: enough.
            break
        if _differs(handle, tensor):
            wrong.append(handle.value)
    replayer.release()
    return wrong


def _comes_of(value: Value, others: Collection[Value]) -> bool:
    """Tell whether a value was made of any of the others."""
    seen: set[Value] = set()
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
