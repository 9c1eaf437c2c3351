"""Behaviours 56-60: derivatives of derivatives, forward mode, batches of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor

import membudget as mb
from tests.behaviours.steps import (
    Region,
    differences,
    perceptron,
    plain,
    region_with,
)

# torch's own forward-mode formulas are compiled by the deprecated `torch.jit.script`.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

EARLY_STOP = pytest.mark.parametrize("early_stop", [True, False])


def wavy(x: Tensor, w: Tensor) -> Tensor:
    """Compute something whose derivatives do not end."""
    return ((x @ w).sin() * w).exp()


def two_leaves() -> tuple[Tensor, Tensor]:
    """Return two random square matrices that require gradients."""
    x, w = torch.randn(3, 3) * 0.5, torch.randn(3, 3) * 0.5
    return x.requires_grad_(), w.requires_grad_()


@EARLY_STOP
def test_b56_double_backward_equals_the_plain_one(early_stop: bool) -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        y = region(wavy, x, w)
        grads = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        second = torch.autograd.grad([g.square().sum() for g in grads], (x, w))
        return y, grads, second

    assert differences(step, region_with(early_stop=early_stop)) == []


def test_b56_a_gradient_penalty_trains_parameters_as_the_plain_one() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)
        h = region(model, region(model, x).tanh())
        (grad,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        (h.sum() + (grad.norm(dim=1) - 1).square().sum()).backward()
        return h, grad, x, model

    assert differences(step) == []


def test_b56_the_third_derivative_is_right_through_nested_regions() -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        y = region(lambda x: region(wavy, x.tanh(), w).sin(), x)
        for _ in range(2):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        y.sum().backward()
        return x, w

    assert differences(step) == []


@EARLY_STOP
@pytest.mark.parametrize("create_graph", [True, False])
def test_b57_autograd_grad_works_inside_the_region(
    create_graph: bool, early_stop: bool
) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).sin()
        (grad,) = torch.autograd.grad(
            h.exp().sum(), x, create_graph=create_graph, retain_graph=True
        )
        return (h * grad).tanh()

    def step(region: Region) -> Any:
        x, w = two_leaves()
        y = region(function, x, w)
        y.sum().backward()
        return y, x, w

    assert differences(step, region_with(early_stop=early_stop)) == []


@EARLY_STOP
def test_b57_a_graph_freed_inside_the_region_does_not_matter(early_stop: bool) -> None:
    def function(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.sin().cos().sum(), x)
        return x.cos() * grad

    def step(region: Region) -> Any:
        x, _ = two_leaves()
        y = region(function, x.exp())
        y.sum().backward()
        return y, x

    assert differences(step, region_with(early_stop=early_stop)) == []


def test_b57_several_gradients_are_taken_inside_nested_regions() -> None:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        y = wavy(x, w)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), w, create_graph=True)
        return y + first * second

    def step(region: Region) -> Any:
        x, w = two_leaves()

        def outer(x: Tensor) -> Tensor:
            y = region(inner, x.tanh(), w)
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return (y * grad).tanh()

        y = region(outer, x)
        y.sum().backward()
        return y, x, w

    assert differences(step) == []


def test_b57_backward_inside_the_region_accumulates_once_per_run_of_the_function() -> (
    None
):
    def function(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        leaf.sin().exp().sum().backward()
        assert leaf.grad is not None
        return (x * leaf.grad).tanh()

    def step(region: Region) -> Any:
        x, _ = two_leaves()
        y = region(function, x.exp())
        y.sum().backward()
        return y, x

    assert differences(step) == []


def test_b58_a_hessian_vector_product_equals_the_plain_one() -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        v = torch.randn(3, 3)
        y = region(wavy, x, w)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad((grad * v).sum(), (x, w))

    assert differences(step) == []


@pytest.mark.parametrize("product", ["hvp", "vhp"])
def test_b58_the_products_of_autograd_functional_equal_the_plain_ones(
    product: str,
) -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        compute = getattr(torch.autograd.functional, product)
        return compute(lambda x: region(wavy, x, w).sum(), x, torch.randn(3, 3))

    assert differences(step) == []


def test_b59_forward_mode_goes_through_a_region() -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        with fwd.dual_level():
            dual = fwd.make_dual(x, torch.randn(3, 3))
            y, tangent = fwd.unpack_dual(region(wavy, dual, w))
            assert tangent is not None
            return y.clone(), tangent.clone()

    assert differences(step) == []


def test_b59_forward_mode_over_reverse_mode_goes_through_a_region() -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        with fwd.dual_level():
            dual = fwd.make_dual(x, torch.randn(3, 3))
            y = region(wavy, dual, w)
            (grad,) = torch.autograd.grad(y.sum(), w, create_graph=True)
            grad, tangent = fwd.unpack_dual(grad)
            assert tangent is not None
            return grad.detach().clone(), tangent.detach().clone()

    assert differences(step) == []


def test_b59_batched_gradients_equal_the_plain_ones() -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        y = region(wavy, x, w)
        batch = torch.eye(9).view(9, 3, 3)
        return torch.autograd.grad(y, (x, w), batch, is_grads_batched=True)

    assert differences(step) == []


def test_b59_a_batch_equals_its_gradients_one_by_one() -> None:
    torch.manual_seed(0)
    x, w = two_leaves()
    y = mb.checkpoint(wavy, x, w)
    batch = torch.eye(9).view(9, 3, 3)
    (batched,) = torch.autograd.grad(
        y, x, batch, is_grads_batched=True, retain_graph=True
    )
    for row, vector in zip(batched, batch, strict=True):
        (alone,) = torch.autograd.grad(y, x, vector, retain_graph=True)
        # A batched product sums in another order than a lone one.
        torch.testing.assert_close(row, alone)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("derivative", ["jacobian", "hessian"])
def test_b59_jacobian_and_hessian_equal_the_plain_ones(
    derivative: str, vectorize: bool
) -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()

        def function(x: Tensor) -> Tensor:
            y = region(wavy, x, w)
            return y.sum() if derivative == "hessian" else y

        compute = getattr(torch.autograd.functional, derivative)
        return compute(function, x, vectorize=vectorize)

    assert differences(step) == []


def test_b59_a_forward_mode_jacobian_equals_the_plain_one() -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        return torch.autograd.functional.jacobian(
            lambda x: region(wavy, x, w),
            x,
            vectorize=True,
            strategy="forward-mode",
        )

    assert differences(step) == []


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": torch.func.grad,
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
    "jacrev": torch.func.jacrev,
    "hessian": torch.func.hessian,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.tensor(1.0)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_b60_a_transform_of_torch_func_is_refused_with_torchs_own_error(
    name: str,
) -> None:
    # functorch forbids saved-tensor hooks altogether, and says so.
    x = torch.randn(3, 3)

    def function(x: Tensor) -> Tensor:
        return mb.checkpoint(lambda x: x.sin().exp(), x).sum()

    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        TRANSFORMS[name](function)(x)


def test_b60_a_region_works_again_after_a_refused_transform() -> None:
    def step(region: Region) -> Any:
        x, w = two_leaves()
        if region is not plain:
            with pytest.raises(RuntimeError, match="saved tensor hooks"):
                torch.func.grad(lambda x: region(wavy, x, w).sum())(x)
        y = region(wavy, x, w)
        y.sum().backward()
        return y, x, w

    assert differences(step) == []
