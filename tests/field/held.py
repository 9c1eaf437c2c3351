"""Train by a real library, plainly and within budgets until one is not refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import membudget as mb
from tests.field.counting_allocator import restarted, so_far
from tests.loop.training import live_bytes

MOST_REFUSALS = 6


class Trained(NamedTuple):
    """What a training leaves behind.

    Attributes:
        weights: Parameters and buffers.
        peak_bytes: What an independent allocator counted.
        fitted: What the budget returned, or a callback that holds it.
    """

    weights: list[torch.Tensor]
    peak_bytes: int
    fitted: Any


class Held(NamedTuple):
    """A training that kept its budget and its weights."""

    plain_bytes: int
    limit_bytes: int
    fitted: Any


def begun(limit: int | None) -> tuple[Callable[[], int], int | None]:
    """Begin to count; return what reads the peak, and the limit with what lives."""
    gc.collect()
    before = restarted()
    if limit is not None:
        limit += live_bytes()
    return lambda: so_far() - before, limit


def held(train: Callable[[int | None], Trained], share: float) -> Held:
    """Train plainly, then within the least budget from a share of that on.

    Args:
        train: Trains within some bytes above what lives already; `None` is no budget.
        share: Share of the plain peak that is tried first.
    """
    plain = train(None)
    limit = int(share * plain.peak_bytes)
    for _ in range(MOST_REFUSALS):
        try:
            found = train(limit)
            break
        except mb.BudgetError as error:
            limit += error.least_bytes - error.asked_bytes
    else:
        pytest.fail(f"{MOST_REFUSALS} budgets were refused")
    assert all(map(torch.equal, plain.weights, found.weights))
    assert found.peak_bytes <= limit
    return Held(plain.peak_bytes, limit, found.fitted)
