"""Row 27: kernels that save a tensor before they fill it, and double readers.

RReLU hands autograd its noise before it draws it. A recompute that stops at the last
saved tensor stops before the kernel has run, and the backward multiplies by whatever
was in that memory. A custom function that reads `ctx.saved_tensors` twice is legal, and
must get the same tensors twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

import membudget as mb
from tests.faults.implementations import (
    Checkpoint,
    ours,
    plain,
    torch_fails,
    torch_rerun,
)

ELEMENTS = 1000
leaky: Callable[..., Tensor] = torch.rrelu  # A name that does not tell what it is.


def randomly_leaky(x: Tensor) -> Tensor:
    return torch.nn.functional.rrelu(x, training=True)


def randomly_leaky_between(x: Tensor) -> Tensor:
    return torch.nn.functional.rrelu(x.sin(), training=True).exp()


def randomly_leaky_by_another_name(x: Tensor) -> Tensor:
    return leaky(x, training=True)


def leaky_in_evaluation(x: Tensor) -> Tensor:
    """Save a noise that is never drawn."""
    return torch.nn.functional.rrelu(x.sin(), training=False).exp()


def dirty_the_allocator() -> None:
    """Free memory of the size of the noise with a number in it that no noise has."""
    blocks = [torch.full((ELEMENTS,), 7.0) for _ in range(50)]
    del blocks


def rrelu_gradient(
    checkpoint: Checkpoint, function: Checkpoint = randomly_leaky
) -> Tensor:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, ELEMENTS, requires_grad=True)
    dirty_the_allocator()
    y = checkpoint(function, x)
    dirty_the_allocator()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


class TwiceReadSine(torch.autograd.Function):
    """Reads its saved tensor twice in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        return gradient * (first / 4 + second / 4).cos()


def twice_read_gradient(checkpoint: Checkpoint) -> Tensor:
    x = torch.linspace(0, 1, 8, requires_grad=True)
    checkpoint(lambda x: TwiceReadSine.apply(x.sin()).exp(), x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    "function",
    [
        *(randomly_leaky, randomly_leaky_between, randomly_leaky_by_another_name),
        leaky_in_evaluation,
    ],
)
def test_row27_rrelu_gradients_equal_plain(function: Checkpoint) -> None:
    expected = rrelu_gradient(plain, function)

    # Which memory the noise gets is luck.
    for _ in range(10):
        assert torch.equal(rrelu_gradient(ours, function), expected)


@pytest.mark.parametrize(
    "function", [randomly_leaky, randomly_leaky_between, randomly_leaky_by_another_name]
)
def test_row27_check_of_values_waits_until_the_noise_is_drawn(
    function: Checkpoint,
) -> None:
    def checked(function: Checkpoint, x: Tensor) -> Tensor:
        return mb.checkpoint(function, x, determinism_check="values")

    expected = rrelu_gradient(plain, function)
    # Which memory the noise gets is luck.
    for _ in range(50):
        assert torch.equal(rrelu_gradient(checked, function), expected)


def test_row27_saved_tensors_may_be_read_twice() -> None:
    assert torch.equal(twice_read_gradient(ours), twice_read_gradient(plain))


@torch_fails
def test_row27_torch_differentiates_rrelu_with_uninitialised_noise() -> None:
    found, expected = rrelu_gradient(torch_rerun), rrelu_gradient(plain)

    assert not torch.equal(found, expected)


@torch_fails
def test_row27_torch_refuses_to_read_saved_tensors_twice() -> None:
    with pytest.raises(CheckpointError, match="unpack"):
        twice_read_gradient(torch_rerun)
