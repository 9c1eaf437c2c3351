"""Behaviours 9-11: custom functions, complex numbers, and no redundant operator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.behaviours.steps import (
    Block,
    Counted,
    Region,
    differences,
    plain,
    region_with,
)
from tests.oracles import CountedOperators


class Scaled(torch.autograd.Function):
    """`sin(x * factor)`, with a hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        product = x * factor
        ctx.save_for_backward(product, factor)
        return product.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        product, factor = ctx.saved_tensors
        return grads[0] * product.cos() * factor, None


def test_b09_a_custom_function_inside_a_region_gives_equal_gradients() -> None:
    def step(region: Region) -> Any:
        x, factor = torch.randn(5, requires_grad=True), torch.randn(5)
        y = region(lambda t: Scaled.apply(t.exp(), factor).square(), x)
        y.sum().backward()
        return y, x

    assert differences(step) == []


def test_b09_a_saved_tensor_that_the_region_did_not_make_is_the_very_object() -> None:
    read: list[Tensor] = []

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            read.extend(ctx.saved_tensors)
            return grads[0], None

    x, kept = torch.ones(2, requires_grad=True), torch.ones(2)
    mb.checkpoint(Passing.apply, x, kept).sum().backward()
    assert len(read) == 1
    assert read[0] is kept


def test_b10_complex_numbers_have_equal_gradients() -> None:
    def step(region: Region) -> Any:
        z = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
        y = region(lambda z: torch.fft.fft(z @ z.conj()).abs(), z)
        y.sum().backward()
        return y, z

    assert differences(step) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_b10_gradcheck_and_gradgradcheck_accept_a_region(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z, w = (torch.randn(3, 3, dtype=dtype, requires_grad=True) for _ in range(2))

    def function(z: Tensor, w: Tensor) -> Tensor:
        return mb.checkpoint(lambda z, w: (z @ w).sin() * w, z, w)

    assert torch.autograd.gradcheck(function, (z, w))
    assert torch.autograd.gradgradcheck(function, (z, w))


def backward_operators(region: Region) -> Counter[str]:
    """Return the operators of the backward of a region of four operators."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).cos()

    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    loss = region(function, x, w).sum()
    with CountedOperators() as operators:
        loss.backward()
    return operators.counts


def test_b11_recomputation_runs_each_needed_operator_once_and_no_other() -> None:
    # The last operator, cos, saves its input before it runs: it is not needed.
    recomputed = backward_operators(mb.checkpoint) - backward_operators(plain)
    assert recomputed == Counter({"mm": 2, "sin": 1})


def test_b11_without_early_stop_every_operator_runs_once_more() -> None:
    region = region_with(early_stop=False)
    recomputed = backward_operators(region) - backward_operators(plain)
    assert recomputed == Counter({"mm": 2, "sin": 1, "cos": 1})


def test_b11_the_forward_runs_the_operators_of_the_plain_forward() -> None:
    def count(region: Region) -> Counter[str]:
        model, x = Block(), torch.randn(2, 5, 8)
        with CountedOperators() as operators:
            region(model, x)
        return operators.counts

    assert count(mb.checkpoint) == count(plain)


def test_b11_a_lone_region_runs_its_function_twice() -> None:
    function = Counted(lambda x: (x.sin(), x.cos().exp()))
    x = torch.randn(3, requires_grad=True)
    a, b = mb.checkpoint(function, x)
    (a.sum() + b.sum()).backward()
    assert function.calls == 2
