"""Behaviours 1-8: a region changes no gradient, whatever is asked of autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.steps import (
    Block,
    Region,
    differences,
    perceptron,
    plain,
    region_with,
)


class Convolutions(nn.Module):
    """Two convolutions with pooling and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x), inplace=True)
        return self.second(F.max_pool2d(h, 2))


class Recurrent(nn.Module):
    """An LSTM over three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0].tanh()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (4, 6)),
    "transformer": (Block, (2, 5, 8)),
    "transformer with dropout": (lambda: Block(dropout=0.3), (2, 5, 8)),
    "convolutions": (Convolutions, (2, 2, 8, 8)),
    "recurrent": (Recurrent, (3, 2, 6)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_b01_output_and_gradients_equal_plain_bit_for_bit(
    name: str, early_stop: bool
) -> None:
    make, shape = MODELS[name]

    def step(region: Region) -> Any:
        model, x = make(), torch.randn(shape, requires_grad=True)
        y = region(model, x)
        y.square().mean().backward()
        return y, x, model

    assert differences(step, region_with(early_stop=early_stop)) == []


def test_b01_a_chain_of_regions_equals_the_plain_chain() -> None:
    def step(region: Region) -> Any:
        blocks = nn.ModuleList(Block(dropout=0.1) for _ in range(4))
        x = torch.randn(2, 5, 8, requires_grad=True)
        h = x
        for block in blocks:
            h = region(block, h)
        h.square().mean().backward()
        return h, x, blocks

    assert differences(step) == []


def test_b01_the_cheap_regions_without_guards_are_equal_too() -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.3), torch.randn(2, 5, 8, requires_grad=True)
        y = region(model, x)
        y.square().mean().backward()
        return y, x, model

    assert differences(step, region_with(guards=False)) == []


@pytest.mark.parametrize(
    "wanted", [w for n in (1, 2, 3) for w in combinations(range(3), n)]
)
def test_b02_autograd_grad_works_for_any_subset_of_inputs(
    wanted: tuple[int, ...],
) -> None:
    def step(region: Region) -> Any:
        tensors = [torch.randn(3, 3, requires_grad=True) for _ in range(3)]
        y = region(lambda a, b, c: ((a @ b).sin() * c).exp(), *tensors)
        return torch.autograd.grad(y.sum(), [tensors[i] for i in wanted])

    assert differences(step) == []


def test_b02_autograd_grad_works_for_parameters_the_region_closes_over() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6)
        return torch.autograd.grad(region(model, x).sum(), list(model.parameters()))

    assert differences(step) == []


def test_b03_backward_with_inputs_touches_only_those() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)
        y = region(model, x)
        y.square().sum().backward(inputs=[model[2].weight])
        with_grad = [n for n, p in model.named_parameters() if p.grad is not None]
        assert with_grad == ["2.weight"]
        assert x.grad is None
        return y, x, model

    assert differences(step) == []


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_b04_gradients_accumulate_whatever_the_order_of_the_backwards(
    order: tuple[int, ...],
) -> None:
    def step(region: Region) -> Any:
        model = Block(dropout=0.2)
        losses = [region(model, torch.randn(2, 5, 8)).square().sum() for _ in range(3)]
        for i in order:
            losses[i].backward()
        return losses, model

    assert differences(step) == []


def test_b05_the_same_module_in_two_regions_sums_its_gradients() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)
        y = region(model, region(model, x).tanh())
        y.square().sum().backward()
        return y, x, model

    assert differences(step) == []


def test_b06_a_parameter_used_in_and_out_of_a_region_is_hooked_once_with_the_sum() -> (
    None
):
    def step(region: Region) -> Any:
        weight = torch.randn(4, 4, requires_grad=True)
        arrived: list[Tensor] = []
        weight.register_hook(lambda grad: arrived.append(grad.clone()))
        x = torch.randn(2, 4)
        inside = region(lambda t: (t @ weight).sin() @ weight, x)
        (inside @ weight).sum().backward()
        assert len(arrived) == 1
        assert weight.grad is not None
        assert torch.equal(arrived[0], weight.grad)
        return weight, arrived

    assert differences(step) == []


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_b07_only_some_outputs_may_be_used_in_the_loss(used: tuple[int, ...]) -> None:
    def step(region: Region) -> Any:
        a, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
        b.requires_grad_()
        outputs = region(lambda a, b: (a.sin(), (a @ b).exp(), b.tanh().cos()), a, b)
        sum(outputs[i].sum() for i in used).backward()
        return outputs, a, b

    assert differences(step) == []


@pytest.mark.parametrize("grouped", [False, True])
def test_b08_one_output_differentiates_with_respect_to_another(grouped: bool) -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        middle = (x @ w).sin()
        return middle, (middle @ w).exp()

    def step(region: Region) -> Any:
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
        w.requires_grad_()
        middle, last = region(both, x, w)
        if grouped and region is not plain:
            with mb.execution_group():
                (to_middle,) = torch.autograd.grad(last.sum(), middle)
                to_x, to_w = torch.autograd.grad(middle, (x, w), to_middle)
        else:
            (to_middle,) = torch.autograd.grad(last.sum(), middle, retain_graph=True)
            to_x, to_w = torch.autograd.grad(middle, (x, w), to_middle)
        return middle, last, to_middle, to_x, to_w

    assert differences(step) == []
