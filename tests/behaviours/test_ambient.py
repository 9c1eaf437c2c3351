"""Behaviours 38-42: a recomputation runs under the settings of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import membudget as mb
from tests.behaviours.steps import Block, Region, differences, perceptron, plain
from tests.devices import device_type


def autocast_state() -> tuple[Any, ...]:
    """Return what autocast is set to on the device."""
    return (
        torch.is_autocast_enabled(device_type()),
        torch.get_autocast_dtype(device_type()),
        torch.is_autocast_cache_enabled(),
    )


def states_seen(
    forward: Callable[[], Any], backward: Callable[[], Any]
) -> list[tuple[Any, ...]]:
    """Run a region under two contexts; return its autocast state in each run."""
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(autocast_state())
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    with forward():
        y = mb.checkpoint(function, x)
    with backward():
        y.sum().backward()
    return seen


def off() -> Any:
    """Return a context in which autocast is off."""
    return torch.autocast(device_type(), enabled=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_b38_recomputation_runs_under_the_autocast_of_the_forward(
    dtype: torch.dtype, cache_enabled: bool
) -> None:
    forward, recomputation = states_seen(
        lambda: torch.autocast(device_type(), dtype=dtype, cache_enabled=cache_enabled),
        off,
    )
    assert forward == (True, dtype, cache_enabled)
    assert recomputation == forward


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("around_backward", [True, False])
def test_b38_gradients_under_autocast_equal_the_plain_ones(
    cache_enabled: bool, around_backward: bool
) -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.2), torch.randn(2, 5, 8, requires_grad=True)
        with torch.autocast(device_type(), torch.bfloat16, cache_enabled=cache_enabled):
            # The same weights out of a region, in one, and in another: the cache of
            # casts is warm in different ways in forward and recomputation.
            h = region(model, region(model, model(x)))
            loss = h.float().square().sum()
            if around_backward:
                loss.backward()
        if not around_backward:
            loss.backward()
        return h, model, x

    assert differences(step) == []


def test_b39_autocast_around_the_backward_does_not_leak_in() -> None:
    forward, recomputation = states_seen(off, lambda: torch.autocast(device_type()))
    assert not forward[0]
    assert recomputation == forward


def test_b39_another_autocast_around_the_backward_is_as_it_was_afterwards() -> None:
    x = torch.randn(3, requires_grad=True)
    y = mb.checkpoint(lambda x: x.sin().exp(), x)
    with torch.autocast(device_type(), torch.float16, cache_enabled=False):
        before = autocast_state()
        y.sum().backward()
        assert autocast_state() == before


def test_b39_gradients_equal_the_plain_ones_with_autocast_around_backward_only() -> (
    None
):
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)
        y = region(model, x)
        with torch.autocast(device_type(), torch.bfloat16):
            y.square().sum().backward()
        return y, model, x

    assert differences(step) == []


@pytest.mark.parametrize("around_region", [True, False])
def test_b40_autocast_may_be_switched_off_inside_the_region(
    around_region: bool,
) -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)
        seen = []

        def function(x: Tensor) -> Tensor:
            low = model(x)
            with off():
                high = model(low.float())
            seen.append((autocast_state(), low.dtype, high.dtype))
            return low.float() * high

        with torch.autocast(device_type(), enabled=around_region):
            y = region(function, x)
        y.sum().backward()
        assert seen == seen[:1] * len(seen)
        return y, model, x

    assert differences(step) == []


DEVICES: list[tuple[str | None, str | None]] = [
    ("cpu", "meta"),
    ("meta", "cpu"),
    ("meta", None),
    (None, "meta"),
]


@pytest.mark.parametrize(("forward", "backward"), DEVICES)
def test_b41_the_default_device_of_the_forward_is_used_again(
    forward: str | None, backward: str | None
) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    with torch.device(forward or "cpu"):
        y = mb.checkpoint(function, x) if forward else None
    y = y if y is not None else mb.checkpoint(function, x)
    loss = y.sum()
    if backward:
        with torch.device(backward):
            loss.backward()
    else:
        loss.backward()
    assert seen == [forward or device_type()] * 2
    assert x.grad is not None


def test_b41_a_default_device_that_was_set_is_used_again_and_stays_set() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    x = torch.randn(3, requires_grad=True)
    loss = mb.checkpoint(function, x).sum()
    torch.set_default_device("meta")
    try:
        loss.backward()
        assert torch.empty(1).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert seen == [x.device.type] * 2


class Gated(nn.Module):
    """Computes something else in training, of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * (2.0 if self.training else 3.0)
        return h.sin().exp()


CALLS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "module": lambda m: m,
    "child of a module": lambda m: nn.Sequential(m),
    "closed over": lambda m: lambda x: m(x) * 2,
    "bound method": lambda m: m.forward,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("training", [True, False])
def test_b42_a_training_mode_changed_since_the_forward_does_not_matter(
    call: str, training: bool
) -> None:
    # torch 2.13 recomputes in the mode it finds: other numbers of the same shape.
    def step(region: Region) -> Any:
        model, x = Gated().train(training), torch.randn(3, 4, requires_grad=True)
        y = region(CALLS[call](model), x)
        model.train(not training)
        y.sum().backward()
        assert model.training is not training
        assert model.layer.training is not training
        return y, model, x

    assert differences(step) == []


def test_b42_dropout_and_batch_norm_survive_eval_before_the_backward() -> None:
    # torch 2.13 refuses, since fewer tensors are saved in eval().
    def step(region: Region) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        x = torch.randn(6, 4, requires_grad=True)
        y = region(model, x)
        model.eval()
        y.square().sum().backward()
        return y, model, x, [m.training for m in model.modules()]

    assert differences(step) == []


BACKENDS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize("around_forward", BACKENDS)
@pytest.mark.parametrize("around_backward", BACKENDS)
def test_b42_the_attention_backend_of_the_forward_is_used_again(
    around_forward: SDPBackend, around_backward: SDPBackend
) -> None:
    # torch 2.13 recomputes with the backend it finds, and refuses what differs.
    def step(region: Region) -> Any:
        q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
        with sdpa_kernel(around_forward):
            y = region(lambda *qkv: F.scaled_dot_product_attention(*qkv).sin(), q, k, v)
        with sdpa_kernel(around_backward):
            y.sum().backward()
            left = torch.backends.cuda.math_sdp_enabled()
        return y, q, k, v, left

    assert differences(step) == []


def test_b42_a_default_dtype_changed_since_the_forward_does_not_matter() -> None:
    # torch 2.13 makes the region's new tensors in the dtype it finds, and refuses.
    def step(region: Region) -> Any:
        x = torch.randn(3, 3, requires_grad=True)
        y = region(lambda x: (x * torch.linspace(0, 1, 3)).sin().exp(), x)
        loss = y.sum()
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
            assert torch.get_default_dtype() is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        return y, x

    assert differences(step) == []


def test_b42_the_settings_are_as_the_caller_left_them_when_recomputation_fails() -> (
    None
):
    model = Gated()
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(model.training)
        if len(calls) > 1:
            raise ValueError("not a second time")
        return plain(model, x)

    y = mb.checkpoint(function, torch.randn(3, 4, requires_grad=True))
    model.eval()
    with pytest.raises(ValueError, match="not a second time"):
        y.sum().backward()
    assert not model.training
    assert calls == [True, True]
