"""Row A12: inside `torch.compile` a region keeps what it keeps outside.

What is kept is counted in the matrix products of the compiled backward: those of the
gradients, and one for each product of the forward that is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpointing
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import membudget as mb
from membudget import compat
from tests.compiled import MARKS
from tests.keeps import VERIFIES  # noqa: F401

pytestmark = MARKS

aten = torch.ops.aten
SAVE, RECOMPUTE = compat.CheckpointPolicy.MUST_SAVE, compat.CheckpointPolicy.PREFER_RECOMPUTE
PRODUCTS = {aten.mm.default, aten.addmm.default}


class Block(nn.Module):
    """Two layers, of which the forward makes two products, the backward four."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).sin()


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
