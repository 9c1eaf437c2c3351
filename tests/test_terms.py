"""The term of a slowdown that is off is named, where it is off by much."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import membudget as mb
from membudget import terms
from membudget.fitted import Fitted
from membudget.planner.schedule import RERUN_FORWARD, Overheads
from membudget.race import Slowdown
from membudget.terms import MOST_OFF, term_off
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
    prices = Overheads(0.0, 0.0, 0, replay_region_s=share)
    monkeypatch.setattr(terms, "overheads_of", lambda profile: prices)
    return 0.2


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
    prices = Overheads(1.0, 1.0, 0, 7.0, replay_region_s=5.0, replay_saved_s=3.0)
    recorded = choice.end - choice.start
    assert prices.forward_of_s(graph, choice) == 5 + recorded
    again = replace(choice, engine="rerun")
    assert prices.forward_of_s(graph, again) == RERUN_FORWARD * 7


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
    assert "\noff       +1.000: recomputation and saved tensors" in again.report()
