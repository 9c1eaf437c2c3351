"""Behaviours 34-37: private generators, Python, NumPy, other threads, late noise."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

import membudget as mb
from tests import devices
from tests.behaviours.steps import (
    Region,
    differences,
    plain,
    region_with,
)


class Noisy(nn.Module):
    """Multiplies by noise from its own generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return noise(x, self.generator)


def noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Multiply `x` by noise from `generator` and let it matter twice."""
    return (x * torch.rand(x.shape, generator=generator)).sin().exp()


USES: dict[str, Callable[[Region, Tensor, torch.Generator], Tensor]] = {
    "closed over": lambda region, x, g: region(lambda x: noise(x, g), x),
    "argument": lambda region, x, g: region(noise, x, g),
    "keyword": lambda region, x, g: region(noise, x, generator=g),
    "in a list": lambda region, x, g: region(lambda x, gs: noise(x, gs[0]), x, [g]),
    "in a dict": lambda region, x, g: region(lambda d: noise(x, d["g"]), {"g": g}),
    "in a module": lambda region, x, g: region(Noisy(g), x),
    "in a module's child": lambda region, x, g: region(nn.Sequential(Noisy(g)), x),
    "in a closed-over module": lambda region, x, g: _closed_over(region, x, Noisy(g)),
    "in a bound method": lambda region, x, g: region(Noisy(g).forward, x),
}


def _closed_over(region: Region, x: Tensor, module: nn.Module) -> Tensor:
    return region(lambda x: module(x) * 2, x)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("drawn_between", [False, True])
def test_b34_an_explicit_generator_is_replayed_and_left_as_a_plain_run_does(
    use: str, drawn_between: bool
) -> None:
    # torch 2.13 restores the default generators only.
    def step(region: Region) -> Any:
        generator = devices.generator().manual_seed(3)
        x = torch.randn(20, requires_grad=True)
        y = USES[use](region, x, generator)
        if drawn_between:
            torch.rand(3, generator=generator)
        y.sum().backward()
        return y, x, generator

    assert differences(step) == []


DRAWS: dict[str, Callable[[], float]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy.random.rand": lambda: float(np.random.rand()),  # noqa: NPY002
    "numpy.random.randn": lambda: float(np.random.randn()),  # noqa: NPY002
}


@pytest.mark.parametrize("draw", DRAWS)
def test_b35_python_and_numpy_draws_are_replayed(draw: str) -> None:
    # torch 2.13 restores torch's generators only; the streams end further on, too.
    def step(region: Region) -> Any:
        x = torch.randn(5, requires_grad=True)
        y = region(lambda x: (x * DRAWS[draw]()).sin().exp(), x)
        between = DRAWS[draw]()
        y.sum().backward()
        return y, x, between, DRAWS[draw]()

    assert differences(step) == []


def test_b35_a_layer_that_is_dropped_by_chance_is_dropped_again() -> None:
    # torch 2.13: the recomputation draws anew and may take the other branch.
    def step(region: Region) -> Any:
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def stack(x: Tensor) -> Tensor:
            for layer in layers:
                if random.random() < 0.5:
                    x = layer(x).tanh()
            return x * 2

        for _ in range(10):
            x = torch.randn(3, 4, requires_grad=True)
            region(stack, x).square().sum().backward()
        return layers

    assert differences(step) == []


def masks_that_differ(threads: int, steps: int) -> int:
    """Run dropout in regions in several threads; count the masks not replayed."""
    start = threading.Barrier(threads)

    def train() -> int:
        wrong = 0
        start.wait()
        for _ in range(steps):
            x = torch.ones(20000, requires_grad=True)
            y = mb.checkpoint(F.dropout, x, 0.5)
            y.backward(torch.ones_like(y))
            wrong += not torch.equal(x.grad, y)  # type: ignore[arg-type]
        return wrong

    with ThreadPoolExecutor(threads) as pool:
        runs = [pool.submit(devices.elsewhere(train)) for _ in range(threads)]
        return sum(run.result() for run in runs)


@pytest.mark.parametrize("threads", [2, 4])
def test_b36_masks_are_replayed_although_other_threads_run_regions(
    threads: int,
) -> None:
    # torch 2.13 swaps the state of the global generator while other threads draw.
    assert masks_that_differ(threads, steps=50) == 0


def test_b36_regions_in_threads_lose_no_draw_of_the_stream() -> None:
    # Every thread draws equally much, so the stream's end does not depend on their
    # order. torch 2.13 puts back a state that another thread has moved on from.
    torch.manual_seed(5)
    masks_that_differ(threads=4, steps=25)
    found = devices.rng_state()
    torch.manual_seed(5)
    for _ in range(4 * 25):
        F.dropout(torch.ones(20000), 0.5)
    assert torch.equal(found, devices.rng_state())


def test_b36_draws_of_another_thread_before_the_backward_do_not_matter() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = mb.checkpoint(F.dropout, x, 0.5)
    other = threading.Thread(target=devices.elsewhere(torch.rand), args=(77,))
    other.start()
    other.join()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)


RRELU: dict[str, Callable[[Tensor], Tensor]] = {
    "last": lambda x: F.rrelu(x.exp() - 2, training=True),
    "in the middle": lambda x: F.rrelu(x.exp() - 2, training=True).sin().exp(),
    "in place": lambda x: F.rrelu_(x.exp() - 2, training=True),
    "alone": lambda x: F.rrelu(x, training=True),
    "twice": lambda x: F.rrelu(F.rrelu(x, training=True) * 2, training=True),
    "torch's own": lambda x: torch.rrelu(x, training=True),
    "with a default device": lambda x: under(x.device, x),
    "in a function mode": lambda x: under(BaseTorchFunctionMode(), x),
}


def under(context: AbstractContextManager[object], x: Tensor) -> Tensor:
    with context:
        return torch.rrelu(x, training=True)


def dirty_memory(x: Tensor) -> Tensor:
    """Leave no memory free of `x`'s size that happens to hold what is needed."""
    blocks = [torch.full_like(x, 1e9) for _ in range(20)]
    del blocks
    return x


@pytest.mark.parametrize("where", RRELU)
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("guards", [True, False])  # Without them, nothing is compared.
def test_b37_noise_that_is_filled_after_it_is_saved_survives_early_stop(
    where: str, early_stop: bool, guards: bool
) -> None:
    # torch 2.13 stops when the noise is saved, before the kernel fills it.
    def step(region: Region) -> Any:
        x = torch.randn(500, requires_grad=True)
        x = torch.randn(500, requires_grad=True)
        y = region(lambda x: RRELU[where](dirty_memory(x)), x)
        (y * torch.arange(500)).sum().backward()
        return y, x

    region = region_with(early_stop=early_stop, guards=guards)
    assert differences(step, region) == []


def test_b37_the_leaky_slopes_of_rrelu_come_from_the_noise() -> None:
    # Guards the test above: the plain gradient does depend on the noise.
    def grad(seed: int) -> Tensor:
        torch.manual_seed(seed)
        x = -torch.ones(50, requires_grad=True)
        return torch.autograd.grad(plain(RRELU["alone"], x).sum(), x)[0]

    assert not torch.equal(grad(0), grad(1))
