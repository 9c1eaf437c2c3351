"""A profile's gradients take the bytes that they take in the plain step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb


class Of(nn.Module):
    """The sum of a function of a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.rand(1, 3, 16, 16) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.w * x).sum()


def circular(h: Tensor) -> Tensor:
    return F.pad(h, (2, 2, 2, 2), "circular")


def written_in_parts(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    for row in range(h.shape[-1]):
        made[..., row] = h[..., row].sin()
    return made


def used_twice(h: Tensor) -> Tensor:
    return circular(h) + circular(h).flip(-1)


def signs(h: Tensor) -> Tensor:
    return h.sgn()


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    "function",
    [circular, written_in_parts, used_twice, signs],
    ids=lambda f: f.__name__,
)
def test_gradients_take_the_bytes_of_the_plain_step(function, fake):
    model, x = Of(function), torch.ones(1)
    for _ in range(2):
        model.zero_grad()
        measured = mb.peak(lambda: model(x).backward())
    model.zero_grad()

    found = mb.profile(model, x, fake=fake)

    assert found.peak_bytes == measured.peak_bytes
