"""Behaviours 28-33: a recomputation sees the random numbers the forward saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import membudget as mb
from tests import devices
from tests.behaviours.steps import (
    Block,
    Region,
    differences,
    region_with,
)


def test_b28_dropout_masks_are_replayed() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = mb.checkpoint(F.dropout, x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    # y is x times the mask, x is ones, and the gradient is the mask.
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("guards", [True, False])
def test_b28_a_block_with_dropout_equals_the_plain_one(guards: bool) -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.4), torch.randn(2, 5, 8, requires_grad=True)
        region(model, x).square().sum().backward()
        return model, x

    assert differences(step, region_with(guards=guards)) == []


def test_b29_after_the_backward_the_stream_is_where_a_plain_run_leaves_it() -> None:
    def step(region: Region) -> Any:
        x = torch.ones(50, requires_grad=True)
        h = region(F.dropout, x, 0.5)
        between = torch.rand(3)
        region(lambda h: F.dropout(h.sin(), 0.3).exp(), h).sum().backward()
        return x, between, torch.rand(3)

    assert differences(step) == []


def test_b29_the_backward_of_a_region_draws_nothing() -> None:
    x = torch.ones(50, requires_grad=True)
    loss = mb.checkpoint(F.dropout, x, 0.5).sum()
    before = devices.rng_state()
    loss.backward()
    assert torch.equal(before, devices.rng_state())


def another_state() -> None:
    for stream in devices.default_generators():
        stream.set_state(torch.Generator(stream.device).get_state())


BETWEEN: dict[str, Callable[[], Any]] = {
    "draws": lambda: torch.randn(17),
    "reseeding": lambda: torch.manual_seed(123),
    "another state": another_state,
}


@pytest.mark.parametrize("kind", BETWEEN)
def test_b30_draws_and_reseeding_before_the_backward_do_not_matter(kind: str) -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.4), torch.randn(2, 5, 8, requires_grad=True)
        loss = region(model, x).square().sum()
        BETWEEN[kind]()
        loss.backward()
        return model, x

    assert differences(step) == []


def many_random_operators(x: Tensor) -> Tensor:
    """Apply random operators of many kinds to a square matrix."""
    x = x * torch.rand_like(x) + torch.randn(x.shape)
    x = F.alpha_dropout(F.dropout(x, 0.3), 0.2)
    x = x[torch.randperm(len(x))] * torch.bernoulli(torch.full(x.shape, 0.7))
    x = x.sin() * torch.empty_like(x).exponential_().detach()
    x = x + torch.normal(torch.zeros(x.shape), 0.1) * torch.randint(0, 3, x.shape)
    rows = torch.multinomial(torch.ones(len(x)), len(x), replacement=True)
    x = x[rows] * torch.empty_like(x).uniform_(-1, 1)
    return F.gumbel_softmax(x, dim=-1) + F.feature_alpha_dropout(x[None], 0.5)[0]


def test_b31_many_random_operators_are_replayed() -> None:
    def step(region: Region) -> Any:
        x = torch.randn(6, 6, requires_grad=True)
        y = region(many_random_operators, x)
        y.square().sum().backward()
        return y, x

    assert differences(step) == []


def test_b31_several_and_nested_random_regions_are_replayed() -> None:
    def step(region: Region) -> Any:
        def outer(x: Tensor) -> Tensor:
            x = F.dropout(x, 0.2)
            x = region(many_random_operators, x)
            x = x * torch.rand_like(x)
            return F.dropout(region(inner, x).tanh(), 0.2)

        def inner(x: Tensor) -> Tensor:
            return F.dropout(region(F.dropout, x.sin(), 0.3).exp(), 0.1)

        x = torch.randn(6, 6, requires_grad=True)
        y = region(outer, region(outer, x) * torch.rand(6, 6))
        y.square().sum().backward()
        return y, x, torch.rand(3)

    assert differences(step) == []


def test_b32_preserve_rng_state_false_switches_the_replay_off() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    y = mb.checkpoint(F.dropout, x, 0.5, preserve_rng_state=False)
    before = devices.rng_state()
    y.sum().backward()
    assert x.grad is not None
    assert not torch.equal(x.grad, y)
    # The recomputation drew from the stream like any other code.
    assert not torch.equal(before, devices.rng_state())


def test_b32_without_the_replay_a_region_that_draws_nothing_is_still_equal() -> None:
    def step(region: Region) -> Any:
        model, x = Block(), torch.randn(2, 5, 8, requires_grad=True)
        region(model, x).square().sum().backward()
        return model, x

    assert differences(step, region_with(preserve_rng_state=False)) == []


@pytest.mark.cuda
@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, lambda x: [x], lambda x: {"a": ({"b": x},)}],
    ids=["bare", "list", "deeply nested"],
)
def test_b33_the_device_streams_of_nested_arguments_are_saved(
    wrap: Callable[[Tensor], Any],
) -> None:
    def function(batch: Any) -> Tensor:
        while not isinstance(batch, Tensor):
            batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
        return F.dropout(batch, 0.5)

    x = torch.ones(1000, device="cuda", requires_grad=True)
    y = mb.checkpoint(function, wrap(x))
    torch.rand(5, device="cuda")
    before = torch.cuda.get_rng_state()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)
    assert torch.equal(before, torch.cuda.get_rng_state())
