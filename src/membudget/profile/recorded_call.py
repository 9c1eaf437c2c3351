"""Distinct calls of operators, with layouts in the place of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from membudget._torch import tree_iter


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and dtype of a tensor argument, which tell calls apart.

    Its offset in its storage does not; it is that of the first such call.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = field(default=0, compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the layout of a tensor."""
        strided = tensor.layout is torch.strided
        stride = tuple(tensor.stride()) if strided else ()
        offset = int(tensor.storage_offset()) if strided else 0
        return cls(tuple(tensor.shape), stride, tensor.dtype, offset)

    def is_contiguous(self) -> bool:
        """Return whether the elements are contiguous in row-major order."""
        expected = 1
        for size, stride in zip(
            reversed(self.shape), reversed(self.stride), strict=True
        ):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def is_strided(self) -> bool:
        """Return whether the tensor has strides; sparse tensors have none."""
        return len(self.stride) == len(self.shape)

    def is_matrix(self) -> bool:
        """Return whether BLAS can read the last two dimensions without a copy."""
        if len(self.shape) < 2:
            return True
        (rows, columns), (down, across) = self.shape[-2:], self.stride[-2:]
        return (across == 1 and down >= columns) or (down == 1 and across >= rows)

    def extent(self) -> tuple[int, int]:
        """Return where the tensor begins and ends in its storage, in bytes."""
        steps = zip(self.shape, self.stride, strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        count, size = 0 if 0 in self.shape else last + 1, self.dtype.itemsize
        return self.offset * size, (self.offset + count) * size

    def within(self, memory: Tensor, start_bytes: int) -> Tensor:
        """Return the tensor in memory on the CPU that begins so far in its storage."""
        offset = self.offset - start_bytes // self.dtype.itemsize
        storage = memory.untyped_storage()
        empty = memory.new_empty(0, dtype=self.dtype)
        return empty.set_(storage, offset, self.shape, self.stride)


@dataclass(slots=True)
class RecordedCall:
    """A distinct operator call, with the op indices at which the call occurs."""

    operator: Any
    args: Any
    kwargs: Any
    indices: list[int]

    def specs(self) -> Iterator[TensorSpec]:
        """Yield the layouts of the tensors among the call's arguments."""
        for leaf in tree_iter((self.args, self.kwargs)):
            if isinstance(leaf, TensorSpec):
                yield leaf
