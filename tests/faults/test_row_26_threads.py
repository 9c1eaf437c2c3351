"""Row 26: a recompute in one thread disturbs the random numbers of another.

The generator of the CPU is one for the whole process. Torch notes its state when a
region begins and draws later; if another thread draws in between, the recompute makes
another dropout mask than the forward did. No error tells so.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.devices import elsewhere
from tests.faults.implementations import (
    Checkpoint,
    ours,
    plain,
    torch_fails,
    torch_rerun,
)

STEPS = 50


def masked(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x.sin(), 0.5)


def has_one_mask(checkpoint: Checkpoint, x: Tensor) -> bool:
    """Run a step; tell whether the gradient's mask is the one of the forward."""
    x = x.detach().requires_grad_()
    y = checkpoint(masked, x)
    y.sum().backward()
    assert x.grad is not None
    return torch.equal(x.grad != 0, y.detach() != 0)


def wrong_masks(checkpoint: Checkpoint, threads: int) -> int:
    """Run steps in several threads at once; count those with two masks."""
    torch.manual_seed(0)
    start = threading.Barrier(threads)

    def run(_: int) -> int:
        start.wait()
        x = torch.ones(20_000)
        return sum(not has_one_mask(checkpoint, x) for _ in range(STEPS))

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(elsewhere(run), range(threads)))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_row26_gradient_mask_is_the_forward_mask_in_every_thread(threads: int) -> None:
    assert wrong_masks(ours, threads) == 0


@pytest.mark.parametrize("threads", [1, 4])
def test_row26_plain_steps_have_one_mask(threads: int) -> None:
    assert wrong_masks(plain, threads) == 0


@torch_fails
def test_row26_torch_redraws_the_mask_after_another_thread_drew() -> None:
    """The unlucky order of two threads, made certain by waiting for the other one."""

    def region(x: Tensor) -> Tensor:
        if not recomputing:
            other = threading.Thread(
                target=elsewhere(has_one_mask), args=(plain, torch.ones(100))
            )
            other.start()
            other.join()
        return masked(x)

    recomputing = False
    torch.manual_seed(0)
    x = torch.ones(20_000, requires_grad=True)
    y = torch_rerun(region, x)
    recomputing = True
    y.sum().backward()

    assert x.grad is not None
    assert not torch.equal(x.grad != 0, y.detach() != 0)


def test_row26_switches_of_one_thread_do_not_hold_in_another() -> None:
    seen: list[bool] = []

    def region(x: Tensor) -> Tensor:
        # A thread that runs beside a recompute is not part of it.
        other = threading.Thread(target=lambda: seen.append(mb.is_recomputing()))
        other.start()
        other.join()
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    mb.checkpoint(region, x).sum().backward()

    assert seen == [False, False]
