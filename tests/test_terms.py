"""An overhead is priced as the race shows it; a term that is still off is named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import membudget as mb
from membudget import planning, terms
from membudget.fitted import Fitted
from membudget.planner.overheads import NO_OVERHEADS, RERUN_FORWARD, Overheads
from membudget.race import Slowdown
from membudget.terms import DOUBT, MOST_OFF, repriced, term_off
from tests.planner.models import MODELS


@cache
def fitted() -> Fitted:
    torch.manual_seed(0)
    return mb.fit(*MODELS["gpt"](), "60%", mode="full", measure="none")


def off(over: float, in_forward: float | None) -> str:
    """Return what is said of a slowdown that is so much over its prediction."""
    last = fitted().attempts[-1]
    last = replace(last, plan=replace(last.plan, slowdown=1.5))
    slowdown = Slowdown(1.5 + over, 1.0, 2.0, 3, 1.0, (), in_forward)
    return term_off(fitted().profile, last, slowdown)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> float:
    """Return what the forward is predicted to take longer, of a plain step."""
    found = fitted()
    share = 0.2 * found.profile.graph.seconds / len(found.attempts[-1].schedule.choices)
    prices = Overheads(record_region_s=share)
    monkeypatch.setattr(terms, "overheads_of", lambda profile: prices)
    return 0.2


def raced(in_forward: float | None) -> Slowdown:
    return Slowdown(1.5, 1.4, 1.6, 3, 1.0, (), in_forward)


def test_the_overhead_of_regions_is_scaled_to_the_forward_that_was_raced(forward):
    before = fitted().attempts[-1]
    found = repriced(fitted().profile, before, raced(3 * forward + 2 * DOUBT))
    assert found.overhead_scale == pytest.approx(3)
    more_s = found.schedule.overhead_s - before.schedule.overhead_s
    assert more_s == pytest.approx(2 * forward * fitted().profile.graph.seconds)
    assert found.plan.slowdown == found.schedule.slowdown > before.plan.slowdown


def test_what_is_recomputed_keeps_its_price_and_no_decision_changes(forward):
    before = fitted().attempts[-1]
    found = repriced(fitted().profile, before, raced(forward / 2))
    assert found.schedule.choices == before.schedule.choices
    assert found.schedule.simulation == before.schedule.simulation
    assert found.plan == replace(before.plan, slowdown=found.plan.slowdown)


@pytest.mark.parametrize("in_forward", [0.0, -1.0])
def test_a_forward_that_is_lost_in_noise_leaves_some_of_the_overhead(
    forward, in_forward
):
    found = repriced(fitted().profile, fitted().attempts[-1], raced(in_forward))
    assert found.overhead_scale == pytest.approx(DOUBT / (forward + DOUBT))


def test_an_overhead_that_no_constant_prices_is_not_made_up(monkeypatch):
    monkeypatch.setattr(terms, "overheads_of", lambda profile: NO_OVERHEADS)
    before = fitted().attempts[-1]
    free = replace(before, schedule=replace(before.schedule, overhead_s=0.0))
    found = repriced(fitted().profile, free, raced(0.3))
    assert found.schedule.overhead_s == 0.0


def test_an_overhead_keeps_its_price_where_the_forward_was_not_timed_apart(forward):
    before = fitted().attempts[-1]
    assert repriced(fitted().profile, before, raced(None)) is before


def test_fit_prices_the_plan_that_it_has_timed():
    torch.manual_seed(0)
    found = mb.fit(*MODELS["gpt"](), "60%", mode="full", measure="one")
    slowdown, last = found.slowdown, found.attempts[-1]
    assert slowdown is not None
    unpriced, graph = fitted().attempts[-1].schedule, fitted().profile.graph
    assert last.overhead_scale != 1.0
    prices = planning.overheads_of(fitted().profile)
    forward_s = sum(prices.forward_of_s(graph, choice) for choice in unpriced.choices)
    more_s = last.schedule.overhead_s - unpriced.overhead_s
    assert more_s == pytest.approx((last.overhead_scale - 1) * forward_s)
    assert found.plan.slowdown == last.schedule.slowdown
    assert f"{last.overhead_scale:.2f}  × the engine's usual" in found.report()


def test_the_pass_that_takes_longer_than_predicted_is_named(forward):
    in_forward = off(0.1, forward + 0.08)
    assert in_forward.startswith("+0.100: the regions' overhead in the forward took ")
    assert in_forward.endswith("took 0.280 of the plain step, predicted 0.200")
    in_backward = off(0.1, forward + 0.02)
    assert in_backward.startswith("+0.100: recomputation and saved tensors in the back")
    assert in_backward.endswith("took 0.380 of the plain step, predicted 0.300")
    assert off(-0.1, forward).endswith("took 0.200 of the plain step, predicted 0.300")


def test_a_slowdown_near_its_prediction_has_no_term_that_is_off(forward):
    assert off(MOST_OFF / 2, forward + 1) == off(-MOST_OFF / 2, forward) == ""
    assert off(0.1, None) == ""


def test_the_forward_takes_its_share_of_a_region_s_overhead():
    graph = fitted().profile.graph
    choice = fitted().attempts[-1].schedule.choices[0]
    prices = Overheads(again_s=1.0, record_region_s=5.0, rerun_region_s=7.0)
    assert prices.forward_of_s(graph, choice) == 5
    again = replace(choice, engine="rerun")
    assert prices.forward_of_s(graph, again) == RERUN_FORWARD * 7


def test_the_term_that_is_off_is_told_with_the_overhead_as_it_was_priced(forward):
    slowdown = raced(2 * forward + DOUBT)
    found = repriced(fitted().profile, fitted().attempts[-1], slowdown)
    backward = found.plan.slowdown - 1 - 2 * forward
    slower = replace(slowdown, median=found.plan.slowdown + 0.1)
    said = term_off(fitted().profile, found, slower)
    measured = backward + 0.1 - DOUBT
    assert said.endswith(
        f"took {measured:.3f} of the plain step, predicted {backward:.3f}"
    )


def test_a_report_has_a_line_for_the_term_that_is_off(forward):
    found = fitted()
    slowdown = Slowdown(found.plan.slowdown + 1, 1.0, 2.0, 3, 1.0, (), forward)
    again = Fitted(
        "auto",
        found._step,
        found.profile,
        found.attempts,
        found._applied,
        slowdown,
    )
    assert "\nerror     +1.000: recomputation and saved tensors" in again.report()
