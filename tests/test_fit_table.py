"""Models of many kinds at six budgets each: what was given is kept, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from membudget.errors import BudgetError
from membudget.fit import fit
from membudget.fitted import Fitted
from membudget.memory import peak
from membudget.step import Step
from tests.planner.models import measured_peak
from tests.table_models import TABLE

PERCENT = (80, 60, 50, 40, 30, 20)
ALWAYS = ("mlp", "siamese", "autoencoder")
NAMES = [
    pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow)
    for name in TABLE
]


def fitted_or_refused(
    model: nn.Module, batch: Any, budget: int | str
) -> Fitted | BudgetError:
    try:
        return fit(model, batch, budget, fake=True)
    except BudgetError as error:
        return error


def check_kept(fitted: Fitted, model: nn.Module, batch: Any) -> None:
    """Check one cell of the table."""
    plan = fitted.plan
    assert fitted.peak_bytes <= plan.budget_bytes
    step = Step(model, batch, None)
    step.prepare()
    assert peak(step.run).peak_bytes <= plan.budget_bytes  # The first step, too.
    assert measured_peak(model, batch) <= plan.budget_bytes
    assert plan.peak_bytes == pytest.approx(fitted.peak_bytes, rel=0.02)
    assert plan.slowdown >= plan.bound >= 1
    audit = fitted.audit()
    assert audit.equal, str(audit)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_is_kept_bit_for_bit_or_refused_with_one_that_is(name):
    torch.manual_seed(0)
    model, batch = TABLE[name]()
    peaks: list[int] = []
    refused: list[BudgetError] = []
    for percent in PERCENT:
        found = fitted_or_refused(model, batch, f"{percent}%")
        if isinstance(found, BudgetError):
            refused.append(found)
            continue
        with found:
            check_kept(found, model, batch)
            peaks.append(found.peak_bytes)
            # What fits in less fits in more: no refusal stands before this.
            assert not refused

    assert len(peaks) >= 1
    assert peaks == sorted(peaks, reverse=True)
    assert all(error.least_bytes > error.asked_bytes for error in refused)
    if refused:
        with fit(model, batch, refused[0].least_bytes, fake=True) as again:
            check_kept(again, model, batch)


def test_the_table_has_at_least_twelve_models():
    assert len(TABLE) >= 12
    assert set(ALWAYS) < set(TABLE)
