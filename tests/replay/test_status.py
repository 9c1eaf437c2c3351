"""What `status()` says of regions under the replay engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.devices import array


class Doubled(torch.autograd.Function):
    """Doubles its input by a kernel that the dispatcher does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        doubled = torch.zeros_like(x)
        array(doubled)[:] = array(x.detach()) * 2
        ctx.save_for_backward(doubled)
        return doubled.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (doubled,) = ctx.saved_tensors
        return gradient * doubled / doubled * 2


class Block(nn.Module):
    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (Doubled.apply(x) if self.hidden else x).tanh()


def test_status_counts_what_is_kept() -> None:
    model = nn.Sequential(Block(False), Block(True))
    applied = mb.apply(model, blocks=Block, engine="replay")
    with pytest.warns(mb.UnrepeatableWarning, match="did not reproduce"):
        model(torch.randn(2, 4)).sum().backward()
    model(torch.randn(2, 4)).sum().backward()

    status = applied.status()

    assert [r.unrepeatable for r in status.regions] == [0, 1]
    assert [r.forwards for r in status.regions] == [2, 2]
    assert [r.recomputes for r in status.regions] == [2, 2]
    assert "1 values did not reproduce" in str(status)
