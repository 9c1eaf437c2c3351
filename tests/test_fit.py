"""`fit`: what is measured is within what was given, and the step is the plain one."""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import attempt
from membudget.errors import BudgetError, OptionError
from membudget.fit import fit
from membudget.fitted import Fitted
from membudget.outcome import Metered
from membudget.planner.planner import smoothed
from membudget.report.plan_text import head
from membudget.report.region_table import region_table
from tests.devices import held_bytes
from tests.model_state import state_of
from tests.planner.models import MODELS, measured_peak, mlp

PERCENT = (90, 80, 70, 60, 50, 40)


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


def check_fitted(fitted: Fitted, budget: int) -> None:
    assert fitted.peak_bytes <= budget
    assert fitted.plan.budget_bytes == budget
    assert fitted.audit().equal


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_budget_is_kept_bit_for_bit_or_refused_with_the_least(name):
    model, batch = made(name)
    plain = measured_peak(model, batch)
    peaks: list[int] = []
    refused: list[tuple[int, int]] = []
    for percent in PERCENT:
        try:
            fitted = fit(model, batch, f"{percent}%", fake=True)
        except BudgetError as error:
            refused.append((error.asked_bytes, error.least_bytes))
            continue
        with fitted:
            budget = int(percent / 100 * fitted.profile.peak_bytes)
            check_fitted(fitted, budget)
            assert measured_peak(model, batch) <= budget
            peaks.append(fitted.peak_bytes)
    assert peaks
    assert all(least > asked for asked, least in refused)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] < plain


@pytest.mark.parametrize("name", MODELS)
def test_nine_tenths_are_kept_bit_for_bit(name):
    model, batch = made(name)
    with fit(model, batch, "90%", fake=True) as fitted:
        check_fitted(fitted, int(0.9 * fitted.profile.peak_bytes))
        assert fitted.plan.regions


def test_a_real_profile_makes_a_plan_that_fits():
    model, batch = made("gpt")
    with fit(model, batch, "60%") as fitted:
        check_fitted(fitted, int(0.6 * fitted.profile.peak_bytes))
        assert fitted.profile.cost == fitted.plan.cost == "measured"


@pytest.mark.parametrize("as_text", [False, True])
def test_a_budget_in_bytes_counts_what_is_there_before(as_text):
    others = held_bytes()
    model, batch = made("mlp")
    found = mb.profile(model, batch, fake=True)
    static = others + found.graph.static.total
    total = static + found.peak_bytes * 7 // 10
    budget: int | str = total
    if as_text:
        budget = f"{total / 1024**2:.6f}MiB"
    with fit(model, batch, budget, fake=True) as fitted:
        assert abs(fitted.plan.budget_bytes - (total - static)) <= 1
        check_fitted(fitted, fitted.plan.budget_bytes)


def test_the_state_of_an_optimizer_counts_in_a_budget_in_bytes():
    others = held_bytes()
    model, batch = made("mlp")
    options: Any = {"optimizer": torch.optim.AdamW, "fake": True}
    found = mb.profile(model, batch, **options)
    total = others + found.graph.static.total + found.peak_bytes
    with fit(model, batch, total, **options) as fitted:
        assert fitted.plan.budget_bytes == found.peak_bytes
    assert found.graph.static.optimizer > 0


@pytest.mark.parametrize(
    "budget",
    ["", "much", "8G", "-1MiB", "50 percent", "%", "0%", "101%", "-5%", "nan%", "inf%"],
)
def test_budgets_that_are_no_bytes_are_refused(budget):
    model, batch = made("mlp")
    before = state_of(model)
    with pytest.raises(OptionError, match=r"size is a number|has the unit|percent"):
        fit(model, batch, budget, fake=True)
    assert state_of(model) == before


@pytest.mark.parametrize("budget", [True, -5, float("nan"), [1]])
def test_budgets_of_another_type_are_refused(budget):
    model, batch = made("mlp")
    with pytest.raises(OptionError, match="a size is a number of bytes"):
        fit(model, batch, budget, fake=True)


def test_a_budget_below_what_is_there_before_is_refused_with_the_least():
    model, batch = made("mlp")
    before = state_of(model)
    with pytest.raises(BudgetError, match="no plan fits in") as raised:
        fit(model, batch, 1000, fake=True)
    assert raised.value.asked_bytes == 1000 < raised.value.before_bytes
    assert raised.value.before_bytes < raised.value.least_bytes
    assert state_of(model) == before


def test_the_least_that_an_error_names_is_enough():
    model, batch = made("mlp")
    with pytest.raises(BudgetError, match="smallest plan needs") as raised:
        fit(model, batch, "1%", fake=True)
    error = raised.value
    with fit(model, batch, error.least_bytes, fake=True) as fitted:
        check_fitted(fitted, error.least_bytes - error.before_bytes)


def test_more_than_the_plain_step_takes_needs_no_regions():
    model, batch = made("gpt")
    before = state_of(model)
    with fit(model, batch, "1GiB", fake=True) as fitted:
        assert fitted.plan.regions == ()
        assert fitted.status().regions == ()
        assert fitted.plan.slowdown == 1.0
        assert fitted.peak_bytes <= fitted.plan.plain_peak_bytes
    assert state_of(model) == before


@pytest.mark.parametrize("fake", [True, False])
def test_a_model_is_what_it_was_after_a_plan_is_taken_off(fake):
    model, batch = made("resnet")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(model)
    fitted = fit(model, batch, "70%", fake=fake)
    assert fitted.plan.regions
    fitted.audit()
    fitted.remove()
    fitted.remove()
    assert state_of(model) == before


def test_a_plan_is_taken_off_when_the_block_raises():
    model, batch = made("mlp")
    before = state_of(model)
    with (
        pytest.raises(ZeroDivisionError, match="division"),
        fit(model, batch, "70%", fake=True),
    ):
        _ = 1 / 0
    assert state_of(model) == before


@pytest.mark.parametrize("fake", [True, False])
def test_a_model_is_what_it_was_after_its_step_raises(fake):
    model, batch = made("resnet")
    calls = []
    before = state_of(model)

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        calls.append(output)
        if not fake or len(calls) > 1:
            raise ArithmeticError("no loss")
        return output.sum()

    with pytest.raises(ArithmeticError, match="no loss"):
        fit(model, batch, "70%", loss_fn, fake=fake)
    assert state_of(model) == before


def test_training_under_a_fitted_plan_is_plain_training():
    losses = []
    for percent in (None, "60%"):
        model, batch = made("gpt")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fitted = None
        if percent is not None:
            fitted = fit(model, batch, percent, fake=True)
        torch.manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if fitted is not None:
            assert all(r.forwards for r in fitted.status().regions)
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))


def test_the_report_shows_predicted_beside_measured_and_what_each_region_keeps():
    model, batch = made("mlp")
    with fit(model, batch, "70%", fake=True) as fitted:
        text = str(fitted)
        assert text == fitted.report()
    plan = fitted.plan
    assert text.startswith(head(plan, fitted.peak_bytes) + "\n")
    ratio = fitted.peak_bytes / plan.peak_bytes
    assert f"{ratio:.4f} of the predicted" in text
    assert f"{plan.slowdown:.3f}  predicted; no schedule is below {plan.bound:.3f}" in (
        text
    )
    graph = smoothed(fitted.profile.graph)
    assert text.endswith(region_table(graph, fitted.attempts[-1].schedule))


@pytest.mark.parametrize("mode", ["auto", "full", "selective", "every_2"])
def test_the_terms_of_a_report_add_up_to_its_slowdown(mode):
    model, batch = made("gpt")
    with fit(model, batch, "95%", mode=mode, measure="none") as fitted:
        terms = re.search(
            r"recomputation takes ([\d.]+)% .* overhead ([\d.]+)%", fitted.report()
        )
        assert terms is not None
        added = sum(map(float, terms.groups())) / 100
        assert added > 0
        assert fitted.plan.slowdown - 1 == pytest.approx(added, abs=0.0011)


def test_the_report_of_a_step_that_fits_plain_says_so():
    model, batch = made("mlp")
    with fit(model, batch, "100%", fake=True) as fitted:
        assert fitted.report().endswith("the plain step fits: no region is needed")


def test_a_prediction_that_is_too_low_is_corrected_by_what_was_measured(monkeypatch):
    model, batch = made("mlp")
    honest = attempt.planned_run
    found: list[int] = []

    def more_at_first(*step: Any) -> Metered:
        run = honest(*step)
        found.append(run.peak_bytes + (20_000 if not found else 0))
        return dataclasses.replace(run, peak_bytes=found[-1])

    monkeypatch.setattr(attempt, "planned_run", more_at_first)
    budget = int(0.7 * mb.profile(model, batch, fake=True).peak_bytes)
    with fit(model, batch, "70%", fake=True) as fitted:
        assert fitted.peak_bytes <= budget
        assert len(fitted.attempts) == len(found)
        if found[0] > budget:
            assert len(found) > 1
            assert f"{len(found)}  the earlier ones took" in fitted.report()


def test_a_budget_that_no_try_keeps_is_an_error_and_leaves_the_model(monkeypatch):
    model, batch = mlp()
    before = state_of(model)
    too_much = Metered(1 << 40, Mock())
    monkeypatch.setattr(attempt, "planned_run", lambda *step: too_much)
    with pytest.raises(BudgetError, match="predicted to fit took"):
        fit(model, batch, "90%", fake=True)
    assert state_of(model) == before


def test_a_model_can_be_fitted_again_after_the_first_plan_is_off():
    model, batch = made("mlp")
    for percent in (90, 60):
        with fit(model, batch, f"{percent}%", fake=True) as fitted:
            check_fitted(fitted, int(percent / 100 * fitted.profile.peak_bytes))
