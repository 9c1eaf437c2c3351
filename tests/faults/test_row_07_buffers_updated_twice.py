"""Row 7: a buffer that the forward advances is advanced by the recompute again.

The running statistics of BatchNorm are the known case; moving averages and counters
are others. Gradients in training mode do not depend on them, so no loss shows it
until the model is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    buffers,
    gradients,
    ours,
    plain,
    torch_fails,
    torch_rerun,
)


class Counter(nn.Module):
    """Keeps a moving average of what passes, and counts the calls."""

    average: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        # A new tensor takes the buffer's place here, where the average is written to.
        self.calls = self.calls + 1
        return x * 2


def conv_norm_relu_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    )


def norm_at_the_end() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def average_and_counter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), Counter(), nn.Conv2d(4, 4, 3))


every_model = pytest.mark.parametrize(
    "make_model", [conv_norm_relu_conv, norm_at_the_end, average_and_counter]
)


def three_steps(
    checkpoint: Checkpoint, make_model: Callable[[], nn.Module]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Train for three steps; return the last gradients, and the buffers."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        checkpoint(model, torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return gradients(model), buffers(model)


@every_model
def test_row07_buffers_hold_one_update_for_each_step(
    make_model: Callable[[], nn.Module],
) -> None:
    assert are_equal(three_steps(ours, make_model), three_steps(plain, make_model))


@torch_fails
@every_model
def test_row07_torch_updates_buffers_twice(make_model: Callable[[], nn.Module]) -> None:
    found_gradients, found = three_steps(torch_rerun, make_model)
    expected_gradients, expected = three_steps(plain, make_model)

    assert are_equal(found_gradients, expected_gradients)  # So no loss shows it.
    assert not are_equal(found, expected)


@torch_fails
def test_row07_torch_counts_six_batches_in_three_steps() -> None:
    found = three_steps(torch_rerun, conv_norm_relu_conv)[1]

    assert found["1.num_batches_tracked"].item() == 6
