"""Undo a micro-batch that ran out of memory: gradients, buffers, random streams."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module

from membudget.state.identity import TensorCopy, host_copy, write_back
from membudget.state.snapshot import State


class BatchUndo:
    """What forward and backward change in models, as it was before.

    Gradients and buffers are copied to the host; parameters are not, because only the
    optimizer writes them.
    """

    def __init__(self, models: Iterable[Module]):
        """Note the state of the models, and of all random streams."""
        roots = [(f"model {number}", model) for number, model in enumerate(models)]
        self._objects = State(roots, contents=False)
        self._leaves: list[tuple[Tensor, Tensor | None]] = []
        self._written: list[tuple[Tensor, TensorCopy]] = []
        for _, model in roots:
            for parameter in model.parameters():
                self._leaves.append((parameter, parameter.grad))
                if parameter.grad is not None:
                    self._copy(parameter.grad)
            for buffer in model.buffers():
                self._copy(buffer)

    def _copy(self, tensor: Tensor) -> None:
        self._written.append((tensor, host_copy(tensor)))

    @torch.no_grad()
    def undo(self) -> None:
        """Bring everything back; the gradients are the tensors that they were."""
        self._objects.restore()
        for parameter, gradient in self._leaves:
            parameter.grad = gradient
        for tensor, copy in self._written:
            write_back(tensor, copy)
