"""The device trains, computes what the CPU computes, and says what a GPU says."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(2, 5, 8)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


def convolutions(groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=groups),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 3),
    )


IMAGE, WORDS = (2, 4, 8, 8), (2, 5, 8)

EQUAL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU()), WORDS),
    "convolutions": (convolutions, IMAGE),
    "groups": (lambda: convolutions(groups=2), IMAGE),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), WORDS),
    "mish": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Mish()), WORDS),
    "silu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.SiLU()), WORDS),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
}
CLOSE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, WORDS),
    "lstm": (lambda: Recurrent(nn.LSTM), WORDS),
    "gru": (lambda: Recurrent(nn.GRU), WORDS),
}


def trained(model: nn.Module, x: Tensor, exactly: bool) -> list[Tensor]:
    """Return parameters, gradients and buffers after two steps, on the CPU."""
    # Adam divides by what may be rounding alone.
    make = torch.optim.AdamW if exactly else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [
        t.detach().cpu() for t in (*model.parameters(), *gradients, *model.buffers())
    ]


def trained_on_both(
    make: Callable[[], nn.Module], shape: tuple[int, ...], exactly: bool
) -> list[tuple[Tensor, Tensor]]:
    model, x = make(), torch.randn(shape)
    there = trained(copy.deepcopy(model).to("emu"), x.to("emu"), exactly)
    return list(zip(trained(model, x, exactly), there, strict=True))


@pytest.mark.parametrize("name", EQUAL)
def test_training_gives_the_bits_of_the_cpu(name: str):
    for here, there in trained_on_both(*EQUAL[name], exactly=True):
        assert torch.equal(here, there)


@pytest.mark.parametrize("name", CLOSE)
def test_where_its_kernels_are_others_training_differs_by_rounding(name: str):
    for here, there in trained_on_both(*CLOSE[name], exactly=False):
        torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-4)
