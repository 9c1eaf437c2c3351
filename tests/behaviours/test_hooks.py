"""Behaviours 122-125: hooks of others on tensors, modules, parameters, operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
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
from tests.oracles import CountedOperators


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_b122_tensor_hooks_inside_fire_once_and_may_change_the_gradient(
    early_stop: bool, nested: bool
) -> None:
    def step(region: Region) -> Any:
        fired: Counter[str] = Counter()

        def doubled(name: str) -> Callable[[Tensor], Tensor]:
            def hook(grad: Tensor) -> Tensor:
                fired[name] += 1
                return grad * 2

            return hook

        def inner(x: Tensor) -> Tensor:
            h = x.sin()
            h.register_hook(doubled("inner"))
            return h.exp()

        def outer(x: Tensor) -> Tensor:
            h = x.exp()
            h.register_hook(doubled("outer"))
            return (region(inner, h) if nested else inner(h)).tanh()

        x = torch.randn(4, requires_grad=True)
        x.register_hook(doubled("input"))
        region(outer, x).sum().backward()
        assert fired == {"inner": 1, "outer": 1, "input": 1}
        return x

    assert differences(step, region_with(early_stop=early_stop)) == []


def test_b122_a_hook_on_the_input_that_the_region_registers_fires_once() -> None:
    # torch 2.13 recomputes from a tensor with the input's own node of the graph, so
    # that the recomputation registers the hook there again.
    def step(region: Region) -> Any:
        fired = []

        def function(x: Tensor) -> Tensor:
            x.register_hook(lambda grad: fired.append("fired"))
            return x.sin().exp()

        x = torch.randn(4, requires_grad=True)
        region(function, x.exp()).sum().backward()
        return x, fired

    assert differences(step) == []


def test_b122_a_retained_gradient_inside_is_that_of_the_forwards_tensor() -> None:
    def step(region: Region) -> Any:
        made: list[Tensor] = []

        def function(x: Tensor) -> Tensor:
            h = x.sin()
            h.retain_grad()
            made.append(h)
            return h.exp().tanh()

        x = torch.randn(4, requires_grad=True)
        region(function, x).sum().backward()
        # The tensors that the recomputation made are in no graph of a backward.
        assert [h.grad is not None for h in made] == [True] + [False] * (len(made) - 1)
        return x, made[0].grad

    assert differences(step) == []


@pytest.mark.parametrize("place", ["inside", "around"])
def test_b123_backward_hooks_of_modules_and_parameters_fire_once(place: str) -> None:
    def step(region: Region) -> Any:
        fired: Counter[str] = Counter()
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)

        def count(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                fired[name] += 1

            return hook

        for name, module in model.named_modules():
            module.register_full_backward_hook(count(f"module {name}"))
            module.register_full_backward_pre_hook(count(f"before {name}"))
        for name, parameter in model.named_parameters():
            parameter.register_hook(count(f"tensor {name}"))
            parameter.register_post_accumulate_grad_hook(count(f"after {name}"))
        function = model if place == "around" else lambda x: model(x.exp()).tanh()
        y = region(function, x)
        y.square().sum().backward()
        assert set(fired.values()) == {1}
        assert len(fired) == 2 * 4 + 2 * 4
        return y, fired, model, x

    assert differences(step) == []


def test_b123_a_backward_hook_may_change_the_gradient_of_its_module() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)

        def tripled(module: nn.Module, grads: Any, _: Any) -> Any:
            return (grads[0] * 3,)

        model[1].register_full_backward_hook(tripled)
        y = region(model, x)
        y.square().sum().backward()
        return y, model, x

    assert differences(step) == []


@pytest.mark.parametrize("nested", [False, True])
def test_b124_an_optimizer_may_step_in_the_backward_layer_by_layer(
    nested: bool,
) -> None:
    def step(region: Region) -> Any:
        layers = nn.ModuleList(perceptron() for _ in range(4))
        optimizers: dict[Tensor, Any] = {
            p: torch.optim.AdamW([p], lr=0.1) for p in layers.parameters()
        }

        def update(parameter: Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in layers.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        def pair(x: Tensor, i: int) -> Tensor:
            return region(layers[i + 1], region(layers[i], x)).tanh()

        before = [p.detach().clone() for p in layers.parameters()]
        losses = []
        for _ in range(3):
            x = torch.randn(4, 6)
            y = region(pair, region(pair, x, 0), 2) if nested else pair(pair(x, 0), 2)
            loss = y.square().sum()
            loss.backward()
            losses.append(loss)
        assert not any(map(torch.equal, before, layers.parameters()))
        return losses, layers

    assert differences(step) == []


def test_b125_anomaly_mode_finds_equal_gradients() -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.2), torch.randn(2, 5, 8, requires_grad=True)
        with torch.autograd.set_detect_anomaly(True):
            y = region(model, x)
            y.square().sum().backward()
        return y, model, x

    # detect_anomaly() warns that it is on; set_detect_anomaly() does not.
    assert differences(step) == []


def test_b125_anomaly_mode_names_the_operator_inside_the_region() -> None:
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        loss = mb.checkpoint(lambda x: (x.sqrt() * 0).exp(), x).sum()
        with (
            pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
            pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"),
        ):
            loss.backward()


@pytest.mark.parametrize("around_forward", [False, True])
def test_b125_a_dispatch_mode_sees_the_recomputation_once(
    around_forward: bool,
) -> None:
    def count(region: Region) -> Counter[str]:
        x = torch.randn(3, 3, requires_grad=True)
        operators = CountedOperators()
        with operators if around_forward else nullcontext():
            y = region(lambda x: (x @ x).sin().exp().cos(), x)
        with operators:
            y.sum().backward()
        return operators.counts

    # All but the last operator, whose input is saved before it runs.
    assert count(mb.checkpoint) - count(plain) == Counter(mm=1, sin=1, exp=1)
