"""Behaviours 105-107: what may be changed in place, may be so under a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.behaviours.steps import Region, differences, plain


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


@pytest.mark.parametrize("function", [torch.exp, torch.sin, torch.relu])
def test_b105_an_output_changed_by_the_caller_is_refused_or_right(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = leaf()
    (expected,) = torch.autograd.grad((function(x) * 3).sum(), x)
    y = mb.checkpoint(function, x)
    y.mul_(3)
    with contextlib.suppress(RuntimeError):
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


def test_b105_an_output_may_be_changed_where_the_plain_run_allows_it() -> None:
    def step(region: Region) -> Any:
        x = leaf()
        first, second = region(lambda x: (x.exp().sin(), x.cos() * x), x)
        first.add_(1)
        second.mul_(2)
        (first * second).sum().backward()
        return x, first, second

    assert differences(step) == []


def in_place_chain(x: Tensor) -> Tensor:
    y = (x * 2).add_(1).relu_()
    z = (y + 0).mul_(3)
    z[0] += x[1]
    return z.exp()


def in_place_view(x: Tensor) -> Tensor:
    y = x.cos()
    y[:, 1:].mul_(2)
    y.view(-1)[0] = 4.0
    return y.sigmoid_().clone().sin_()


def in_place_index(x: Tensor) -> Tensor:
    y = torch.zeros(4, 3)
    y.index_copy_(0, torch.tensor([2, 0]), x.exp())
    y.masked_fill_(y > 1, 0.5)
    return y.t().contiguous().add_(1).log()


def in_place_loop(x: Tensor) -> Tensor:
    total = torch.zeros(3)
    for row in x.unbind():
        total = total + row.exp()
        total += row.sin()
    return total


@pytest.mark.parametrize(
    "function", [in_place_chain, in_place_view, in_place_index, in_place_loop]
)
def test_b106_intermediates_may_be_changed_in_place(
    function: Callable[[Tensor], Tensor],
) -> None:
    def step(region: Region) -> Any:
        x = leaf()
        y = region(function, x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return x, y

    assert differences(step) == []


def test_b107_mutation_of_saved_tensors_may_be_allowed_around_a_region() -> None:
    def step(region: Region) -> Any:
        x = leaf()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            inner = x * 2
            y = region(lambda x: x.exp().sin(), inner)
            inner.sin_()
            z = inner.exp()
            inner.zero_()
            (y * z).sum().backward()
        return x, y, z

    assert differences(step) == []


# torch 2.13 computes another gradient here, and says nothing.
def test_b107_what_was_changed_inside_such_a_region_is_right() -> None:
    def changing(x: Tensor) -> Tensor:
        y = x.exp()
        z = y.sin()
        y.mul_(2)  # `exp` and `sin` have saved it: plain autograd would refuse.
        return z * y

    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        x, reference = leaf(), leaf()
        expected = plain(changing, reference)
        expected.sum().backward()
        y = mb.checkpoint(changing, x)
        with contextlib.suppress(RuntimeError):
            y.sum().backward()
            assert x.grad is not None
            assert reference.grad is not None
            assert torch.equal(x.grad, reference.grad)
