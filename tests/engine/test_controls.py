"""Collecting regions, to recompute them before a backward pass needs them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.oracles import CountedOperators

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


def block(x: Tensor) -> Tensor:
    return torch.dropout(x.sin().exp(), 0.5, True).cos()


def run_collected(engine: str) -> tuple[Tensor, Tensor, mb.Regions]:
    torch.manual_seed(0)
    x = torch.randn(5, requires_grad=True)
    with mb.collect_regions() as regions:
        y = mb.checkpoint(block, x, engine=engine, verify=False)
    return x, y, regions


@ENGINES
def test_the_next_backward_takes_what_was_recomputed(engine: str) -> None:
    x, y, regions = run_collected(engine)
    expected, z, _ = run_collected(engine)
    z.sum().backward()

    regions.recompute()
    with CountedOperators() as counter:
        y.sum().backward()

    assert "exp" not in counter.counts
    assert x.grad is not None
    assert expected.grad is not None
    assert torch.equal(x.grad, expected.grad)


@ENGINES
def test_recomputing_is_done_once(engine: str) -> None:
    _, _, regions = run_collected(engine)
    regions.recompute()
    with CountedOperators() as counter:
        regions.recompute()

    assert "exp" not in counter.counts


@ENGINES
def test_a_second_backward_recomputes_again(engine: str) -> None:
    x, y, regions = run_collected(engine)
    regions.recompute()
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(y.sum(), x)

    assert torch.equal(first, second)


@ENGINES
def test_collected_regions_die_with_their_graph(engine: str) -> None:
    _, y, regions = run_collected(engine)
    assert len(regions) == 1
    del y
    gc.collect()

    assert len(regions) == 0
    regions.recompute()


def test_only_what_runs_inside_is_collected() -> None:
    x = torch.randn(5, requires_grad=True)
    before = mb.checkpoint(block, x)
    with mb.collect_regions() as regions:
        inside = mb.checkpoint(block, x)
    after = mb.checkpoint(block, x)

    assert len(regions) == 1
    del before, inside, after


@ENGINES
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_dropped_tensor_is_recomputed_ahead(engine: str, count: int) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.exp()
        return x

    x = torch.linspace(0, 1, 3, requires_grad=True)
    with mb.collect_regions() as regions:
        y = mb.checkpoint(function, x, engine=engine, verify=False)
    with CountedOperators() as ahead:
        regions.recompute()
    with CountedOperators() as behind:
        (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(function(x).sum(), x)

    assert ahead.counts["exp"] == count
    assert "exp" not in behind.counts
    assert torch.equal(found, expected)
