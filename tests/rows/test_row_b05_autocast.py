"""Row B5: `fit` inside `torch.autocast` plans the step of a loop that enters it.

Casts of parameters are cached until the outermost autocast ends. Under one autocast
around the whole `fit`, the recorded step found the casts of the one before it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.memory import peak

X = torch.randn(256, 64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(64, 1))


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def loop_step(model: nn.Module) -> Tensor:
    """Run the step as a training loop does: it leaves autocast before the backward."""
    model.zero_grad()
    with autocast():
        loss: Tensor = model(X).square().mean()
    loss.backward()
    return loss.detach()


def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("share", ["80%", "60%"])
def test_row_b05_a_fit_inside_autocast_holds_in_the_loop(share: str):
    model = net()
    plain_bytes = peak(loop_step, model).peak_bytes
    expected = loop_step(model)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    with autocast():
        fitted = mb.fit(model, X, share, loss_fn)

    assert fitted.profile.peak_bytes == plain_bytes
    found = peak(loop_step, model)
    assert found.peak_bytes <= fitted.plan.budget_bytes
    assert torch.equal(found.result, expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)
    assert all(not region.differences for region in fitted.status().regions)
