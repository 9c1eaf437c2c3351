"""Behaviours 111-113: what is alive, when, and that reference counts free it.

Storages are watched through weak references, with the garbage collector off; a number
of storages alive is asserted, not a bound, where the number follows from the region.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.behaviours.steps import (
    SINES,
    Region,
    Storages,
    plain,
    sines,
)
from tests.garbage import no_collector


def test_b111_the_forward_of_a_region_keeps_the_output_only() -> None:
    def alive(region: Region) -> int:
        storages = Storages()
        with no_collector():
            x = torch.randn(4, requires_grad=True)
            y = region(sines, x, storages)
            count = storages.alive()
        assert y.requires_grad
        return count

    assert alive(plain) == SINES
    assert alive(mb.checkpoint) == 1


@pytest.mark.parametrize("keyword", [False, True])
def test_b111_a_chain_of_regions_keeps_the_borders(keyword: bool) -> None:
    storages = Storages()
    with no_collector():
        h = torch.randn(4, requires_grad=True)
        for _ in range(6):
            if keyword:
                h = mb.checkpoint(sines, storages=storages, x=h)
            else:
                h = mb.checkpoint(sines, h, storages)
        assert storages.alive() == 6
        assert h.requires_grad


def test_b112_the_peak_of_the_backward_is_the_borders_and_one_region() -> None:
    regions, storages = 6, Storages()
    with no_collector():
        h = torch.randn(4, requires_grad=True)
        for _ in range(regions):
            h = mb.checkpoint(sines, h, storages)
        loss = h.sum()
        storages.most = 0
        loss.backward()
        # All borders are alive when the last region, the first to be recomputed, has
        # made all that its backward needs: every result but the last.
        assert storages.most == regions + SINES - 1


def test_b112_the_peak_in_bytes_is_the_borders_and_one_region() -> None:
    regions, size = 8, 1 << 18

    def peak_bytes(region: Region) -> int:
        x = torch.randn(size // 4, requires_grad=True)

        def step() -> None:
            h = x
            for _ in range(regions):
                h = region(sines, h, Storages())
            h.sum().backward()

        return mb.peak(step).peak_bytes

    # Gradients take three tensors at most: of a result, of its input, and what a
    # formula holds between; the loss and its gradient are a few bytes.
    assert peak_bytes(mb.checkpoint) <= (regions + SINES - 1 + 3) * size + 64
    assert peak_bytes(plain) >= regions * SINES * size


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
def test_b113_recomputed_tensors_are_freed_as_they_are_used(
    retain_graph: bool, early_stop: bool
) -> None:
    storages, alive = Storages(), []

    def function(x: Tensor) -> Tensor:
        # Autograd calls the hook of the i-th result when its gradient is there: when
        # the next sine has used it, and before the sine that made it uses its input.
        for _ in range(SINES):
            x = storages.see(x.sin())
            x.register_hook(lambda grad: alive.append(storages.alive()))
        return x

    with no_collector():
        x = torch.randn(4, requires_grad=True)
        loss = mb.checkpoint(function, x.exp(), early_stop=early_stop).sum()
        storages.seen.clear()
        loss.backward(retain_graph=retain_graph)
        assert storages.alive() == 0
    # Before the recomputation there is none; then one fewer with each sine.
    assert alive == [0, *reversed(range(SINES - 1))]


def test_b113_a_second_backward_frees_them_too() -> None:
    storages = Storages()
    with no_collector():
        x = torch.randn(4, requires_grad=True)
        loss = mb.checkpoint(sines, x, storages).sum()
        for _ in range(3):
            storages.seen.clear()
            loss.backward(retain_graph=True)
            assert len(storages.seen) == SINES - 1
            assert storages.alive() == 0
