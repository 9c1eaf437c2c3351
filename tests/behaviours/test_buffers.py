"""Behaviours 108-110: what a forward advances is advanced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import membudget as mb
from tests.behaviours.steps import Region, differences, region_with


class MovingAverage(nn.Module):
    """Divides by a moving average of what it has seen, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.average: Tensor
        self.steps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().abs().mean(0), alpha=0.1)
            self.steps += 1
        return (x / self.average.clone()).sin()


class Rebinding(nn.Module):
    """Binds its buffer anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.largest: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().amax())
        return (x / self.largest).sin()


class Router(nn.Module):
    """Sends rows to experts, and moves a bias towards those who got fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.register_buffer("bias", torch.zeros(3))
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = (scores.detach() + self.bias).argmax(-1)
        self.bias -= 0.5 * (F.one_hot(chosen, 3).float().mean(0) - 1 / 3)
        parts = [
            scores[chosen == i, i, None] * expert(x[chosen == i])
            for i, expert in enumerate(self.experts)
        ]
        return torch.cat(parts)


def batch_norm_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6))


def batch_norm_last() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6))


def spectral_normalised() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh())


STATEFUL = [
    batch_norm_inside,
    batch_norm_last,
    lambda: nn.BatchNorm1d(6, momentum=None),
    MovingAverage,
    Rebinding,
    Router,
    spectral_normalised,
]
IDS = [
    "batch_norm_inside",
    "batch_norm_last",
    "cumulative_batch_norm",
    "moving_average",
    "rebinding",
    "router",
    "spectral_norm",
]

Make = Callable[[], nn.Module]


def three_steps(make: Make, train: bool = True) -> Callable[[Region], Any]:
    """Return a step that trains what `make` returns three times."""

    def step(region: Region) -> Any:
        model = make().train(train)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            x = torch.randn(8, 6, requires_grad=True)
            loss = region(model, x).square().sum()
            loss.backward()
            optimizer.step()
            losses += [loss, x.grad]
        return model, losses

    return step


def after_a_layer(make: Make) -> Make:
    """Put a layer before what `make` returns, so that there is something to train."""
    return lambda: nn.Sequential(nn.Linear(6, 6), make())


# torch 2.13 runs the forward twice and advances every buffer twice.
@pytest.mark.parametrize("options", [{}, {"early_stop": False}], ids=["early", "whole"])
@pytest.mark.parametrize("make", STATEFUL, ids=IDS)
def test_b108_buffers_advance_once(make: Make, options: dict[str, Any]) -> None:
    step = three_steps(after_a_layer(make))
    assert differences(step, region_with(**options)) == []


# torch 2.13: as above.
@pytest.mark.parametrize("make", STATEFUL, ids=IDS)
def test_b108_buffers_advance_once_over_two_backwards(make: Make) -> None:
    def step(region: Region) -> Any:
        model, x = make(), torch.randn(8, 6, requires_grad=True)
        loss = region(model, x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return model, x

    assert differences(step) == []


# torch 2.13: as above.
@pytest.mark.parametrize("make", STATEFUL, ids=IDS)
def test_b108_buffers_advance_once_in_nested_regions(make: Make) -> None:
    def step(region: Region) -> Any:
        first, second = make(), make()
        x = torch.randn(8, 6, requires_grad=True)
        y = region(lambda x: region(second, region(first, x).sin()).cos(), x)
        y.sum().backward()
        return first, second, x

    assert differences(step) == []


# torch 2.13: as above.
@pytest.mark.parametrize("make", STATEFUL, ids=IDS)
def test_b108_a_module_used_in_two_regions_advances_twice(make: Make) -> None:
    def step(region: Region) -> Any:
        model, x = make(), torch.randn(8, 6, requires_grad=True)
        y = region(model, region(model, x).sin())
        y.sum().backward()
        return model, x

    assert differences(step) == []


# torch 2.13: as above.
def test_b108_micro_batches_advance_once_each_whatever_the_order_of_backwards() -> None:
    def step(region: Region) -> Any:
        model = batch_norm_inside()
        inputs = [torch.randn(8, 6, requires_grad=True) for _ in range(3)]
        losses = [region(model, x).square().sum() for x in inputs]
        for i in (1, 2, 0):
            losses[i].backward()
        return model, inputs

    assert differences(step) == []


# torch 2.13: as above. Wide: 20,000 channels hold more than a cautious copy would.
def test_b108_wide_statistics_advance_once() -> None:
    def step(region: Region) -> Any:
        model = nn.BatchNorm1d(20_000)
        x = torch.randn(3, 20_000, requires_grad=True)
        region(lambda x: model(x).sin(), x).sum().backward()
        return model, x

    assert differences(step) == []


def test_b108_a_forward_without_backward_advances_once() -> None:
    def step(region: Region) -> Any:
        model = batch_norm_inside()
        y = region(model, torch.randn(8, 6))
        with torch.no_grad():
            z = region(model, torch.randn(8, 6))
        return model, y, z

    assert differences(step) == []


# torch 2.13: as above; and the second recompute starts from what the first left.
def test_b108_a_recompute_that_fails_leaves_the_buffers() -> None:
    model = batch_norm_inside()
    calls = []

    def failing(x: Tensor) -> Tensor:
        y: Tensor = model(x).exp()
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the valve is stuck")
        return y.exp()

    loss = mb.checkpoint(failing, torch.randn(8, 6), engine="rerun").sum()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ValueError, match="stuck"):
        loss.backward()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize("make", [batch_norm_inside, batch_norm_last, MovingAverage])
def test_b109_buffers_in_eval_mode_are_not_touched(make: Make) -> None:
    model = make().eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.randn(8, 6, requires_grad=True)
    mb.checkpoint(model, x).sum().backward()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    step = three_steps(after_a_layer(make), train=False)
    assert differences(step) == []
