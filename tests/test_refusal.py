"""What a refused budget names, and what is said of an allocation that failed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.allowance import Budget
from membudget.errors import OutOfMemoryError
from membudget.planner.choice import Choice
from membudget.planner.planner import Planner, plain_schedule
from membudget.planner.schedule import Simulator
from membudget.refusal import (
    cannot_fit,
    explaining_shortage,
    is_hopeless,
    predicted_least,
    refused,
)
from membudget.report.advice import floor
from tests.planner.drafts import PLAN, Draft
from tests.planner.models import mlp

PROFILE = mb.profile(*mlp(), fake=True)


def step_budget(step_bytes: int) -> Budget:
    """Return a budget of so many bytes above what is in use before the step."""
    static = PROFILE.graph.static.total
    found = Budget.of(static + step_bytes, PROFILE)
    assert found.step_bytes == step_bytes
    return found


@pytest.mark.parametrize(
    ("smallest", "plain", "least"),
    [(1000, 5000, 1010), (1099, 5000, 1109), (99, 5000, 99), (1000, 1004, 1004)],
)
def test_the_least_that_is_predicted_has_a_hundredth_more_and_is_at_most_plain(
    smallest, plain, least
):
    profile: Any = SimpleNamespace(peak_bytes=plain)
    schedule: Any = SimpleNamespace(peak_bytes=smallest)
    assert predicted_least(profile, schedule) == least


def test_no_plan_fits_below_what_every_schedule_takes():
    least = floor(PROFILE.graph).peak_bytes
    assert not cannot_fit(PROFILE.graph, step_budget(least))
    assert cannot_fit(PROFILE.graph, step_budget(least - 1))


def test_a_budget_below_what_is_found_from_bytes_alone_is_hopeless():
    graph = PROFILE.graph
    least = Planner(graph).least_bytes()
    assert least < PROFILE.peak_bytes
    assert is_hopeless(graph, step_budget(least - 1))
    assert not is_hopeless(graph, step_budget(least))
    assert not is_hopeless(graph, step_budget(PROFILE.peak_bytes))


def test_a_refusal_lists_what_the_plans_took():
    smallest = plain_schedule(PROFILE.graph)
    error = refused(PROFILE, step_budget(10), smallest, 2000, (12_345, 23_456))
    assert str(error).startswith(
        "plans predicted to fit took 12,345, 23,456 bytes; none fits in"
    )
    error = refused(PROFILE, step_budget(10), smallest, 2000)
    assert str(error).startswith("no plan fits in")
    assert error.least_bytes == error.before_bytes + 2000


def test_a_refusal_of_an_empty_step_gives_no_reasons():
    graph = dataclasses.replace(
        Draft().finish(), static=dataclasses.replace(PROFILE.graph.static)
    )
    empty = dataclasses.replace(PROFILE, graph=graph)
    error = refused(empty, Budget.of(10_000, empty), plain_schedule(graph), 7)
    assert str(error).endswith(f" {error.least_bytes:,} bytes")
    assert error.holders == ()


def refused_at(kept: frozenset[int], workspace: int = 0) -> mb.BudgetError:
    """Return the refusal of a step whose region keeps some storages."""
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[400])
    (b,) = draft.run(a, makes=[2000])
    draft.save(a, b)
    draft.run(b, makes=[8000], workspace=workspace)
    graph = draft.finish()
    profile = dataclasses.replace(PROFILE, graph=graph)
    schedule = Simulator(graph).schedule((), (Choice(0, 3, kept),))
    assert schedule.simulation.peak_moment == 2
    return refused(profile, Budget(1, 700), schedule, 5)


def test_a_refusal_says_what_is_live_at_the_peak_of_the_smallest_plan():
    error = refused_at(frozenset())
    assert (
        "The smallest plan is predicted to take 10,700 bytes in all, in test.forwa"
        in str(error)
    )
    assert [(h.kind, h.bytes) for h in error.holders] == [
        ("layer", 10_000),
        ("other", 700),
    ]
    assert str(error).splitlines()[-1] == "     700  other tensors"
    kept = refused_at(frozenset({1}), workspace=50)
    assert "predicted to take 11,150 bytes in all, in" in str(kept)
    assert [h.bytes for h in kept.holders] == [10_450, 700]


def test_what_the_plain_step_takes_is_not_said_of_a_plan():
    schedule = plain_schedule(PROFILE.graph)
    error = refused(PROFILE, step_budget(10), schedule, 5)
    total = schedule.peak_bytes + error.before_bytes
    assert f"The plain step is predicted to take {total:,} bytes in all" in str(error)
    assert sum(holder.bytes for holder in error.holders) == total


def test_gradients_that_exceed_the_budget_alone_are_named():
    gradients = sum(s.bytes for s in PROFILE.graph.storages if s.kind == "gradient")
    schedule = plain_schedule(PROFILE.graph)
    says = f"Gradients of parameters alone take {gradients:,} bytes"
    assert says in str(refused(PROFILE, step_budget(gradients - 1), schedule, 5))
    assert says not in str(refused(PROFILE, step_budget(gradients), schedule, 5))


def test_a_failed_allocation_is_explained_with_what_plan_and_budget_allowed():
    budget = step_budget(5000)
    with (
        pytest.raises(OutOfMemoryError, match="an allocation failed") as raised,
        explaining_shortage(budget, "in a step whose plan takes", PLAN.peak_bytes),
    ):
        raise torch.OutOfMemoryError("no more")
    error = raised.value
    assert error.predicted_bytes == PLAN.peak_bytes + budget.before_bytes
    assert error.asked_bytes == budget.bytes_in_all
    assert f"a step whose plan takes {error.predicted_bytes:,} bytes" in str(error)
    assert f"fit needs up to {budget.before_bytes:,} bytes on the host" in str(error)


def test_other_errors_pass_as_they_are():
    with (
        pytest.raises(ValueError, match="mine"),
        explaining_shortage(step_budget(5000), "in a step that takes", 4000),
    ):
        raise ValueError("mine")
