"""A module that computes something else where it is asked to."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Changing(nn.Module):
    """A linear layer, and what `changes` names: one thing that a step computes."""

    def __init__(self, width: int, changes: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor
        self.cache = torch.zeros(2)
        self.changes = changes

    def changed(self, output: Tensor) -> Tensor:
        """Return an output, changed if that is asked for; or change something else."""
        if self.changes == "loss":
            output = output + 1
        if self.changes == "gradient":
            output = output + (output - output.detach())
        if self.changes == "buffer":
            self.count.add_(1)
        if self.changes == "attribute":
            self.cache += 1
        if self.changes == "stream":
            torch.rand(())
        return output
