"""Behaviours 50-54: regions inside regions, to any depth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.steps import (
    Region,
    Storages,
    differences,
    perceptron,
    plain,
    region_with,
)
from tests.garbage import no_collector


def nested(
    region: Region, depth: int, x: Tensor, weight: Tensor, calls: Counter[int]
) -> Tensor:
    """Compute at `depth` levels, each one region further in; count the calls."""

    def level(x: Tensor, k: int) -> Tensor:
        calls[k] += 1
        x = (x @ weight).sin()
        if k < depth:
            x = region(level, x, k + 1)
        return (x * weight).tanh()

    return region(level, x, 1)


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("early_stop", [True, False])
def test_b50_gradients_are_right_at_any_depth(depth: int, early_stop: bool) -> None:
    def step(region: Region) -> Any:
        x, weight = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        y = nested(region, depth, x, weight, Counter())
        y.sum().backward()
        return y, x, weight

    assert differences(step, region_with(early_stop=early_stop)) == []


def test_b50_a_nest_with_dropout_parameters_and_buffers_equals_the_plain_run() -> None:
    # torch 2.13 updates the running statistics once more for every level.
    def step(region: Region) -> Any:
        model = nn.ModuleList(
            nn.Sequential(perceptron(), nn.BatchNorm1d(6), nn.Dropout(0.3))
            for _ in range(3)
        )

        def level(x: Tensor, k: int) -> Tensor:
            x = model[k](x)
            return region(level, x, k + 1).tanh() if k < 2 else x.sin()

        x = torch.randn(4, 6, requires_grad=True)
        y = region(level, x, 0)
        y.square().sum().backward()
        return y, x, model

    assert differences(step) == []


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("backward", [True, False])
def test_b50_the_graph_of_a_nest_dies_with_its_output(
    depth: int, backward: bool
) -> None:
    storages = Storages()

    def level(x: Tensor, k: int) -> Tensor:
        x = storages.see(storages.see(x.sin()).exp())
        if k < depth:
            x = mb.checkpoint(level, x, k + 1)
        return storages.see(storages.see(x.cos()).tanh())

    with no_collector():
        x = torch.randn(4, requires_grad=True)
        y = mb.checkpoint(level, x, 1)
        if backward:
            y.sum().backward()
        del y
        assert storages.alive() == 0
    assert len(storages.seen) >= 4 * depth


@pytest.mark.parametrize("siblings", [2, 3, 5])
def test_b51_a_region_may_hold_several_regions(siblings: int) -> None:
    def step(region: Region) -> Any:
        layers = nn.ModuleList(perceptron() for _ in range(siblings))

        def outer(x: Tensor) -> Tensor:
            for layer in layers:
                x = F.dropout(region(layer, x).sin(), 0.1)
            return x.exp()

        x = torch.randn(4, 6, requires_grad=True)
        y = region(outer, x)
        y.sum().backward()
        return y, x, layers

    assert differences(step) == []


def test_b51_siblings_may_share_their_input_and_hold_siblings_themselves() -> None:
    def step(region: Region) -> Any:
        weight = torch.randn(3, 3, requires_grad=True)

        def leaf(x: Tensor) -> Tensor:
            return (x @ weight).sin().exp()

        def pair(x: Tensor) -> Tensor:
            return region(leaf, x) * region(leaf, x.tanh())

        def outer(x: Tensor) -> Tensor:
            return region(pair, x).sin() + region(pair, x).cos()

        x = torch.randn(3, 3, requires_grad=True)
        y = region(outer, x)
        y.sum().backward()
        return y, x, weight

    assert differences(step) == []


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("early_stop", [True, False])
def test_b52_a_nested_function_runs_at_most_once_per_level_more(
    depth: int, early_stop: bool
) -> None:
    calls: Counter[int] = Counter()
    x, weight = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    region = region_with(early_stop=early_stop)
    y = nested(region, depth, x, weight, calls)
    levels = range(1, depth + 1)
    assert calls == dict.fromkeys(levels, 1)
    y.sum().backward()
    # Level k lies in k regions: one forward, and one recomputation of each.
    assert all(2 <= calls[k] <= k + 1 for k in levels)


def halves(region: Region, blocks: Sequence[Any], x: Tensor) -> Tensor:
    """Run `blocks` in order, in nested regions over halves."""
    if len(blocks) == 1:
        return blocks[0](x)
    middle = len(blocks) // 2
    x = region(halves, region, blocks[:middle], x)
    return region(halves, region, blocks[middle:], x)


def test_b53_recursion_by_halves_equals_the_plain_chain() -> None:
    def step(region: Region) -> Any:
        blocks = nn.ModuleList(perceptron() for _ in range(11))
        x = torch.randn(4, 6, requires_grad=True)
        y = region(halves, region, list(blocks), x)
        y.square().sum().backward()
        return y, x, blocks

    assert differences(step) == []


@pytest.mark.parametrize("blocks", [8, 32, 64])
def test_b53_recursion_by_halves_keeps_only_the_outermost_input(blocks: int) -> None:
    storages = Storages()

    def block(x: Tensor) -> Tensor:
        return storages.see(x.sin())

    with no_collector():
        x = torch.randn(4, requires_grad=True)
        y = mb.checkpoint(halves, mb.checkpoint, [block] * blocks, x)
        assert storages.alive() == 1  # y
        storages.most = 0
        y.sum().backward()
        del y
        assert storages.alive() == 0
    # Besides the output, at most one border for each level of the recursion is alive,
    # and what the block at hand reads and writes.
    assert storages.most <= math.log2(blocks) + 2


def test_b53_recursion_by_halves_runs_a_block_once_per_level_more() -> None:
    calls: Counter[int] = Counter()

    def block(i: int) -> Any:
        def run(x: Tensor) -> Tensor:
            calls[i] += 1
            return x.sin().exp()

        return run

    x = torch.randn(4, requires_grad=True)
    blocks = [block(i) for i in range(16)]
    mb.checkpoint(halves, mb.checkpoint, blocks, x).sum().backward()
    # A block lies in five regions: the outermost and one for each halving.
    assert max(calls.values()) <= 1 + 5
    assert len(calls) == 16


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_b54_early_stop_may_be_off_in_any_part_of_a_nest(
    outer: bool, inner: bool
) -> None:
    ended: Counter[str] = Counter()

    def inside(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        ended["inner"] += 1
        return y

    def outside(x: Tensor) -> Tensor:
        h = mb.checkpoint(inside, x.tanh(), early_stop=inner)
        y = (h * 2).exp().sin()
        ended["outer"] += 1
        return y

    x = torch.rand(4, requires_grad=True)
    y = mb.checkpoint(outside, x, early_stop=outer)
    y.sum().backward()
    grad = x.grad
    x.grad = None
    # The plain run ends each function once more.
    plain(lambda x: (inside(x.tanh()) * 2).exp().sin(), x).sum().backward()
    assert grad is not None
    assert x.grad is not None
    assert torch.equal(grad, x.grad)
    assert ended["outer"] == (1 if outer else 2)
    # Forward, recomputation of the outer region, its own recomputation; and the plain.
    assert ended["inner"] == (2 if inner else 3) + 1


def test_b54_early_stop_off_by_context_reaches_the_regions_inside() -> None:
    ended: Counter[str] = Counter()

    def inside(x: Tensor) -> Tensor:
        y = x.sin().cos()
        ended["inner"] += 1
        return y

    def outside(x: Tensor) -> Tensor:
        y = mb.checkpoint(inside, x.tanh()).sin()
        ended["outer"] += 1
        return y

    x = torch.rand(4, requires_grad=True)
    with mb.compat.set_checkpoint_early_stop(False):
        y = mb.checkpoint(outside, x)
    y.sum().backward()
    assert ended["outer"] == 2
    assert ended["inner"] in (2, 3)
