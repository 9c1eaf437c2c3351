"""Check that a recompute reads and saves the same values as its forward.

Metadata of recomputed and saved tensors is compared on the hot path of every recompute.
*Fingerprints* of the tensors' bytes are compared in verified calls, or in all calls
with `determinism_check="values"`. Some operators save a tensor before computing its
content (RReLU: its noise); saved tensors are therefore fingerprinted only when the next
operator saves a tensor.

A function usually reaches more tensors than it reads. A tensor that changed after the
forward is therefore an error only if an operator of the recompute reads it. `Watch`
checks the operands of each operator, but only if a reachable tensor was changed. If the
region *itself* changes a tensor (embedding's `max_norm` renormalises its weight), the
recompute starts from the content that the forward left behind. A recompute from changed
content is exact only if it writes to the tensor before reading it, and no write changes
the content; otherwise, the recompute raises.

`Contents` finds writes that bypass the version counters: through `.data`, through
NumPy, or by a kernel such as batch_norm's.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch import Tensor

from membudget._torch import (
    is_view_operator,
    node_sequence_number,
    set_versions,
    tree_iter,
    without_modes,
    written_arguments,
)
from membudget.engine.messages import changed_error, rewritten_error
from membudget.observer import Observer
from membudget.state.bits import (
    SKIPPED,
    Fingerprint,
    content_of,
    has_changed,
    may_be_a_workspace,
    same_bytes,
)
from membudget.state.identity import address_of, version_of
from membudget.text import dtype_name

Metadata = tuple[Any, ...]


def metadata(tensor: Tensor) -> Metadata:
    """Return a tensor's shape, dtype, device and stride."""
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
    except (RuntimeError, NotImplementedError):  # A sparse tensor has no stride.
        return (tensor.shape, tensor.dtype, tensor.device, None)


def same_metadata(saved: Metadata, recomputed: Metadata) -> bool:
    """Return whether two unequal metadata tuples are equivalent.

    Strides of size-1 dimensions and empty tensors have no effect, and vary by kernel.
    """
    if saved[:3] != recomputed[:3] or saved[3] is None or recomputed[3] is None:
        return False
    shape = saved[0]
    return 0 in shape or all(
        size == 1 or a == b
        for size, a, b in zip(shape, saved[3], recomputed[3], strict=True)
    )


def describe(data: Metadata) -> str:
    """Format a tensor's metadata for an error message.

    Example:
        >>> import torch
        >>> describe(metadata(torch.zeros(2, 3)))
        'float32[2, 3] on cpu, stride (3, 1)'
    """
    shape, dtype, device, stride = data
    place = "no stride" if stride is None else f"stride {stride}"
    return f"{dtype_name(dtype)}{list(shape)} on {device}, {place}"


# Operators that never fill part of what they save: RReLU's noise in evaluation,
# lstsq's residuals of a singular system, the CTC loss's table.
_LEAVES_UNFILLED = frozenset(("rrelu", "lstsq", "ctc_loss"))


class Fingerprints:
    """Fingerprints of the tensors saved by one run of a region, in order.

    Attributes:
        taken: Fingerprints of the tensors saved by operators that have returned.
    """

    __slots__ = ("_operator", "_waiting", "taken")

    def __init__(self) -> None:
        """Create an empty collection of fingerprints."""
        self.taken: list[Fingerprint] = []
        self._waiting: list[Tensor] = []
        self._operator = -1

    def add(self, tensor: Tensor) -> None:
        """Add a tensor that an operator is saving, possibly before computing it."""
        # Each operator creates one autograd node before it saves; node numbers rise.
        operator = node_sequence_number()
        if operator != self._operator:
            self.settle()
            self._operator = operator
        self._waiting.append(tensor)

    def settle(self) -> None:
        """Fingerprint all pending tensors."""
        if self._waiting:
            with without_modes():
                self.taken += map(_fingerprint, self._waiting)
            self._waiting.clear()


class RecomputedFingerprints(Fingerprints):
    """Fingerprints of recomputed tensors, compared with those of the forward.

    Attributes:
        waited: Whether some operator computed a tensor's content only after saving it.
    """

    __slots__ = ("_compared", "_expected", "_unfilled", "waited")

    def __init__(self, forward: Fingerprints):
        """Prepare to compare with fingerprints of a forward that may still run."""
        super().__init__()
        self._expected = forward.taken
        self._compared = 0
        self._unfilled: set[int] = set()
        self.waited = False

    def add_saved_by(self, caller: CodeType, tensor: Tensor) -> None:
        """Add a tensor saved by an operator that the code object `caller` called."""
        if not _LEAVES_UNFILLED.isdisjoint(caller.co_names):
            self._unfilled.add(len(self.taken) + len(self._waiting))
        self.add(tensor)

    def difference(self) -> int | None:
        """Return the next index where the forward's fingerprint differs, or `None`."""
        start, self._compared = self._compared, len(self.taken)
        return self._first_difference(self.taken[start:], start)

    def is_filled(self) -> bool:
        """Return whether the current operator has computed all tensors it saved."""
        with without_modes():
            now = [_fingerprint(tensor) for tensor in self._waiting]
        if self._first_difference(now, len(self.taken)) is not None:
            self.waited = True
            return False
        return True

    def _first_difference(self, taken: list[Fingerprint], start: int) -> int | None:
        for index, both in enumerate(zip(taken, self._expected[start:], strict=False)):
            differ = both[0] != both[1] and SKIPPED not in both
            if differ and start + index not in self._unfilled:
                return start + index
        return None


def _fingerprint(tensor: Tensor) -> Fingerprint:
    # FSDP may have freed a parameter since it was saved; `content_of` allows for it.
    return SKIPPED if may_be_a_workspace(tensor) else content_of(tensor)


class Contents:
    """Fingerprints of several tensors, to detect writes between two points in time."""

    __slots__ = ("_noted",)

    def __init__(self, tensors: Iterable[Tensor]):
        """Fingerprint `tensors`, and record their versions and addresses."""
        with without_modes():
            self._noted = [
                (tensor, version_of(tensor), address_of(tensor), content_of(tensor))
                for tensor in tensors
            ]

    def silently_written(self) -> list[Tensor]:
        """Return tensors whose content changed although version and storage did not."""
        with without_modes():
            return [
                tensor
                for tensor, version, address, content in self._noted
                if version_of(tensor) == version
                and address_of(tensor) == address
                and has_changed(tensor, content)
            ]


Names = dict[int, str]


class Watch(Observer):
    """An observer that raises when an operator reads a changed storage."""

    def __init__(self, changed: Names, rewritten: Names):
        """Create an observer of storages that the region or other code changed.

        Args:
            changed: Names, by address, of storages changed outside the region.
            rewritten: Names, by address, of storages that the region itself changed.
        """
        self.changed = changed
        self.rewritten = rewritten
        self.settled: set[int] = set()  # Of these, what a write has left unchanged.
        self.versions: list[tuple[Tensor, int]] = []

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator, but raise if it would read a changed storage."""
        if is_view_operator(operator):
            return operator(*args, **kwargs)
        operands = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        addresses = {address_of(t) for t in operands}
        hit = addresses & self.changed.keys()
        if hit:
            raise changed_error([self.changed[address] for address in sorted(hit)])
        if addresses.isdisjoint(self.rewritten):
            return operator(*args, **kwargs)
        return self._rewrite(operator, args, kwargs, addresses)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Restore the version counters of tensors rewritten with the same content."""
        super().__exit__(kind, error, trace)
        for tensor, version in reversed(self.versions):
            set_versions([tensor], [version])

    def _rewrite(self, func: Any, args: Any, kwargs: Any, addresses: set[int]) -> Any:
        written = [
            tensor
            for tensor in written_arguments(func, args, kwargs)
            if address_of(tensor) in self.rewritten
        ]
        restored = self.settled | {address_of(tensor) for tensor in written}
        for address in (addresses & self.rewritten.keys()) - restored:
            raise rewritten_error(self.rewritten[address])
        copies = [(tensor.detach(), tensor.detach().clone()) for tensor in written]
        self.versions += [(tensor, tensor._version) for tensor in written]
        result = func(*args, **kwargs)
        changed = [(old, new) for new, old in copies if not same_bytes(old, new)]
        for old, new in changed:
            new.copy_(old)
        for _, new in changed:
            raise rewritten_error(self.rewritten[address_of(new)])
        self.settled = restored
        return result
