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


class Hidden(nn.Module):
    """Advances a moving average behind its version counter, beside other buffers."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.norm = nn.BatchNorm1d(ELEMENTS)
        self.register_buffer("mean", torch.ones(ELEMENTS))
        self.register_buffer("mask", torch.ones(ELEMENTS))
        self.mean: Tensor
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (self.norm(x) * self.mean * self.mask).sin()


def test_large_statistics_and_a_large_buffer_written_unseen_advance_once_a_step():
    plain = Hidden(writes=True)
    region = copy.deepcopy(plain)
    for number in range(4):
        torch.manual_seed(number)
        x = torch.randn(2, ELEMENTS)
        plain(x).sum().backward()
        mb.checkpoint(region, x, engine="rerun").sum().backward()

        for buffer, expected in zip(region.buffers(), plain.buffers(), strict=True):
            assert torch.equal(buffer, expected)
        for parameter, expected in zip(
            region.parameters(), plain.parameters(), strict=True
        ):
            assert parameter.grad is not None
            assert expected.grad is not None
            assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.parametrize(("writes", "copies"), [(False, 2), (True, 4)])
def test_the_copy_of_a_large_buffer_is_kept_only_where_one_is_written_unseen(
    writes: bool, copies: int
):
    region = Hidden(writes)
    x = torch.randn(2, ELEMENTS)
    for _ in range(2):
        output = mb.checkpoint(region, x, engine="rerun")
        output.sum().backward()
    found = mb.peak(mb.checkpoint, region, x, engine="rerun")

    kept_bytes = found.end_bytes - found.result.nbytes
    # The two statistics, and with `writes` both other buffers; the rest is small.
    assert copies * 4 * ELEMENTS <= kept_bytes < copies * 4 * ELEMENTS + 8000
