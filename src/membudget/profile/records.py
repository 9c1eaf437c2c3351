"""What a recorder notes while a step runs; `assemble` makes the graph of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from membudget._torch import tree_iter
from membudget.graph import Kind, Phase


@dataclass(slots=True)
class RecordedOperator:
    """An operator while the step is recorded; see `graph.Operator`."""

    operator: Any
    phase: Phase
    place: tuple[str, str]
    node: int | None
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    flops: int = 0
    nanoseconds: int = 0
    workspace_bytes: int = 0


@dataclass(slots=True)
class RecordedValue:
    """A content; see `graph.Value`."""

    storage: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: int
    output: int


@dataclass(slots=True)
class RecordedStorage:
    """A storage, and how many tensors look at it; see `graph.Storage`."""

    bytes: int
    kind: Kind
    name: str
    birth: int
    death: int | None = None
    released: int | None = None
    tensors: int = 0


@dataclass(slots=True)
class RecordedSaved:
    """A tensor that autograd keeps; see `graph.Saved`."""

    value: int
    moment: int
    place: tuple[str, str]
    asked: list[int] = field(default_factory=list)
    freed: int | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a call saw of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_contiguous(self) -> bool:
        """Tell whether its elements lie one after the other."""
        expected = 1
        for size, stride in zip(
            reversed(self.shape), reversed(self.stride), strict=True
        ):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def is_strided(self) -> bool:
        """Tell whether it is a plain tensor: a sparse one has no strides."""
        return len(self.stride) == len(self.shape)

    def is_matrix(self) -> bool:
        """Tell whether its last two dimensions lie as BLAS takes them."""
        if len(self.shape) < 2:
            return True
        (rows, columns), (down, across) = self.shape[-2:], self.stride[-2:]
        return (across == 1 and down >= columns) or (down == 1 and across >= rows)

    def zeros(self) -> Tensor:
        """Return such a tensor, of zeros."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return tensor.zero_()


@dataclass(slots=True)
class RecordedCall:
    """A call with specs in place of tensors, and the operators that made it."""

    operator: Any
    args: Any
    kwargs: Any
    indices: list[int]

    def specs(self) -> Iterator[TensorSpec]:
        """Yield the specs among the arguments."""
        for leaf in tree_iter((self.args, self.kwargs)):
            if isinstance(leaf, TensorSpec):
                yield leaf
