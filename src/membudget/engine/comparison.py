"""Is a recomputed tensor the one that was saved? Metadata, fingerprints, bytes.

Comparing metadata is on the hot path of every recompute. Fingerprints are compared in
verified calls, or in all calls with `determinism_check="values"`. A fingerprint must
not be taken before the tensor is filled: some operators save a tensor first and fill it
later (RReLU its noise), but none after it has returned. So the tensors of one operator
wait until another operator saves.
"""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch import Tensor

from membudget._torch import node_sequence_number, without_modes
from membudget.state.bits import (
    SKIPPED,
    Fingerprint,
    content_of,
    has_bits,
    may_be_a_workspace,
)

Metadata = tuple[Any, ...]


def metadata(tensor: Tensor) -> Metadata:
    """Return shape, dtype, device and stride."""
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
    except (RuntimeError, NotImplementedError):  # A sparse tensor has no stride.
        return (tensor.shape, tensor.dtype, tensor.device, None)


def same_metadata(saved: Metadata, recomputed: Metadata) -> bool:
    """Compare metadata that are not equal at first sight.

    The stride of a dimension of one element, or of an empty tensor, has no effect, and
    kernels set it differently.
    """
    if saved[:3] != recomputed[:3] or saved[3] is None or recomputed[3] is None:
        return False
    shape = saved[0]
    return 0 in shape or all(
        size == 1 or a == b
        for size, a, b in zip(shape, saved[3], recomputed[3], strict=True)
    )


def describe(data: Metadata) -> str:
    """Format metadata for a message.

    Example:
        >>> import torch
        >>> describe(metadata(torch.zeros(2, 3)))
        'float32[2, 3] on cpu, stride (3, 1)'
    """
    shape, dtype, device, stride = data
    name = str(dtype).removeprefix("torch.")
    place = "no stride" if stride is None else f"stride {stride}"
    return f"{name}{list(shape)} on {device}, {place}"


# Operators that leave part of what they save unfilled: RReLU its noise in evaluation,
# lstsq the residuals of a singular system, the CTC loss its table.
_LEAVES_UNFILLED = frozenset(("rrelu", "lstsq", "ctc_loss"))


class Fingerprints:
    """The fingerprints of the tensors that one run saves, in order.

    Attributes:
        taken: The fingerprints so far, of operators that have returned.
    """

    __slots__ = ("_operator", "_waiting", "taken")

    def __init__(self) -> None:
        """Start with none."""
        self.taken: list[Fingerprint] = []
        self._waiting: list[Tensor] = []
        self._operator = -1

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that an operator is saving, filled or not."""
        # Each operator creates one autograd node before it saves, and node numbers
        # rise.
        operator = node_sequence_number()
        if operator != self._operator:
            self.settle()
            self._operator = operator
        self._waiting.append(tensor)

    def settle(self) -> None:
        """Take the fingerprints that are pending."""
        if self._waiting:
            with without_modes():
                self.taken += map(_fingerprint, self._waiting)
            self._waiting.clear()


class RecomputedFingerprints(Fingerprints):
    """The fingerprints of a recompute, compared with those of its forward.

    Attributes:
        waited: Whether an operator filled a tensor after saving it.
    """

    __slots__ = ("_compared", "_expected", "_unfilled", "waited")

    def __init__(self, forward: Fingerprints):
        """Compare with the fingerprints that `forward` has taken by then."""
        super().__init__()
        self._expected = forward.taken
        self._compared = 0
        self._unfilled: set[int] = set()
        self.waited = False

    def add_saved_by(self, caller: CodeType, tensor: Tensor) -> None:
        """Note a tensor that an operator called by Python code `caller` saves."""
        if not _LEAVES_UNFILLED.isdisjoint(caller.co_names):
            self._unfilled.add(len(self.taken) + len(self._waiting))
        self.add(tensor)

    def difference(self) -> int | None:
        """Return the index of the first difference not reported before."""
        start, self._compared = self._compared, len(self.taken)
        return self._first_difference(self.taken[start:], start)

    def is_filled(self) -> bool:
        """Tell whether the saving operator has filled what it saved so far."""
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


def same_bits(original: Tensor, replayed: Tensor | None) -> bool:
    """Tell whether two tensors have the same bytes in the same layout."""
    if replayed is None or original.shape != replayed.shape:
        return False
    if original.dtype is not replayed.dtype or _layout(original) != _layout(replayed):
        return False
    if not has_bits(original) or may_be_a_workspace(original):
        return True
    return torch.equal(_bytes(original), _bytes(replayed))


def _layout(tensor: Tensor) -> Any:
    """Return what, besides shape and dtype, selects a kernel's algorithm."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.layout
    if not tensor.numel():
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [stride for size, stride in sizes if size > 1]
    return tensor.is_conj(), tensor.is_neg(), strides


def _bytes(tensor: Tensor) -> Tensor:
    # Clone, because a tensor of one element may have a stride that `view` refuses.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(-1).view(torch.uint8)
