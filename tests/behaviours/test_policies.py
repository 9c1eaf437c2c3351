"""Behaviours 92, 94-101: what a region keeps, said by `keep=` and by a budget.

What is kept is counted in operators that the backward pass does not run again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import membudget as mb
from membudget import policies
from tests.behaviours.steps import Region, differences, plain, region_with
from tests.oracles import CountedOperators

KEEPS: list[Any] = [
    policies.nothing,
    policies.everything,
    policies.matmuls,
    policies.operators("sin", "relu"),
    ["gate"],
]


class Gated(nn.Module):
    """A product of two layers, one of which is squashed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = mb.name(self.body(x).sin(), "hidden")
        return (hidden.exp() * self.gate(x).sigmoid_()).relu_()


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 16).reshape(4, 4).requires_grad_()


def gated_step(region: Region) -> Any:
    module, x = Gated(), leaf()
    y = region(module, x)
    y.sum().backward()
    return y, x, module


def recomputed(function: Callable[[Tensor], Tensor], keep: Any) -> Counter[str]:
    """Count what the backward pass runs more often than the plain one does."""
    counts = []
    for region in (plain, region_with(keep=keep)):
        loss = region(function, leaf()).sum()
        with CountedOperators() as operators:
            loss.backward()
        counts.append(operators.counts)
    return counts[1] - counts[0]


@pytest.mark.parametrize("keep", KEEPS)
def test_b92_an_operator_in_place_after_a_kept_one_is_exact(keep: Any) -> None:
    assert differences(gated_step, region_with(keep=keep)) == []


def test_b94_a_tensor_is_kept_by_its_name() -> None:
    def function(x: Tensor) -> Tensor:
        return mb.name(x.sin(), "hidden").exp().cos()

    assert recomputed(function, policies.nothing)["sin"] == 1
    assert recomputed(function, policies.named("hidden"))["sin"] == 0
    assert recomputed(function, policies.named("another"))["sin"] == 1


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("outer", ["rerun", "replay"])
def test_b95_a_policy_holds_inside_of_a_plain_region(outer: Any, keep: Any) -> None:
    def step(region: Region) -> Any:
        module, x = Gated(), leaf()

        def around(x: Tensor) -> Tensor:
            return region(module, x.cos(), keep=keep).sin()

        if region is plain:
            y = module(x.cos()).sin()
        else:
            y = region(around, x, engine=outer)
        y.sum().backward()
        return y, x, module

    assert differences(step) == []


@pytest.mark.parametrize("keep", KEEPS)
def test_b96_a_second_backward_pass_is_exact_under_a_policy(keep: Any) -> None:
    def step(region: Region) -> Any:
        module, x = Gated(), leaf()
        y = region(module, x).sum()
        y.backward(retain_graph=True)
        y.backward()
        return y, x, module

    assert differences(step, region_with(keep=keep)) == []


@pytest.mark.parametrize("keep", KEEPS)
def test_b97_a_second_derivative_is_exact_under_a_policy(keep: Any) -> None:
    def step(region: Region) -> Any:
        module, x = Gated(), leaf()
        y = region(module, x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        gradient.square().sum().backward()
        return y, x, gradient, module

    assert differences(step, region_with(keep=keep)) == []


@pytest.mark.parametrize("keep", [3, 2.5, [3], object()])
def test_b98_a_policy_of_another_kind_is_refused_before_the_function_runs(
    keep: Any,
) -> None:
    def function(x: Tensor) -> Tensor:
        raise AssertionError("the function ran")

    with pytest.raises(mb.OptionError, match="keep"):
        mb.checkpoint(function, leaf(), keep=keep)


def test_b99_hooks_around_a_region_see_what_its_policy_keeps() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = leaf()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mb.checkpoint(lambda x: x.sin().exp(), x, keep=policies.operators("exp"))
    assert any(torch.equal(tensor, x.sin().exp()) for tensor in packed)
    y.sum().backward()


def test_b100_a_policy_selects_by_operator_and_by_submodule() -> None:
    module = Gated()
    assert recomputed(module, policies.nothing)["addmm"] == 2
    assert recomputed(module, policies.matmuls)["addmm"] == 0
    assert recomputed(module, ["gate"])["addmm"] == 1
    assert recomputed(module, policies.inside("body"))["addmm"] == 1


def test_b101_a_smaller_budget_never_takes_more_bytes_or_less_time() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Dropout(0.1))
            for _ in range(6)
        )
    )
    found = mb.profile(model, torch.randn(64, 32), lambda y, _: y.square().sum())
    rows = mb.tradeoff(found, budgets=8).rows
    assert len(rows) > 2
    assert all(row.peak_bytes <= row.budget_bytes for row in rows)
    for smaller, larger in itertools.pairwise(rows):
        assert smaller.peak_bytes <= larger.peak_bytes
        assert smaller.slowdown >= larger.slowdown
