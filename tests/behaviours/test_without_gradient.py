"""Behaviours 21-26: inputs, parts and whole regions that need no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import compat
from tests.behaviours.steps import (
    Counted,
    Region,
    Storages,
    differences,
    perceptron,
    plain,
)
from tests.garbage import no_collector


def test_b21_parameters_train_although_no_input_needs_gradient() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6)
        region(model, x).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        return model, x

    assert differences(step) == []


def test_b21_an_adapter_behind_a_frozen_embedding_trains() -> None:
    def step(region: Region) -> Any:
        embedding = nn.Embedding(10, 6).requires_grad_(False)
        adapter, head = perceptron(), nn.Linear(6, 1)
        h = region(adapter, embedding(torch.tensor([1, 7, 3])))
        head(h).sum().backward()
        assert adapter[0].weight.grad is not None
        return embedding, adapter, head

    assert differences(step) == []


no_sparse = pytest.mark.cpu_only("emu has no sparse tensors")


@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=no_sparse)])
def test_b22_integer_inputs_may_be_all_there_is(sparse: bool) -> None:
    def step(region: Region) -> Any:
        embedding, layer = nn.Embedding(10, 6, sparse=sparse), perceptron()
        tokens = torch.tensor([[1, 2, 1], [9, 0, 1]])
        y = region(lambda tokens: layer(embedding(tokens)), tokens)
        y.square().sum().backward()
        grad = embedding.weight.grad
        assert grad is not None
        return y, layer, grad.to_dense() if sparse else grad

    assert differences(step) == []


def test_b23_under_no_grad_a_region_runs_once_and_keeps_nothing() -> None:
    storages = Storages()
    layer = perceptron()

    def function(x: Tensor) -> Tensor:
        return layer(storages.see(x.exp())).sin()

    counted = Counted(function)
    with no_collector():
        x = torch.randn(4, 6)
        seen = storages.see(x)
        with torch.no_grad():
            y = mb.checkpoint(counted, x)
        assert not y.requires_grad
        assert y.grad_fn is None
        del x, seen
        assert storages.alive() == 0
    assert counted.calls == 1


def test_b23_under_no_grad_no_policy_is_asked() -> None:
    asked: list[Any] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(op)
        return compat.CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return compat.create_selective_checkpoint_contexts(policy)

    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        y = mb.checkpoint(lambda x: x.sin().exp(), x, context_fn=contexts)
    assert asked == []
    assert torch.equal(y, x.detach().sin().exp())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_b23_under_no_grad_streams_and_buffers_move_as_in_the_plain_run(
    mode: Any,
) -> None:
    def step(region: Region) -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        with mode():
            y = region(model, torch.randn(4, 6))
        return y.clone(), model

    assert differences(step) == []


def test_b24_a_region_under_inference_mode_runs_once_and_gives_inference_tensors() -> (
    None
):
    function = Counted(perceptron())
    x = torch.randn(4, 6)
    with torch.inference_mode():
        y = mb.checkpoint(function, x)
        assert torch.equal(y, function.function(x))
    assert y.is_inference()
    assert function.calls == 1


def test_b24_a_model_trains_under_regions_after_inference_mode() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6)
        with torch.inference_mode():
            before = region(model, x).clone()
        y = region(model, x)
        y.sum().backward()
        return torch.equal(y, before), y, model

    assert differences(step) == []


def test_b25_a_frozen_region_gives_an_output_without_gradient_and_runs_once() -> None:
    frozen = Counted(perceptron().requires_grad_(False))
    head = nn.Linear(6, 1)
    h = mb.checkpoint(frozen, torch.randn(4, 6))
    assert not h.requires_grad
    head(h).sum().backward()
    assert frozen.calls == 1
    assert head.weight.grad is not None


def test_b25_a_frozen_prefix_is_not_recomputed_while_the_adapter_is() -> None:
    def step(region: Region) -> Any:
        layers = nn.ModuleList(perceptron() for _ in range(3))
        layers[0].requires_grad_(False)
        layers[1].requires_grad_(False)
        counted = [Counted(layer) for layer in layers]
        h = torch.randn(4, 6)
        for layer in counted:
            h = region(layer, h)
        h.square().sum().backward()
        if region is not plain:
            assert [layer.calls for layer in counted] == [1, 1, 2]
        return h, layers

    assert differences(step) == []


def test_b25_a_frozen_region_in_the_middle_passes_gradients_through() -> None:
    def step(region: Region) -> Any:
        first, middle, last = (perceptron() for _ in range(3))
        middle.requires_grad_(False)
        h = region(last, region(middle, region(first, torch.randn(4, 6))))
        h.square().sum().backward()
        return h, first, middle, last

    assert differences(step) == []


def test_b26_parts_of_a_region_may_be_detached() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ w).sin()
        fixed = h.detach().exp()
        with torch.no_grad():
            scale = (h * w).abs().sum()
        return (h * fixed).tanh() * scale, fixed

    def step(region: Region) -> Any:
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        y, fixed = region(function, x, w)
        assert not fixed.requires_grad
        y.sum().backward()
        return y, fixed, x, w

    assert differences(step) == []


def test_b26_a_detached_input_gets_no_gradient_and_the_others_do() -> None:
    def step(region: Region) -> Any:
        x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        y = region(lambda a, b: (a @ b).sin().exp(), x.exp().detach(), w)
        y.sum().backward()
        assert x.grad is None
        return y, x, w

    assert differences(step) == []
