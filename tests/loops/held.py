"""Run a loop plainly, then under budgets until one is met; compare bits and bytes.

A budget that is refused is raised to what the refusal names, which then is enough, or
is refused by a later micro-batch that needs more. A budget that is met may be asked to
be met again, by a run that begins with what the first one learned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

import membudget as mb
from tests.loops.loop import Loop
from tests.loops.run import Around, Outcome, run

MOST_REFUSALS = 16

Run = Callable[[], None]
"""Runs a loop; called by what measures the peak of that."""


def check(
    loop: Loop,
    peak_of: Callable[[Run], int],
    others_bytes: Callable[[], int],
    again: bool = False,
    **options: Any,
) -> list[int]:
    """Check that a loop keeps its budgets and its bits; return the budgets.

    Args:
        loop: The loop.
        peak_of: Runs a function; returns the peak of the bytes that it allocates.
        others_bytes: Returns what is live on the device beside the loop.
        again: Whether a second run begins with what the first one learned.
        options: Of `membudget.budget`.
    """
    plain, plain_bytes, _ = _measured(loop, None, peak_of)
    assert plain is not None
    limits = [int(loop.share * plain_bytes)]
    # Once: a model that was refused lives until a later collection of garbage.
    others = others_bytes()
    while len(limits) <= MOST_REFUSALS:
        budget = limits[-1] + others
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mb.BudgetWarning)
            plans: list[mb.Plan] = []
            around: Around = partial(_saving, budget, plans, options)
            found, peak_bytes, least_bytes = _measured(loop, around, peak_of)
            if found is not None:
                _check_equal(loop, plain, found, peak_bytes - limits[-1])
                if not again:
                    return limits
                del found  # It counts, as the plain outcome does.
                budget = limits[-1] + others_bytes()
                around = partial(mb.budget, budget=budget, plan=plans[-1], **options)
                found, peak_bytes, _ = _measured(loop, around, peak_of)
                assert found is not None, f"refused with what is known: {loop}"
                _check_equal(loop, plain, found, peak_bytes - limits[-1])
                return limits
        limits.append(least_bytes - others)
    raise AssertionError(f"the budgets {limits} were refused: {loop}")


def _check_equal(loop: Loop, plain: Outcome, found: Outcome, beyond: int) -> None:
    assert beyond <= 0, f"{beyond:,} bytes over the budget: {loop}"
    assert found.equals(plain), f"other bits: {loop}"


@contextmanager
def _saving(
    budget: int,
    plans: list[mb.Plan],
    options: dict[str, Any],
    models: list[nn.Module],
) -> Iterator[None]:
    """Hold models to a budget; note the plan in the end."""
    with mb.budget(models, budget, **options) as fitted:
        yield
    plans.append(fitted.plan)


def _measured(
    loop: Loop, around: Around | None, peak_of: Callable[[Run], int]
) -> tuple[Outcome | None, int, int]:
    """Return what a loop leaves behind, its peak, and the budget that is asked for."""
    models: list[nn.Module] = []
    least_bytes = 0

    def measured() -> None:
        nonlocal least_bytes
        try:
            models.extend(run(loop, around))
        except mb.BudgetError as error:
            least_bytes = error.least_bytes

    peak_bytes = peak_of(measured)
    return (Outcome.of(models) if models else None), peak_bytes, least_bytes
