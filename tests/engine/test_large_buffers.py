"""A large buffer is put back for a recompute where its version says it was written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import membudget as mb

ELEMENTS = 20_000  # 80 KB: small buffers are put back in any case.


class Averaged(nn.Module):
    """Keeps a moving average of its input, and multiplies by it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(ELEMENTS))
        self.register_buffer("mean", torch.ones(ELEMENTS))
        self.register_buffer("mask", torch.ones(ELEMENTS))
        self.mean: Tensor
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach(), alpha=0.1)
        return (x * self.scale * self.mean * self.mask).sin()


@pytest.mark.parametrize("verify", [True, False])
def test_a_large_buffer_that_the_forward_writes_is_advanced_once_a_step(verify: bool):
    plain = Averaged()
    region = copy.deepcopy(plain)
    for number in range(4):
        torch.manual_seed(number)
        x = torch.randn(ELEMENTS)
        plain(x).sum().backward()
        mb.checkpoint(region, x, engine="rerun", verify=verify).sum().backward()

        assert torch.equal(region.mean, plain.mean)
        assert region.scale.grad is not None
        assert plain.scale.grad is not None
        assert torch.equal(region.scale.grad, plain.scale.grad)
