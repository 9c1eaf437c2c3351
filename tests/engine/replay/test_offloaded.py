"""Values that a policy offloads: written to afterwards, in a loop, in stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import policies
from membudget.engine.policy import Policy
from membudget.errors import ChangedSinceForwardError
from membudget.policies import Candidate

SIZE = 64 * 16 * 4
"""Bytes of what each operator below makes."""

Function = Callable[[Tensor], Tensor]


def leaf() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 16).requires_grad_()


def small(window: int = 0) -> mb.Offload:
    return mb.offload("1MiB", window=window, smallest=1, first=0)


def products(off: mb.Offload) -> Policy:
    return policies.offloaded(policies.operators("mul", "tanh_"), off)


def gradient(function: Function, off: mb.Offload | None, steps: int = 1) -> Tensor:
    x = leaf()
    for _ in range(steps):
        x.grad = None
        if off is None:
            y = function(x)
        else:
            y = mb.checkpoint(function, x, keep=products(off))
        y.sum().backward()
    assert x.grad is not None
    return x.grad


def overwritten(x: Tensor) -> Tensor:
    y = x * 2  # Held: what `cos` saves is made of it again.
    z = (y + 1).cos()
    y.sin_().add_(1)
    return z * y.detach()


def test_a_write_afterwards_changes_nothing_of_what_is_held() -> None:
    off = small()
    assert torch.equal(gradient(overwritten, off, 3), gradient(overwritten, None))
    assert off.status().late_bytes


def test_a_write_afterwards_to_what_stays_on_the_device_makes_a_copy() -> None:
    full = mb.offload(SIZE // 2, window=0, smallest=1)
    assert torch.equal(gradient(overwritten, full, 3), gradient(overwritten, None))
    assert full.status().full_bytes


def test_what_an_operator_in_place_has_made_is_held() -> None:
    def function(x: Tensor) -> Tensor:
        return (x + 2).tanh_().add(1).sin()

    off = small()
    assert torch.equal(gradient(function, off, 3), gradient(function, None))
    assert off.status().out_bytes == 3 * SIZE


def test_a_write_after_the_region_is_an_error() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, (y + 1).cos()

    y, z = mb.checkpoint(function, leaf(), keep=products(small()))
    y.detach().zero_()
    with pytest.raises(ChangedSinceForwardError, match="modified by an inplace"):
        z.sum().backward()


def test_what_is_too_small_to_move_stays_on_the_device() -> None:
    def function(x: Tensor) -> Tensor:
        return (x * 2).sin()

    off = mb.offload("1MiB", smallest=SIZE + 1)
    assert torch.equal(gradient(function, off), gradient(function, None))
    assert off.status().out_bytes == 0


def test_nothing_is_recomputed_of_what_is_held() -> None:
    off, calls = small(), []

    def keep(candidate: Candidate) -> mb.Offload:
        calls.append(str(candidate.operator))
        return off

    mb.checkpoint(lambda x: x.exp().sin(), leaf(), keep=keep).sum().backward()
    assert calls == ["aten.exp.default", "aten.sin.default"]
    assert off.status().late_bytes == SIZE


def test_a_named_tensor_may_be_held_on_the_host() -> None:
    off = small()
    keep = policies.offloaded(policies.named("h"), off)

    def function(x: Tensor) -> Tensor:
        return mb.name(x.exp(), "h").sin()

    mb.checkpoint(function, x := leaf(), keep=keep).sum().backward()
    assert off.status().out_bytes == SIZE
    assert x.grad is not None
    assert torch.equal(x.grad, gradient(function, None))


def test_a_region_that_is_verified_asks_for_nothing_in_the_order_of_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in "abc"))
    off = small(window=4 * SIZE)
    keep = policies.offloaded(policies.matmuls, off)
    for _ in range(3):
        y = leaf()
        for layer in model:
            y = mb.checkpoint(layer, y, keep=keep)
        y.sum().backward()
    # Each step saves three; the first one, whose order is unknown, loads them late.
    assert off.status().out_bytes == 9 * SIZE
    assert off.status().ahead_bytes == 4 * SIZE


def test_memory_that_the_host_has_not_is_an_error_in_the_forward() -> None:
    keep = policies.offloaded(policies.everything, mb.offload(1 << 60, smallest=1))
    with pytest.raises(mb.OptionError, match="the host cannot give"):
        mb.checkpoint(torch.exp, leaf(), keep=keep)
