"""Plans raced against the plain step: who wins, and what is left behind."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import membudget as mb
from membudget import attempt, fastest, recorded, terms
from membudget import race as racing
from membudget.attach import has_region
from membudget.attempt import try_plan
from membudget.engine.calls import Calls
from membudget.errors import RecomputeMismatchError
from membudget.planned import PlanRegions, put_on, take_off
from membudget.planner.choice import RERUN
from membudget.planner.plan import Plan, RegionPlan
from membudget.race import (
    DISTURBED_ROUNDS,
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Slowdown,
    race,
)
from membudget.step import CallableStep, Step
from tests.planner.models import MODELS
from tests.test_apply_rerun import plan_of


class Clock:
    """A clock that the model moves, so that a race has the same end everywhere."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(
    monkeypatch: pytest.MonkeyPatch, *seconds: float
) -> tuple[Step, list[PlanRegions]]:
    """Return a step of a second, and plans under which it takes other times."""
    clock = Clock()
    monkeypatch.setattr(racing, "step_clock", lambda: clock)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in seconds))

    def advance(module: nn.Module, args: object) -> None:
        on = [s for s, layer in zip(seconds, model, strict=True) if has_region(layer)]
        clock.now += on[0] if on else 1.0

    model.register_forward_pre_hook(advance)
    plans = []
    for place in range(len(seconds)):
        mb.apply(model, plan_of(model, RegionPlan(str(place), 3, (), engine=RERUN)))
        plans.append(take_off(model))
    return Step(model, torch.randn(2, 4), None), plans


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [((1.5,), 0), ((1.5, 1.2), 1), ((1.2, 1.5), 0), ((1.5, 1.49), 0), ((3, 2, 1.1), 2)],
)
def test_a_plan_wins_that_is_clearly_faster_than_the_first(
    monkeypatch, seconds, fastest
):
    step, plans = timed(monkeypatch, *seconds)
    place, slowdown = race(step, plans)
    assert place == fastest
    assert slowdown.median == pytest.approx(seconds[fastest])
    others = [s for i, s in enumerate(seconds) if i != fastest]
    assert slowdown.others == pytest.approx(others)
    assert LEAST_ROUNDS <= slowdown.rounds <= MOST_ROUNDS


@pytest.mark.parametrize(
    ("ratios", "is_enough"),
    [
        ([1.2] * 2, False),
        ([1.2] * 3, True),
        ([1.2, 1.5, 1.2], False),
        ([1.2, 1.5, 1.2, 1.2, 1.2], True),
        ([1.2, 1.5] * 3, False),
        ([1.2, 1.5] * 4, True),
    ],
)
def test_rounds_are_repeated_that_other_load_disturbs(ratios, is_enough):
    assert racing._is_enough(ratios, LEAST_ROUNDS, -math.inf) is is_enough


@pytest.mark.parametrize(
    ("ratios", "first", "is_clear"),
    [
        ([1.1, 1.1, 1.1], [1.2, 1.2, 1.2], True),
        ([1.19, 1.19, 1.19], [1.2, 1.2, 1.2], False),
        ([1.1, 1.1, 1.4], [1.2, 1.2, 1.2], False),
        ([1.1, 1.1, 1.1, 1.1, 1.4], [1.2, 1.2, 1.2, 1.2, 1.2], True),
        ([1.1, 1.1, 2.3], [1.2, 1.2, 2.4], True),  # What slows a round slows both.
    ],
)
def test_a_plan_is_clearly_faster_if_it_is_so_in_nearly_every_round(
    ratios, first, is_clear
):
    assert racing._is_clearly_faster(ratios, first) is is_clear


def test_what_the_forward_takes_longer_is_timed_apart(monkeypatch):
    step, plans = timed(monkeypatch, 1.5)
    _, slowdown = race(step, plans)
    assert (slowdown.median, slowdown.forward) == (1.5, 0.5)


def test_the_forward_of_a_step_that_is_one_function_is_not_timed(monkeypatch):
    step, plans = timed(monkeypatch, 1.5)
    own = CallableStep(step.run, step.model)
    _, slowdown = race(own, plans)
    assert (slowdown.median, slowdown.forward) == (1.5, None)


def test_a_race_leaves_no_plan_and_no_gradient_and_the_streams_as_they_were(
    monkeypatch,
):
    step, plans = timed(monkeypatch, 1.5, 1.2)
    before = torch.get_rng_state()
    race(step, plans)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(has_region(module) for module in step.model.modules())
    assert all(p.grad is None for p in step.model.parameters())


def test_no_region_is_verified_anew_while_steps_are_timed(monkeypatch):
    step, (plan,) = timed(monkeypatch, 1.5)
    put_on(plan)
    step.run()  # The first call is verified, and is not the race's.
    take_off(step.model)
    verified = []
    begin = Calls.begin

    def noted(calls: Calls, again: bool = True) -> bool:
        verified.append(begin(calls, again))
        return verified[-1]

    monkeypatch.setattr(Calls, "begin", noted)
    race(step, [plan])
    assert len(verified) >= LEAST_ROUNDS
    assert not any(verified)


def test_a_step_that_fails_in_a_race_leaves_no_plan(monkeypatch):
    step, plans = timed(monkeypatch, 1.5)

    def fail(module: nn.Module, args: object, output: object) -> None:
        if has_region(step.model.get_submodule("0")):
            raise RuntimeError("failed under the plan")

    step.model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="failed under the plan"):
        race(step, plans)
    assert not any(has_region(module) for module in step.model.modules())


def test_a_slowdown_says_what_was_measured_and_what_else_was_raced():
    found = Slowdown(1.25, 1.2, 1.3, 5, 0.1)
    assert str(found) == "1.250  measured in 5 rounds, quartiles 1.200 and 1.300"
    found = Slowdown(1.25, 1.2, 1.3, 5, 0.1, (1.4, 2.0))
    assert str(found).endswith("1.300; other plans 1.400, 2.000")
    found = Slowdown(1.25, 1.2, 1.4, 7, 0.1, (1.4,))
    assert str(found).endswith("1.400, disturbed by other load; other plans 1.400")


@pytest.mark.parametrize("far_off", [0.0, math.inf])
def test_a_plan_is_raced_further_that_is_measured_far_from_its_prediction(
    monkeypatch, far_off
):
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    raced: list[tuple[int, int]] = []

    def noted(
        step: Step,
        plans: list[PlanRegions],
        least: int = LEAST_ROUNDS,
        before: Slowdown | None = None,
        enough_s: float = 0.0,
    ) -> tuple[int, Slowdown]:
        place, found = race(step, plans, least, before)
        raced.append((len(plans), found.rounds))
        if before is not None:
            assert found.ratios[: before.rounds] == before.ratios
            assert found.others == before.others
            assert found.seconds > before.seconds
        return place, found

    monkeypatch.setattr(fastest, "race", noted)
    monkeypatch.setattr(racing, "ENOUGH_S", 0.0)  # The least number of rounds.
    monkeypatch.setattr(racing, "DISTURBED", math.inf)
    monkeypatch.setattr(fastest, "NEARLY", math.inf)
    monkeypatch.setattr(fastest, "MOST_S", math.inf)
    monkeypatch.setattr(terms, "FAR_OFF", far_off)
    with mb.fit(model, batch, "50%", measure="best") as fitted:
        found = fitted.slowdown
    assert found is not None
    assert raced[0][0] == 1 + len(found.others) > 1
    assert raced[0][1] == LEAST_ROUNDS
    assert raced[1:] == ([] if far_off else [(1, DISTURBED_ROUNDS)])
    assert len(found.ratios) == found.rounds == raced[-1][1]


@pytest.mark.parametrize("measure", ["none", "one", "best", None])
def test_fit_measures_what_it_is_asked_to(measure):
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    with mb.fit(model, batch, "50%", measure=measure) as fitted:
        assert fitted.plan.regions
        assert (fitted.slowdown is None) == (measure == "none")
        if fitted.slowdown is not None:
            assert str(fitted.slowdown) in fitted.report()
            assert measure != "one" or fitted.slowdown.others == ()
        assert fitted.audit().equal


def test_the_plan_that_wins_is_the_one_on_the_model(monkeypatch):
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    raced: list[list[PlanRegions]] = []

    def last_wins(
        step: Step, plans: list[PlanRegions], enough_s: float
    ) -> tuple[int, Slowdown]:
        raced.append(plans)
        return len(plans) - 1, Slowdown(1.0, 1.0, 1.0, 3, 0.0)

    monkeypatch.setattr(fastest, "race", last_wins)
    monkeypatch.setattr(fastest, "NEARLY", math.inf)
    monkeypatch.setattr(terms, "FAR_OFF", math.inf)
    with mb.fit(model, batch, "50%", measure="best") as fitted:
        (plans,) = raced
        assert len(plans) > 1
        assert {r.name for r in fitted.status().regions} == {n for n, _, _ in plans[-1]}
        assert {r.path for r in fitted.plan.regions} == {n for n, _, _ in plans[-1]}
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        assert fitted.audit().equal
    assert not any(has_region(module) for module in model.modules())


def test_a_plan_is_not_raced_whose_prediction_is_far_from_the_first(monkeypatch):
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    counts = []
    for nearly in (math.inf, -math.inf):
        monkeypatch.setattr(fastest, "NEARLY", nearly)
        with mb.fit(model, batch, "50%", measure="best") as fitted:
            assert fitted.slowdown is not None
            counts.append(len(fitted.slowdown.others))
    assert counts[0] > 0
    assert counts[1] == 0


def test_a_plan_that_goes_wrong_in_a_race_is_left_out_at_once(monkeypatch):
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    ran: list[Plan] = []
    right, reasons = attempt.run_under, Mock()

    def run_under(step: Step, plan: Plan, plain: Any) -> Any:
        ran.append(plan)
        if len(ran) > 1:
            raise RecomputeMismatchError("wrong")
        return right(step, plan, plain)

    monkeypatch.setattr(attempt, "run_under", run_under)
    monkeypatch.setattr(attempt, "_reasons", reasons)
    monkeypatch.setattr(fastest, "NEARLY", math.inf)
    with mb.fit(model, batch, "50%", measure="best") as fitted:
        assert fitted.plan.regions == ran[0].regions
    assert len(ran) > 1
    reasons.assert_not_called()


def warning_plans(monkeypatch: pytest.MonkeyPatch, winner: int) -> list[int]:
    """Let all plans but the first warn; return their numbers, and let one win."""
    tried: list[int] = []

    def warning(*args: Any, **options: Any) -> Any:
        tried.append(args[-1])
        if args[-1] > 1:
            warnings.warn(
                f"plan {args[-1]} keeps more", mb.UnrepeatableWarning, stacklevel=1
            )
            warnings.warn("of the step itself", UserWarning, stacklevel=1)
        return try_plan(*args, **options)

    def race(
        step: Step, plans: list[PlanRegions], enough_s: float
    ) -> tuple[int, Slowdown]:
        return winner, Slowdown(1.0, 1.0, 1.0, 3, 0.0)

    monkeypatch.setattr(recorded, "try_plan", warning)
    monkeypatch.setattr(fastest, "run_plan", warning)
    monkeypatch.setattr(fastest, "race", race)
    monkeypatch.setattr(fastest, "NEARLY", math.inf)
    monkeypatch.setattr(terms, "FAR_OFF", math.inf)
    return tried


def test_where_fit_has_taken_its_time_steps_are_timed_as_seldom_as_can_be(monkeypatch):
    monkeypatch.setattr(fastest, "MOST_S", -math.inf)
    monkeypatch.setattr(terms, "FAR_OFF", -math.inf)
    monkeypatch.setattr(racing, "DISTURBED", math.inf)
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    with mb.fit(model, batch, "50%") as fitted:
        assert fitted.slowdown is not None
        assert fitted.slowdown.rounds == LEAST_ROUNDS


@pytest.mark.parametrize("winner", [0, 1])
def test_what_another_plan_warns_of_is_shown_if_that_plan_wins(monkeypatch, winner):
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    tried = warning_plans(monkeypatch, winner)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        mb.fit(model, batch, "50%", measure="best").remove()
    assert tried[:2] == [1, 2]  # Recorded times decide whether there is a third.
    assert all(warning.filename == __file__ for warning in shown)
    passed = ["of the step itself"] * len(tried[1:])
    held = ["plan 2 keeps more"] * winner
    assert [str(w.message) for w in shown] == [*passed, *held]


def test_where_a_warning_of_the_plan_that_wins_is_an_error_no_plan_stays(monkeypatch):
    torch.manual_seed(0)
    model, batch = MODELS["gpt"]()
    warning_plans(monkeypatch, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", mb.UnrepeatableWarning)
        with pytest.raises(mb.UnrepeatableWarning, match="plan 2 keeps more"):
            mb.fit(model, batch, "50%", measure="best")
    assert not any(has_region(module) for module in model.modules())


def test_nothing_is_timed_without_a_region_or_without_a_plain_step():
    model, batch = MODELS["mlp"]()
    assert mb.fit(model, batch, "100%").slowdown is None
    assert mb.fit(model, batch, "60%", fake=True).slowdown is None


def test_an_unknown_measure_is_refused_before_any_work():
    model, batch = MODELS["mlp"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(mb.OptionError, match="'best', 'one', 'none' or None"):
            mb.fit(model, batch, "60%", measure="twice")  # type: ignore[arg-type]
