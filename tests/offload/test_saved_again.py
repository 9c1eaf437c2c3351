"""A storage that is saved, written to, and saved again holds two contents."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.offload.saved_storage import SavedStorage
from membudget.offload.unsent import Unsent
from tests.seconds import DEADLOCK_S


@pytest.mark.parametrize("window", [0, 1 << 20])
def test_a_write_that_only_a_later_step_does_is_seen(window: int):
    def slope(around: Any, writes: bool) -> torch.Tensor:
        p = torch.linspace(1, 2, 64).requires_grad_()
        x = torch.linspace(-1, 1, 64)
        with around:
            # Saves `x`, which is then copied; no gradient is asked for through this.
            unused = (p * x).exp()
            if writes:
                x += 1
            loss = (p * x).sum()
            del x
        loss.backward()
        assert p.grad is not None
        assert not unused.isnan().any()
        return p.grad

    off = mb.offload("1MiB", window=window, smallest=1)
    for writes in (False, False, True, True):
        assert torch.equal(slope(off, writes), slope(nullcontext(), writes))


def silently(
    start: torch.Tensor, writes: Sequence[float], off: mb.Offload | None
) -> torch.Tensor:
    """Return a gradient where a storage is saved after each write to it."""
    weight = torch.ones(3, requires_grad=True)

    def forward() -> torch.Tensor:
        filled, total = start.clone(), torch.zeros(4)
        for number, value in enumerate(writes):
            filled.data[number] = value
            total = total + (weight[:, None] * filled).sum(0).sin()
        return total.sum()

    with off or nullcontext():
        loss = forward()
    return torch.autograd.grad(loss, weight)[0]


def by_parts(weights: list[torch.Tensor]) -> torch.Tensor:
    """Save parts that count their versions apart, and write to both silently."""
    filled = weights[0].detach() * 1.5
    one, two = filled.chunk(2)
    one.add_(1)
    total = (one * weights[1][:8]).sum() + (two * weights[1][8:]).sum()
    filled.data.mul_(2)
    return total + (one * weights[2][:8]).sum() + (two * weights[2][8:]).sum()


def by_a_part(weights: list[torch.Tensor]) -> torch.Tensor:
    """Save all, a part, and all again, after a silent write."""
    filled = weights[0].detach() * 1.5
    filled.add_(1)
    total = (filled * weights[1]).sum() + (filled[:8] * weights[1][:8]).sum()
    filled.data.mul_(2)
    return total + (filled * weights[2]).sum()


def by_noise(weights: list[torch.Tensor]) -> torch.Tensor:
    """Draw noise twice into the memory that the first operator has saved."""
    noise, total = torch.zeros(16), torch.zeros(())
    for seed, weight in enumerate(weights[1:]):
        torch.manual_seed(seed)
        drawn = torch.ops.aten.rrelu_with_noise(-weight, noise, 0.1, 0.5, True)
        total = total + drawn.sum()
    return total


@pytest.mark.parametrize("first", [0, None])
@pytest.mark.parametrize("forward", [by_parts, by_a_part, by_noise])
def test_a_silent_write_to_memory_that_is_saved_in_parts_is_seen(
    forward: Callable[[list[torch.Tensor]], torch.Tensor], first: int | None
) -> None:
    off = mb.offload("1MiB", smallest=1, window=0, first=first)
    weights = [torch.rand(16, requires_grad=True) + 0.5 for _ in range(3)]
    for _ in range(3):
        expected = torch.autograd.grad(forward(weights), weights[1:])
        with off:
            loss = forward(weights)
        found = torch.autograd.grad(loss, weights[1:])
        assert all(map(torch.equal, found, expected))
    del loss
    assert off.used_bytes() == 0


def test_a_tensor_that_one_thread_has_dropped_is_saved_by_another() -> None:
    off = mb.offload("1MiB", smallest=1, first=0)
    kept, weight = [torch.rand(16)], torch.ones(16, requires_grad=True)
    has_saved, may_end = threading.Event(), threading.Event()

    def save_and_stay() -> None:
        with off:
            (kept[0] * weight).sum()
            has_saved.set()
            assert may_end.wait(DEADLOCK_S)

    thread = threading.Thread(target=save_and_stay)
    thread.start()
    assert has_saved.wait(DEADLOCK_S)
    with off:
        loss = (kept[0] * weight).sum()
    expected = kept.pop().clone()
    may_end.set()
    thread.join()
    assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)


ZEROS, DONE = torch.zeros(3, 4), torch.arange(1.0, 4)[:, None].repeat(1, 4)


@pytest.mark.parametrize("starts", [[ZEROS] * 3, [DONE, ZEROS, ZEROS]])
def test_a_storage_that_is_filled_silently_is_read_as_it_is_at_last(
    starts: list[torch.Tensor],
) -> None:
    """As torchdiffeq's solvers do: no version tells of a write through `.data`.

    Memory that is not initialised may hold by chance what will be written: `DONE`.
    """
    off = mb.offload("1MiB", smallest=1, window=0)
    for start in starts:
        expected = silently(start, (1, 2, 3), None)
        assert torch.equal(silently(start, (1, 2, 3), off), expected)


def test_a_silent_write_that_only_a_later_step_makes_is_seen() -> None:
    off = mb.offload("1MiB", smallest=1, window=0)
    for writes in ((1,), (1,), (1, 2), (1, 2, 3), (1,), (1, 2)):
        expected = silently(ZEROS, writes, None)
        assert torch.equal(silently(ZEROS, writes, off), expected)


def test_what_nobody_needs_is_forgotten_whichever_thread_has_saved_it() -> None:
    tensor, unsent = torch.rand(4), Unsent()
    entry = SavedStorage(tensor, tensor.untyped_storage())
    thread = threading.Thread(target=unsent.add, args=(entry,))
    thread.start()
    thread.join()
    before = sys.getrefcount(entry)
    unsent.forget(entry)
    assert sys.getrefcount(entry) == before - 1
