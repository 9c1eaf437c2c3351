"""A plan is verified and measured within its budget, its first step, too."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import attempt
from membudget.attach import has_region
from membudget.errors import (
    OutOfMemoryError,
    RecomputeMismatchError,
    UnrepeatableWarning,
)
from membudget.fit import fit
from membudget.memory import peak
from membudget.state.bits import fingerprint_bytes
from membudget.step import Step
from tests.devices import array, is_cpu
from tests.model_state import state_of
from tests.planner.models import MODELS, gpt, mlp


@pytest.mark.parametrize("name", ["mlp", "gpt", "unet", "encoder_decoder"])
@pytest.mark.parametrize("percent", [90, 62])
def test_a_plan_that_is_put_on_anew_keeps_its_budget_while_it_is_verified(
    name, percent
):
    """On a device, whose kernels take less beside tensors, fingerprints take more."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    fitted = fit(model, batch, f"{percent}%", fake=True)
    fitted.remove()
    applied, step = mb.apply(model, fitted.plan), Step(model, batch, None)
    first = peak(step.run).peak_bytes
    step.prepare()
    later = peak(step.run).peak_bytes
    applied.remove()

    largest = max(math.prod(value.shape) for value in fitted.profile.graph.values)
    beside = 0 if is_cpu() else fingerprint_bytes(largest)
    assert first <= fitted.plan.budget_bytes + beside
    assert fitted.peak_bytes == later


@pytest.mark.parametrize("percent", [90, 70, 50, 40])
@pytest.mark.parametrize("fake", [True, False])
def test_the_first_step_after_fitting_keeps_the_budget(percent, fake):
    model, batch = gpt(blocks=5)
    with fit(model, batch, f"{percent}%", fake=fake) as fitted:
        step = Step(model, batch, None)
        step.prepare()
        assert peak(step.run).peak_bytes <= fitted.plan.budget_bytes


class Unseen(nn.Module):
    """What a product made is changed where no dispatcher sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh() * 2
        array(y.detach())[...] += 1
        y.argmax()  # A decision, because of which the module is not rerun.
        return (y.sin() * y.exp()).tanh()


def unseen(blocks: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Unseen() for _ in range(blocks))), torch.randn(64, 32)


@pytest.mark.parametrize("percent", [95, 70])
def test_a_write_that_nobody_sees_is_kept_by_a_fitted_plan(percent):
    model, batch = unseen(8)
    before = state_of(model)
    with pytest.warns(
        UnrepeatableWarning, match="in a step that was run to verify the plan"
    ):
        fitted = fit(model, batch, f"{percent}%")
    with fitted:
        assert sum(region.unrepeatable for region in fitted.status().regions) > 0
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        assert fitted.audit().equal
    assert state_of(model) == before


def test_a_difference_that_keeping_does_not_cure_is_an_error_if_plain_does_not_fit(
    monkeypatch,
):
    model, batch = unseen(4)
    classes = [type(module) for module in model.modules()]

    def run(self: Step) -> Tensor:
        raise RecomputeMismatchError("on purpose")

    found = dataclasses.replace(mb.profile(model, batch), tensors="fake")
    fitting = sys.modules["membudget.fit"]
    monkeypatch.setattr(fitting, "profile_step", lambda *_, **__: found)
    monkeypatch.setattr(Step, "run", run)
    with (
        pytest.warns(UnrepeatableWarning, match="on purpose"),
        pytest.raises(RecomputeMismatchError, match="on purpose"),
    ):
        fit(model, batch, "90%")
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, ValueError])
@pytest.mark.parametrize("mode", ["auto", "full"])
def test_what_interrupts_the_measuring_leaves_no_plan_on_the_model(
    monkeypatch, mode, kind
):
    model, batch = mlp()
    regions: list[int] = []

    def interrupted(step: Any, applied: Any) -> None:
        regions.append(len(applied.status().regions))
        raise kind("in the middle")

    monkeypatch.setattr(attempt, "planned_run", interrupted)
    raised = OutOfMemoryError if kind is MemoryError else kind
    with pytest.raises(raised, match=r"in the middle|an allocation failed"):
        fit(model, batch, "60%", mode=mode, fake=True)
    assert regions[0] > 0
    assert not any(has_region(module) for module in model.modules())
