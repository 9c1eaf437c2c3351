"""Row C9: backward passes that differentiate a graph of their own and retain it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import membudget as mb


class Inner(torch.autograd.Function):
    """Runs a function again in the backward, as adjoints of solvers do."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        """Call the function without a graph."""
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            result: Tensor = function(x)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Differentiate a new graph, and retain it."""
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.function(x)
            found = torch.autograd.grad(
                y, [x, *parameters], gradients, retain_graph=True
            )
        return None, *found


class Blocks(nn.Module):
    """Blocks, each called in its way."""

    def __init__(self, way: str):
        """Make three blocks."""
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Call one block after the other."""
        for block in self.blocks:
            if self.way == "retained":
                x = Inner.apply(block, x, *block.parameters())
            else:
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=self.way == "reentrant",
                    preserve_rng_state=False,
                )
        return x.square().mean()


@pytest.mark.parametrize("way", ["retained", "reentrant", "rerun"])
def test_row_c09_a_graph_inside_the_backward_takes_what_it_takes_in_the_plain_step(
    way: str,
) -> None:
    torch.manual_seed(0)
    model, x = Blocks(way), torch.randn(128, 16, requires_grad=True)
    found = mb.profile(model, x)

    def step() -> None:
        model.zero_grad()
        x.grad = None
        model(x).backward()

    step()
    model.zero_grad()
    x.grad = None
    assert found.peak_bytes == mb.peak(step).peak_bytes


def test_row_c09_twice_the_plain_peak_is_enough() -> None:
    model = Blocks("retained")
    with mb.fit(model, torch.randn(128, 16, requires_grad=True), "100%") as fitted:
        assert not fitted.plan.regions
