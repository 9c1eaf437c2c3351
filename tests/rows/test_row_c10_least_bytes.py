"""Row C10: the least that a refusal names is in the unit of a budget, and suffices."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import membudget as mb
from membudget import attempt
from membudget.allowance import Budget
from membudget.engine.controls import disable_checkpointing
from membudget.errors import BudgetError
from membudget.fit import fit
from membudget.fitted import Fitted
from membudget.memory import peak
from membudget.outcome import Metered
from membudget.planning import plan_for, planner_of
from membudget.recorded import fit_recorded
from membudget.step import Step
from tests.planner.models import MODELS, gpt

NAMES = ("mlp", "lstm_tagger", "shared_modules")


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def profiled(name: str) -> mb.Profile:
    return mb.profile(*made(name))


def refusal(name: str, budget: int | str, **options: Any) -> BudgetError:
    with pytest.raises(BudgetError, match="Smallest feasible budget") as raised:
        fit(*made(name), budget, **options)
    return raised.value


def fitted_again(name: str, least_bytes: int, **options: Any) -> Fitted:
    with fit(*made(name), least_bytes, **options) as fitted:
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
    return fitted


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_least_that_is_named_suffices_and_is_at_most_the_plain_peak(name, fake):
    error = refusal(name, "1%", fake=fake)
    assert error.least_bytes <= profiled(name).total_peak_bytes
    assert f"Smallest feasible budget: {error.least_bytes:,} bytes" in str(error)
    fitted_again(name, error.least_bytes, fake=fake)


@pytest.mark.parametrize("budget", [1000, "3 KiB", "1%", "2% of activations"])
def test_what_was_asked_is_in_the_unit_of_a_budget(budget):
    found = profiled("mlp")
    with pytest.raises(BudgetError, match="no plan fits in") as raised:
        plan_for(found, made("mlp")[0], budget)
    error, limit = raised.value, Budget.of(budget, found)
    assert error.before_bytes == found.graph.static.total
    assert error.asked_bytes == limit.bytes_in_all < error.least_bytes
    assert plan_for(found, made("mlp")[0], error.least_bytes).regions


def with_factors(found: mb.Profile, factors: list[float]) -> mb.Profile:
    operators = tuple(
        dataclasses.replace(o, seconds=o.seconds * factors[i % len(factors)])
        for i, o in enumerate(found.graph.operators)
    )
    graph = dataclasses.replace(found.graph, operators=operators)
    return dataclasses.replace(found, graph=graph)


factors = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(factors)
def test_the_least_does_not_depend_on_what_was_timed(name, factors):
    found = profiled(name)
    planners = [planner_of(p) for p in (found, with_factors(found, factors))]
    least = planners[0].least_bytes()
    assert planners[1].least_bytes() == least
    assert planners[1].fastest(least).peak_bytes <= least


def test_the_least_of_a_transformer_is_one_on_every_machine():
    torch.manual_seed(0)
    found = mb.profile(*gpt(blocks=2), fake=True)
    generator = random.Random(1)
    draws = [[8 ** generator.uniform(-1, 1) for _ in range(37)] for _ in range(4)]
    least = {planner_of(with_factors(found, draw)).least_bytes() for draw in draws}
    assert len(least) == 1


@pytest.mark.parametrize("slow", [1e-3, 1e3])
def test_a_refusal_names_the_same_least_however_slow_the_machine(slow):
    model, batch = made("mlp")
    found = with_factors(profiled("mlp"), [slow, 1.0, 1.0])
    with pytest.raises(BudgetError, match="no plan fits in") as raised:
        fit_recorded(Step(model, batch, None), found, Budget.of("1%", found))
    assert raised.value.least_bytes == refusal("mlp", "1%").least_bytes


def measures(monkeypatch: pytest.MonkeyPatch, factor: float) -> list[int]:
    """Let a step under regions take more, or less, than it does; return its peaks."""
    honest, peaks = attempt.planned_run, []

    def measured(step: Step, applied: Any) -> Metered:
        run = honest(step, applied)
        peaks.append(int(run.peak_bytes * (factor if applied.names else 1)))
        return dataclasses.replace(run, peak_bytes=peaks[-1])

    monkeypatch.setattr(attempt, "planned_run", measured)
    return peaks


def test_where_every_plan_takes_more_than_the_plain_step_that_is_the_least(monkeypatch):
    measures(monkeypatch, 4.0)
    error = refusal("mlp", "90%")
    assert "plans predicted to fit took" in str(error)
    model, batch = made("mlp")
    step = Step(model, batch, None)
    step.prepare()
    with disable_checkpointing():
        plain = peak(step.run).peak_bytes
    assert error.least_bytes == error.before_bytes + plain
    assert not fitted_again("mlp", error.least_bytes).plan.regions


@pytest.mark.parametrize("percent", [1, 50])
def test_where_predictions_are_too_low_the_least_is_one_that_was_measured(
    monkeypatch, percent
):
    peaks = measures(monkeypatch, 1.5)
    error = refusal("mlp", f"{percent}%")
    assert error.least_bytes - error.before_bytes == peaks[-1]
    fitted_again("mlp", error.least_bytes)


def test_a_plan_that_takes_less_than_predicted_is_not_refused(monkeypatch):
    least = planner_of(profiled("mlp")).least_bytes()
    measures(monkeypatch, 0.8)
    fitted = fitted_again("mlp", profiled("mlp").graph.static.total + least * 9 // 10)
    assert fitted.plan.peak_bytes > fitted.plan.budget_bytes >= fitted.peak_bytes


def test_a_plan_far_over_the_budget_is_not_run_where_memory_may_be_short(monkeypatch):
    peaks = measures(monkeypatch, 1.0)
    refusal("mlp", "1%", fake=True)
    assert peaks == []
