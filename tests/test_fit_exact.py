"""A search of all schedules is a plan like any other: it fits, and changes no bit."""

from __future__ import annotations

import sys

import pytest
import torch

import membudget as mb
from membudget.errors import MembudgetError
from tests.planner.models import MODELS
from tests.seconds import DEADLOCK_S


def test_a_searched_plan_fits_and_is_the_plain_step():
    torch.manual_seed(0)
    model, batch = MODELS["unet"]()
    with mb.fit(model, batch, "70%", fake=True, exact_s=DEADLOCK_S) as fitted:
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        assert fitted.audit().equal
        searched = fitted.plan.slowdown
    with mb.fit(model, batch, "70%", fake=True) as fitted:
        assert searched < fitted.plan.slowdown


def test_without_scipy_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    model, batch = MODELS["unet"]()
    with pytest.raises(MembudgetError, match=r"pip install .membudget\[exact\]"):
        mb.fit(model, batch, "70%", fake=True, exact_s=DEADLOCK_S)
