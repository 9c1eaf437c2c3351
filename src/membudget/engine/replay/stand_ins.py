"""Stand-ins for arguments whose content an operator does not read.

A replay makes the argument from its stand-in, so the tape does not keep the argument,
and does not recompute it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Scratch:
    """An overwritten argument whose old content does not affect any output."""

    __slots__ = ("options", "shape", "stride")

    def __init__(self, tensor: Tensor):
        """Store geometry, dtype and device, by which a kernel may be chosen."""
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}

    def made(self) -> Tensor:
        """Return memory to overwrite."""
        return torch.empty_strided(self.shape, self.stride, **self.options).zero_()


class Outline:
    """An argument of which an operator reads only the shape, strides and dtype."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, tensor: Tensor):
        """Store what the operator reads."""
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype = tensor.dtype

    def made(self) -> Tensor:
        """Return a tensor that takes no memory."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device="meta"
        )
