"""Loops drawn at random keep their budget, and end in the plain loop's bits.

The peak is that of an allocator that shares nothing with `src`, around the whole loop.
A budget that is refused is raised to what the refusal names, which then is enough, or
is refused by a later micro-batch that needs more.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.engine import native
from membudget.memory.counting import Counted
from tests.field.counting_allocator import NoCompilerError, restarted, so_far
from tests.loops.loop import Loop, Outcome, drawn, run

MOST_REFUSALS = 16

FIRST, FEW, MANY = 100, 10, 1000


def measured(loop: Loop, around: Any = None) -> tuple[Outcome, int]:
    """Run a loop; return what it leaves behind, and its peak."""
    gc.collect()
    before = restarted()
    most: list[int] = []
    found = run(loop, around, lambda: most.append(so_far()))
    return found, most[0] - before


def others_bytes() -> int:
    """Return the bytes of tensors that other tests hold."""
    gc.collect()
    return Counted(torch.device("cpu")).live_bytes()


def check(loop: Loop) -> None:
    """Run a loop plainly and under budgets until one is met; compare them."""
    plain, plain_bytes = measured(loop)
    limit = int(loop.share * plain_bytes)
    others = others_bytes()
    for _ in range(MOST_REFUSALS):
        budget = limit + others
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", mb.BudgetWarning)
                found, peak_bytes = measured(
                    loop, lambda models, budget=budget: mb.budget(models, budget)
                )
        except mb.BudgetError as error:
            limit = error.least_bytes - others
            continue
        assert found.equals(plain), f"other bits: {loop}"
        assert peak_bytes <= limit, f"{peak_bytes - limit:,} bytes over: {loop}"
        return
    pytest.fail(f"{MOST_REFUSALS} budgets were refused: {loop}")


def loops(first: int, count: int) -> list[int]:
    """Return seeds of loops; torch lacks a second derivative that some would need."""
    return [seed for seed in range(first, first + count) if not drawn(seed).inner]


@pytest.mark.cpu_only("the peak is counted by an allocator of the CPU")
@pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("seed", loops(FIRST, FEW))
def test_a_random_loop_keeps_its_budget_and_its_bits(seed):
    try:
        check(drawn(seed))
    except NoCompilerError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.cpu_only("the peak is counted by an allocator of the CPU")
@pytest.mark.parametrize("seed", loops(FIRST + FEW, MANY - FEW))
def test_many_random_loops_keep_their_budgets_and_their_bits(seed):
    check(drawn(seed))
