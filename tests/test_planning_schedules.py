"""Which schedule is tried next, from what was predicted and what was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from membudget import planning
from membudget.allowance import Budget
from membudget.attempt import MOST_PLANS, Attempt
from membudget.engine import native
from membudget.errors import BudgetError
from membudget.modes import AUTO, schedule_of_mode
from membudget.planner.overheads import CPU_OVERHEADS, NATIVE_OVERHEADS, NO_OVERHEADS
from membudget.planner.planner import Planner, plain_schedule
from membudget.planner.schedule import Schedule
from membudget.planning import (
    make_plan,
    next_schedules,
    overheads_of,
    plan_for,
    planner_of,
    unseen_bytes,
    without_calls,
)
from tests.planner.drafts import Draft


@cache
def made() -> tuple[nn.Module, Any]:
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU()) for _ in range(3))
    layers = (nn.Sequential(block, nn.Linear(64, 16)) for block in blocks)
    return nn.Sequential(*layers), torch.ones(256, 16)


@cache
def profiled(tensors: str = "real") -> mb.Profile:
    return replace(mb.profile(*made(), fake=True), tensors=tensors)


@cache
def smallest_of() -> Schedule:
    return planner_of(profiled()).smallest()


def first_schedule(*args: Any) -> Schedule:
    """Return the schedule to try next."""
    return next_schedules(*args)[0]


def budget_of(step_bytes: int) -> Budget:
    return Budget(step_bytes, profiled().graph.static.total)


def attempt(schedule: Schedule, peak_bytes: int, regions: Any = "some") -> Attempt:
    """Return an attempt of a schedule that was measured to take some bytes."""
    plan: Any = SimpleNamespace(regions=regions)
    return Attempt(plan, schedule, peak_bytes)


@pytest.mark.parametrize(
    ("profile_bytes", "plain_bytes", "unseen"),
    [
        # Half a hundredth of what was measured, at most, is no difference.
        (9_950, 10_000, 0),
        (9_949, 10_000, 51),
        (10_050, 10_000, 0),
        (10_051, 10_000, -51),
        (0, 0, 0),
    ],
)
def test_what_a_profile_misses_counts_if_it_is_more_than_half_a_hundredth(
    profile_bytes, plain_bytes, unseen
):
    profile: Any = SimpleNamespace(peak_bytes=profile_bytes)
    plain: Any = SimpleNamespace(peak_bytes=plain_bytes)
    assert unseen_bytes(profile, plain) == unseen


def test_calls_that_get_no_region_stay_as_empty_ones():
    found = profiled()
    left = without_calls(found, {"1", "nowhere"})
    assert [c.path for c in left.graph.calls] == [c.path for c in found.graph.calls]
    for call, before in zip(left.graph.calls, found.graph.calls, strict=True):
        end = call.start if call.path == "1" else before.end
        assert call == replace(before, end=end)
    paths = {c.path for c in planner_of(left).smallest().calls}
    assert paths
    assert "1" not in paths


@pytest.mark.parametrize(
    ("cost", "overheads"),
    [
        ("measured", CPU_OVERHEADS),
        ("this CPU, given", CPU_OVERHEADS),
        ("H100 SXM5", NO_OVERHEADS),
    ],
)
def test_the_engine_s_time_counts_where_the_operators_times_are_of_this_processor(
    cost, overheads, monkeypatch
):
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert overheads_of(replace(profiled(), cost=cost)) == overheads


def test_the_engine_s_time_is_that_of_the_recorder_that_serves(monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: True)
    assert overheads_of(replace(profiled(), cost="measured")) == NATIVE_OVERHEADS
    gpu = replace(profiled(), cost="H100 SXM5")
    assert overheads_of(gpu) == NO_OVERHEADS


def test_a_plan_is_of_its_schedule_and_of_what_its_profile_misses():
    model, found = made()[0], profiled()
    schedule = smallest_of()
    plan = make_plan(found, schedule, model, 12_345, 100)
    assert (plan.model, plan.cost) == ("Sequential", found.cost)
    assert plan.budget_bytes == 12_345
    assert plan.plain_peak_bytes == found.peak_bytes + 100
    assert plan.peak_bytes == schedule.peak_bytes + 100
    assert plan.slowdown == schedule.slowdown > 1
    assert make_plan(found, schedule, model, 12_345).peak_bytes == schedule.peak_bytes


def test_the_bound_of_a_plan_is_one_where_nothing_is_known():
    graph = profiled().graph
    still = tuple(replace(o, seconds=0.0) for o in graph.operators)
    assert planning._bound(replace(graph, operators=still), 10**9) == 1.0
    # No schedule fits.
    assert planning._bound(graph, -5) == planning._bound(graph, 1) == 1.0
    assert planning._bound(graph, 10**9) == 1.0
    budget_bytes = profiled().peak_bytes * 6 // 10
    whole = planning._bound(graph, budget_bytes)
    assert 1.0 < whole < math.inf
    # A replay takes half of what the forward takes.
    assert planning._bound(graph, budget_bytes, 0.5) == 1.0 + 0.5 * (whole - 1.0)


# The next schedule of `auto`.


def test_the_first_schedule_fits_the_budget_less_what_the_profile_misses():
    found = profiled()
    budget = budget_of(found.peak_bytes)
    assert first_schedule(found, budget, "auto").calls == ()
    less = first_schedule(found, budget, "auto", (), 1000)
    assert less.calls
    assert less.peak_bytes <= found.peak_bytes - 1000


def test_a_later_schedule_aims_lower_by_what_was_measured_beyond_the_budget():
    found = profiled()
    budget = budget_of(found.peak_bytes * 8 // 10)
    first = first_schedule(found, budget, "auto")
    over = attempt(first, budget.step_bytes + 5000)
    second = first_schedule(found, budget, "auto", [over])
    assert second.peak_bytes <= first.peak_bytes - 5000
    assert not second.is_smallest


def test_the_smallest_schedule_is_the_last_that_is_tried():
    found = profiled()
    budget = budget_of(found.peak_bytes * 8 // 10)
    first = first_schedule(found, budget, "auto")
    tried = [attempt(first, budget.step_bytes + 1)] * (MOST_PLANS - 1)
    assert not first_schedule(found, budget, "auto", tried).is_smallest
    assert first_schedule(found, budget, "auto", [*tried, tried[0]]).is_smallest
    assert MOST_PLANS == 4


def test_after_the_smallest_schedule_only_the_plain_one_is_left():
    found = profiled()
    smallest, budget = smallest_of(), budget_of(10)
    more = attempt(smallest, found.peak_bytes + 7)
    again = first_schedule(found, budget, "auto", [more], 7)
    assert again == replace(plain_schedule(found.graph), is_smallest=True)
    with pytest.raises(BudgetError, match="no plan fits in"):
        first_schedule(found, budget, "auto", [more], 8)
    # The plain one has been tried, too: the least of both is named.
    plain = attempt(again, found.peak_bytes + 6, regions=())
    before = attempt(smallest, 9_999)
    other = replace(before, schedule=replace(smallest, is_smallest=False))
    with pytest.raises(BudgetError, match="took 9,999 bytes; none fits") as raised:
        first_schedule(found, budget, "auto", [other, more, plain], 7)
    static = found.graph.static.total
    assert raised.value.least_bytes == static + found.peak_bytes + 6


def test_on_fake_tensors_the_smallest_schedule_is_tried_if_it_is_near_the_budget():
    smallest = smallest_of()
    near = math.ceil(smallest.peak_bytes / 1.05)
    for step_bytes in (near, smallest.peak_bytes - 1):
        budget = budget_of(step_bytes)
        assert first_schedule(profiled("fake"), budget, "auto") == smallest
    with pytest.raises(BudgetError, match="no plan fits in") as raised:
        first_schedule(profiled("fake"), budget_of(near - 1), "auto")
    least = smallest.peak_bytes + smallest.peak_bytes // 100
    assert raised.value.least_bytes == least + profiled().graph.static.total
    # The plain step, which takes more, has run.
    assert first_schedule(profiled("real"), budget_of(near // 9), "auto") == smallest


def test_a_plan_of_a_file_is_made_if_its_prediction_fits():
    smallest, static = smallest_of(), profiled().graph.static.total
    plan = plan_for(profiled(), made()[0], static + smallest.peak_bytes)
    assert plan.peak_bytes <= plan.budget_bytes == smallest.peak_bytes
    with pytest.raises(BudgetError, match="no plan fits in") as raised:
        plan_for(profiled(), made()[0], static + smallest.peak_bytes - 1)
    least = smallest.peak_bytes + smallest.peak_bytes // 100
    assert raised.value.least_bytes == static + least


# Modes.


def test_a_mode_is_tried_up_to_a_twentieth_over_the_budget():
    found = profiled()
    full = schedule_of_mode("full", found.graph, CPU_OVERHEADS).peak_bytes
    near = math.ceil(full / 1.05)
    assert first_schedule(found, budget_of(near), "full").peak_bytes == full
    with pytest.raises(BudgetError, match="predicted to allocate"):
        first_schedule(found, budget_of(near - 1), "full")
    with pytest.raises(BudgetError, match="predicted to allocate") as raised:
        plan_for(found, made()[0], found.graph.static.total + full - 1, "full")
    smallest = smallest_of().peak_bytes
    static = found.graph.static.total
    assert raised.value.least_bytes == static + smallest + smallest // 100
    assert "too many for" in str(raised.value)


def test_a_mode_has_one_schedule():
    found = profiled()
    budget = budget_of(found.peak_bytes)
    first = attempt(first_schedule(found, budget, "full"), 123_456)
    with pytest.raises(BudgetError, match="measured to allocate 123,456 bytes"):
        first_schedule(found, budget, "full", [first])


def test_a_budget_of_less_than_nothing_is_bounded_as_nothing():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[1])
    draft.save(a)
    draft.run(makes=[1])
    graph = draft.finish()
    # In one byte, the first tensor is recomputed; without any, nothing fits.
    assert planning._bound(graph, 1) == 1.25
    assert planning._bound(graph, 0) == planning._bound(graph, -5) == 1.0


def test_calls_for_one_profile_share_a_planner():
    made: list[Planner] = []

    def planner() -> Planner:
        made.append(shared)
        return shared

    shared = planner_of(profiled())
    budget = budget_of(shared.plain_peak_bytes - 1)
    first, *_ = next_schedules(profiled(), budget, AUTO, planner=planner)
    over = attempt(first, budget.step_bytes + 1)
    second, *_ = next_schedules(profiled(), budget, AUTO, [over], planner=planner)
    assert made == [shared, shared]
    assert second.peak_bytes < first.peak_bytes
    alone, *_ = next_schedules(profiled(), budget, AUTO, [over])
    assert second.choices == alone.choices
