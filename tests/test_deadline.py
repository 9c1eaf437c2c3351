"""After its seconds, `fit` does what a correct result needs, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from membudget import attempt, fastest, race, terms
from membudget.allowance import Budget
from membudget.attempt import MOST_PLANS
from membudget.deadline import Deadline
from membudget.errors import BudgetError, OptionError
from membudget.fitted import Fitted
from membudget.planner import search
from membudget.planner.schedule import Simulator
from membudget.planning import planner_of
from membudget.profile import Profile
from membudget.race import DISTURBED_ROUNDS, LEAST_ROUNDS
from membudget.recorded import fit_recorded
from membudget.step import Step
from tests.planner.models import MODELS
from tests.planner.test_search_starts import ALL, GRAPH

EVERYTHING = ("annealing", "plans with other engines", "timing steps")


def made(name: str = "mlp") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


class Clock:
    """A clock that is moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_passes_when_its_seconds_have():
    clock = Clock()
    deadline = Deadline(5, clock)
    clock.now += 4.75
    assert not deadline.forbids("a")
    assert deadline.skipped == []
    clock.now += 0.25
    assert [deadline.forbids(what) for what in "aba"] == [True] * 3
    assert deadline.skipped == ["a", "b"]


@pytest.mark.parametrize("seconds", [None, math.inf])
def test_without_a_limit_a_deadline_never_passes(seconds):
    clock = Clock()
    deadline = Deadline(seconds, clock)
    clock.now = 1e300
    assert not deadline.forbids("a")


@pytest.mark.parametrize("seconds", [-1, -0.5, math.nan, True, "10", [1]])
def test_seconds_that_are_no_number_are_refused_before_a_step_runs(seconds):
    class Never(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise AssertionError("a step ran")

    with pytest.raises(OptionError, match="seconds must be a number that is not neg"):
        mb.fit(Never(4, 4), torch.ones(2, 4), "60%", seconds=seconds)


class Allowing(Deadline):
    """A deadline that passes when something has been asked for so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(None)
        self.asked: list[str] = []
        self.times = times

    def forbids(self, what: str) -> bool:
        self.asked.append(what)
        self._end_s = math.inf if len(self.asked) <= self.times else -math.inf
        return super().forbids(what)


def fitted_until(times: int, share: str = "50%", **options: Any) -> tuple[Fitted, Any]:
    """Fit a model, with a deadline that passes after some questions."""
    model, batch = made()
    step = Step(model, batch, None)
    plain = mb.profile(model, batch)
    deadline = Allowing(times)
    budget = Budget.of(share, plain)
    return fit_recorded(step, plain, budget, deadline=deadline, **options), deadline


def test_a_fit_without_any_time_is_verified_and_says_what_it_skipped():
    model, batch = made()
    with mb.fit(model, batch, "50%", measure="best", seconds=0) as fitted:
        assert fitted.plan.regions
        assert len(fitted.attempts) == 1
        assert fitted.slowdown is None
        assert set(fitted.skipped) <= set(EVERYTHING)
        assert "timing steps" in fitted.skipped
        line = f"time              over  skipped: {', '.join(fitted.skipped)}"
        assert line in fitted.report()
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        assert fitted.audit().equal


def test_a_fit_with_all_the_time_skips_nothing():
    model, batch = made()
    with mb.fit(model, batch, "50%", measure="one", seconds=math.inf) as fitted:
        assert fitted.slowdown is not None
        assert fitted.skipped == ()
        assert "skipped" not in fitted.report()


def test_each_part_is_skipped_when_its_turn_comes_after_the_deadline(monkeypatch):
    monkeypatch.setattr(fastest, "NEARLY", math.inf)
    monkeypatch.setattr(terms, "FAR_OFF", math.inf)
    whole, deadline = fitted_until(10**9, measure="best")
    whole.remove()
    assert whole.skipped == ()
    assert tuple(dict.fromkeys(deadline.asked)) == EVERYTHING
    assert whole.slowdown is not None
    for place, what in enumerate(EVERYTHING):
        fitted, _ = fitted_until(deadline.asked.index(what), measure="best")
        with fitted:
            assert fitted.skipped == EVERYTHING[place:]
            assert fitted.slowdown is None
            assert fitted.peak_bytes <= fitted.plan.budget_bytes
            assert fitted.audit().equal


def test_a_plan_is_not_raced_again_after_the_deadline(monkeypatch):
    monkeypatch.setattr(terms, "FAR_OFF", -1.0)
    monkeypatch.setattr(race, "MOST_ROUNDS", LEAST_ROUNDS)
    again, deadline = fitted_until(10**9, measure="best")
    again.remove()
    *before, last = deadline.asked
    assert last == "timing more steps"
    once, _ = fitted_until(len(before), measure="best")
    once.remove()
    assert once.skipped == (last,)
    assert once.slowdown is not None
    assert again.slowdown is not None
    assert again.slowdown.rounds >= DISTURBED_ROUNDS


def test_a_plan_that_was_raced_often_is_not_raced_again(monkeypatch):
    monkeypatch.setattr(terms, "FAR_OFF", -1.0)
    monkeypatch.setattr(race, "ENOUGH_S", math.inf)
    once, deadline = fitted_until(10**9, measure="best")
    once.remove()
    assert deadline.asked[-1] == "timing steps"


def test_only_what_would_have_been_done_is_skipped():
    fitted, deadline = fitted_until(0, "100%")
    assert fitted.plan.regions == ()
    assert deadline.asked == []
    fitted, deadline = fitted_until(0, mode="full", measure="none")
    fitted.remove()
    assert deadline.asked == []


def test_a_plan_that_takes_too_much_is_followed_by_others_after_the_deadline(
    monkeypatch,
):
    found, honest = [], attempt.run_under

    def more(step: Any, plan: Any, plain: Any) -> Any:
        run, applied = honest(step, plan, plain)
        found.append(plan)
        over_bytes = 1 << 20 if len(found) == 1 else 0
        return replace(run, peak_bytes=run.peak_bytes + over_bytes), applied

    monkeypatch.setattr(attempt, "run_under", more)
    fitted, _ = fitted_until(0, "70%", measure="none")
    with fitted:
        assert 1 < len(fitted.attempts) <= MOST_PLANS + 1
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        assert fitted.audit().equal


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("lstm_tagger", "resnet")
]


@pytest.mark.parametrize("name", ["mlp", *SLOW])
def test_a_budget_that_is_met_with_time_is_met_without(name):
    plain = mb.profile(*made(name), fake=True)
    for percent in range(20, 100, 30):
        budget_bytes = plain.peak_bytes * percent // 100
        fits = [
            planned(plain, budget_bytes, is_late)
            for is_late in (search.never, lambda: True)
        ]
        assert fits[0] == fits[1]


def planned(plain: Profile, budget_bytes: int, is_late: Callable[[], bool]) -> bool:
    """Return whether a schedule is found that fits."""
    try:
        found = planner_of(plain).candidates(budget_bytes, is_late=is_late)
    except BudgetError:
        return False
    assert all(schedule.peak_bytes <= budget_bytes for schedule in found)
    return True


def test_annealing_runs_after_the_deadline_where_nothing_fits_without_it(monkeypatch):
    annealed: list[Any] = []
    monkeypatch.setattr(search, "anneal", lambda *args: annealed.append(args))
    simulator = Simulator(GRAPH)
    least = min(s.peak_bytes for s in ALL)
    assert search.improved(simulator, [ALL], least - 1, False, lambda: True) == []
    assert len(annealed) == 1
    assert search.improved(simulator, [ALL], least, False, lambda: True)
    assert len(annealed) == 1
    assert search.improved(simulator, [ALL], least, False, lambda: False)
    assert len(annealed) > 1
