"""Row A10: a reentrant region whose outputs depend on no gradient.

Its forward runs without a graph, so every output seems to require a gradient. Plain
raises in the backward, because nothing requires one; so must the region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).requires_grad_()


def detached(x: Tensor) -> Tensor:
    return x.sin().detach()


def without_graph(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.detach().cos()


def reentrant(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return mb.checkpoint(function, *args, use_reentrant=True)


@pytest.mark.parametrize("function", [detached, without_graph])
def test_row_a10_the_backward_raises_as_plain_and_torch_do(function) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        function(leaf()).sum().backward()
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        torch_checkpoint(function, leaf(), use_reentrant=True).sum().backward()
    with pytest.raises(mb.ReentrantLimitError, match="no output that got one depends"):
        reentrant(function, leaf()).sum().backward()


def test_row_a10_a_gradient_for_the_detached_output_alone_raises() -> None:
    _, constant = mb.checkpoint(halves, leaf(), use_reentrant=True)
    with pytest.raises(mb.ReentrantLimitError, match="no output that got one depends"):
        constant.sum().backward()


def test_row_a10_a_detached_output_beside_a_trained_one_is_a_constant() -> None:
    gradients: list[Any] = []
    for region in (lambda f, x: f(x), lambda f, x: reentrant(f, x)):
        x = leaf()
        trained, constant = region(halves, x)
        (trained * constant).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


class OutputWithoutGradient(torch.autograd.Function):
    """A function that sends no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("region", [lambda f, x: f(x), reentrant])
def test_row_a10_where_no_gradient_arrives_none_is_made(region) -> None:
    x, y = leaf(), leaf()
    (OutputWithoutGradient.apply(region(torch.sin, x)) + y).sum().backward()
    assert x.grad is None
    assert y.grad is not None
