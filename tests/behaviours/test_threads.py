"""Behaviours 118-120: regions and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests import devices
from tests.behaviours.steps import (
    Block,
    Counted,
    Region,
    differences,
    is_equal,
    perceptron,
    plain,
)
from tests.seconds import DEADLOCK_S


def elsewhere(function: Callable[[], Any]) -> Any:
    """Run `function` in another thread and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(devices.elsewhere(function)).result()


def here(function: Callable[[], Any]) -> Any:
    """Run `function` in this thread."""
    return function()


PLACES = {"here": here, "elsewhere": elsewhere}


@pytest.mark.parametrize("forward", PLACES)
@pytest.mark.parametrize("backward", PLACES)
def test_b118_forward_and_backward_may_run_in_different_threads(
    forward: str, backward: str
) -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.3), torch.randn(2, 5, 8, requires_grad=True)

        def chain() -> Tensor:
            return region(model, region(model, x)).square().sum()

        loss = PLACES[forward](chain)
        PLACES[backward](loss.backward)
        return loss, model, x, torch.rand(2)

    assert differences(step) == []


def test_b118_the_gradient_mode_of_the_other_thread_is_its_own() -> None:
    def step(region: Region) -> Any:
        model, x = perceptron(), torch.randn(4, 6, requires_grad=True)
        loss = region(model, x).sum()

        def backward() -> bool:
            with torch.no_grad():
                loss.backward()
                return torch.is_grad_enabled()

        assert not elsewhere(backward)
        return loss, model, x

    assert differences(step) == []


@pytest.mark.parametrize("threads", [2, 4])
def test_b119_regions_in_several_threads_at_once_equal_the_plain_run(
    threads: int,
) -> None:
    def train(region: Region, model: nn.Module, x: Tensor) -> list[Tensor]:
        losses = []
        for _ in range(10):
            h = region(model, region(model, x).tanh())
            loss = h.square().sum()
            loss.backward()
            losses.append(loss.detach())
        return losses

    def step(region: Region) -> Any:
        models = [Block() for _ in range(threads)]
        xs = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(threads)]
        start = threading.Barrier(threads)

        def run(i: int) -> list[Tensor]:
            start.wait(DEADLOCK_S)
            return train(region, models[i], xs[i])

        with ThreadPoolExecutor(threads) as pool:
            losses = list(pool.map(devices.elsewhere(run), range(threads)))
        return losses, xs, nn.ModuleList(models)

    assert differences(step) == []


def test_b119_several_threads_may_go_backward_through_one_shared_region() -> None:
    function = Counted(lambda x: x.sin().exp().tanh())
    x = torch.randn(50, requires_grad=True)
    y = mb.checkpoint(function, x)
    (expected,) = torch.autograd.grad(function.function(x).sum(), x)
    start = threading.Barrier(4)

    def backward(_: int) -> Tensor:
        start.wait(DEADLOCK_S)
        return torch.autograd.grad(y.sum(), x, retain_graph=True)[0]

    with ThreadPoolExecutor(4) as pool:
        grads = list(pool.map(devices.elsewhere(backward), range(4)))
    assert all(torch.equal(grad, expected) for grad in grads)


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(perceptron() for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


data_parallel = pytest.mark.cpu_only("DataParallel scatters over devices of CUDA")


@data_parallel
def test_b120_data_parallel_on_the_cpu_falls_through_to_the_module() -> None:
    def step(region: Region) -> Any:
        model, x = Model(), torch.randn(4, 6, requires_grad=True)
        applied = None if region is plain else mb.apply(model, blocks=nn.Sequential)
        nn.DataParallel(model)(x).square().sum().backward()
        if applied is not None:
            applied.remove()
        return model, x

    assert differences(step) == []


@data_parallel
def test_b120_a_region_may_go_round_data_parallel() -> None:
    def step(region: Region) -> Any:
        model, x = Model(), torch.randn(4, 6, requires_grad=True)
        region(nn.DataParallel(model), x).square().sum().backward()
        return model, x

    assert differences(step) == []


def replica_of(model: nn.Module, factor: float) -> nn.Module:
    """Replicate `model` as DataParallel does, with scaled copies of its parameters."""
    originals = list(model.modules())
    copies = {m: m._replicate_for_data_parallel() for m in originals}
    for original, copy in copies.items():
        for name, child in original.named_children():
            setattr(copy, name, copies[child])
        for name, parameter in original.named_parameters(recurse=False):
            setattr(copy, name, parameter * factor)
    return copies[model]


@pytest.mark.parametrize("whole", [False, True])
def test_b120_a_replica_runs_its_own_forward(whole: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 6)
    expected = replica_of(model, 0.5)(x)
    unscaled = model(x)
    blocks: Any = Model if whole else nn.Sequential
    applied = mb.apply(model, blocks=blocks)
    # A forward bound to the original would run the original's weights.
    assert torch.equal(replica_of(model, 0.5)(x), expected)
    assert torch.equal(model(x), unscaled)
    applied.remove()


@pytest.mark.parametrize("whole", [False, True])
def test_b120_gradients_reach_the_original_through_a_replica(whole: bool) -> None:
    def step(region: Region) -> Any:
        model, x = Model(), torch.randn(4, 6, requires_grad=True)
        blocks: Any = Model if whole else nn.Sequential
        applied = None if region is plain else mb.apply(model, blocks=blocks)
        y = replica_of(model, 0.5)(x)
        y.square().sum().backward()
        if applied is not None:
            applied.remove()
        return y, model, x

    assert differences(step) == []


def test_b120_a_replica_is_recomputed_too() -> None:
    model = Model()
    calls: list[str] = []
    model.blocks[0].register_module("probe", Probe(calls))
    applied = mb.apply(model, blocks=nn.Sequential)
    replica_of(model, 0.5)(torch.randn(4, 6)).sum().backward()
    assert len(calls) == 2
    applied.remove()


class Probe(nn.Module):
    """Notes its calls and passes its input on."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("called")
        return x.sin()


def test_b120_removing_the_regions_leaves_a_replica_and_the_model_equal() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 6)
    expected = model(x)
    mb.apply(model, blocks=nn.Sequential).remove()
    assert is_equal(replica_of(model, 1.0)(x), expected)
    assert is_equal(model(x), expected)
