"""Fingerprints of saved tensors, for `determinism_check="values"`.

A fingerprint reads the bytes of a tensor, so it must not be taken before they are
there. Some operators save a tensor first and fill it later (RReLU its noise), but none
after it has ended: the tensors of one operator wait until another one saves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from membudget._torch import node_sequence_number

Fingerprint = tuple[int, int]

_CHUNK = 1 << 20
_SKIPPED = (0, 0)


class Fingerprints:
    """The fingerprints of the tensors that one run saves, in order.

    Attributes:
        taken: Those of operators that have ended.
    """

    __slots__ = ("_operator", "_waiting", "taken")

    def __init__(self) -> None:
        """Begin with none."""
        self.taken: list[Fingerprint] = []
        self._waiting: list[Tensor] = []
        self._operator = -1

    def add(self, tensor: Tensor) -> None:
        """Note a tensor that an operator is saving, before or after it fills it."""
        # Each operator makes one node, before it saves, and numbers rise with nodes.
        operator = node_sequence_number()
        if operator != self._operator:
            self.settle()
            self._operator = operator
        self._waiting.append(tensor)

    def settle(self) -> None:
        """Take the fingerprints that are still to be taken."""
        self.taken += [
            _SKIPPED if _may_be_a_workspace(tensor) else fingerprint(tensor)
            for tensor in self._waiting
        ]
        self._waiting.clear()


def _may_be_a_workspace(tensor: Tensor) -> bool:
    """Tell whether it is a vector of bytes.

    oneDNN and cuDNN keep their workspaces so, and leave parts of them unfilled.
    """
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Fingerprint:
    """Return two sums over the bits of a tensor, the second weighted by position.

    Both wrap at 64 bits. Equal tensors have equal fingerprints; changing one element or
    exchanging two different ones changes it. It reads every byte once and waits for
    the device.

    Example:
        >>> a = torch.tensor([1.0, 2.0])
        >>> fingerprint(a) == fingerprint(a.clone()), fingerprint(a) == fingerprint(-a)
        (True, False)
        >>> fingerprint(a) == fingerprint(a.flip(0))
        False
    """
    if (
        tensor.layout is not torch.strided
        or tensor.is_meta
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    ):
        return _SKIPPED
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = raw.reshape(-1).view(torch.uint8)
    total = weighted = 0
    for start in range(0, data.numel(), _CHUNK):
        chunk = data[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=data.device)
        total += int(chunk.sum())
        # An odd multiplier spreads neighbouring positions over all the bits.
        weighted += int((chunk * (place * 0x9E3779B1)).sum())
    mask = (1 << 64) - 1
    return total & mask, weighted & mask
