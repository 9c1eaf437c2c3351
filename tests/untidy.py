"""A module that leaves nothing as it was."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.devices import default_device


class Untidy(nn.Module):
    """A block whose forward changes whatever a module can hold."""

    mean: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("late", None)
        self.calls = 0
        self.halves: list[float] = []
        self.table: dict[str, Any] = {"inner": [1]}
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.known = {1}
        self.loose = torch.zeros(4)
        self.generator = torch.Generator(default_device())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.halves.append(self.calls / 2)
        self.table["new"] = x
        self.table["inner"].append(2)
        self.recent.append(self.calls)
        self.known.add(self.calls + 1)
        self.last = x
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.loose.add_(1)
        self.replaced = self.replaced + 1
        self.late = torch.ones(1)
        self.train(not self.training)
        noise = torch.rand(4, generator=self.generator) * random.random()
        noise = noise * torch.rand(4) * np.random.rand()  # noqa: NPY002
        return self.norm(torch.tanh(self.linear(x))) * noise
