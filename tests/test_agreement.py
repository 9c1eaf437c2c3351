"""A plan is checked bit for bit, and checking takes no more than the budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.agreement import (
    VERIFYING_ERROR,
    Checked,
    Checker,
    put_plan,
    verifying_bytes,
)
from membudget.errors import PinnedWarning
from membudget.fit import fit
from membudget.memory import peak
from membudget.planner.answers import Chosen
from membudget.planner.regions import Region
from membudget.planner.simulate import simulate
from membudget.planning import choose_mode, make_plan
from membudget.profile.step import Step
from tests.model_state import state_of
from tests.planner.models import MODELS, gpt


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return MODELS[name]()


def whole(found: mb.Profile) -> Chosen:
    """Return one region on the whole model that keeps nothing."""
    graph = found.graph
    call = next(call for call in graph.calls if call.path == "")
    regions = (Region(call.start, call.end),)
    simulation = simulate(graph, regions)
    return Chosen((call,), regions, simulation, simulation.seconds, graph.seconds)


def first_peak(step: Step, put: Any) -> int:
    """Return what the first step takes."""
    applied = put()
    found = peak(step.run).peak_bytes
    step.prepare()
    applied.remove()
    return found


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "dict_with_loss"])
@pytest.mark.parametrize("cut", ["whole", "blocks"])
def test_what_verifying_takes_is_known_before(name, cut):
    model, batch = made(name)
    found = mb.profile(model, batch, fake=True)
    graph, chosen = found.graph, whole(found)
    if cut == "blocks":
        graph, chosen = choose_mode(found, "full")
    step, plan = Step(model, batch, None), make_plan(found, graph, chosen, model, 1)

    measured = first_peak(step, lambda: put_plan(step, plan, verify=True))

    estimated = max(chosen.simulation.peak_bytes, verifying_bytes(graph, chosen))
    assert measured <= VERIFYING_ERROR * estimated
    assert estimated <= 1.25 * measured
    if cut == "whole":
        assert measured > found.peak_bytes


def checked(
    model: nn.Module, batch: Any, budget: float, fake: bool = True, **changes: Any
) -> Checked:
    """Return how one region on the whole model is checked at a share of the peak."""
    found = mb.profile(model, batch, fake=fake)
    found = dataclasses.replace(found, **changes)
    step, chosen = Step(model, batch, None), whole(found)
    before = state_of(model)
    plan = make_plan(found, found.graph, chosen, model, 1)
    allowed = int(budget * found.peak_bytes)
    how = Checker(step, found, allowed).check(found.graph, plan, chosen)
    assert state_of(model) == before
    return how


@pytest.mark.parametrize(
    ("fake", "budget", "how"),
    [
        (True, 3.0, Checked.VALUES),
        (True, 0.9, Checked.RERUN),
        (True, 0.1, Checked.NOTHING),
        (False, 3.0, Checked.VALUES),
        (False, 0.9, Checked.PLAIN),
        (False, 0.1, Checked.PLAIN),
    ],
)
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_plan_is_checked_in_the_room_that_there_is(name, fake, budget, how):
    assert checked(*made(name), budget, fake) is how


def test_a_step_without_regions_is_the_plain_one():
    model, batch = made("mlp")
    with fit(model, batch, "100%", fake=True) as fitted:
        assert fitted.checked is Checked.PLAIN
        assert "checked" not in fitted.report()


@pytest.mark.parametrize("percent", [90, 70, 50, 40])
@pytest.mark.parametrize("fake", [True, False])
def test_the_first_step_after_fitting_keeps_the_budget(percent, fake):
    model, batch = gpt(blocks=5)
    with fit(model, batch, f"{percent}%", fake=fake) as fitted:
        step = Step(model, batch, None)
        step.prepare()
        assert peak(step.run).peak_bytes <= fitted.plan.budget_bytes
        assert fitted.checked.value in fitted.report()


@pytest.mark.parametrize("name", ["mlp", "gpt", "unet", "encoder_decoder"])
def test_regions_that_verify_themselves_keep_the_budget_while_they_do(name):
    model, batch = made(name)
    found = 0
    for percent in (90, 80, 70, 60):
        fitted = fit(model, batch, f"{percent}%", fake=True)
        fitted.remove()
        if fitted.checked is Checked.VALUES:
            found += 1
            step, plan = Step(model, batch, None), fitted.plan
            # Put on anew, its regions verify themselves anew.
            taken = first_peak(step, lambda: put_plan(step, plan, verify=True))  # noqa: B023
            assert taken <= plan.budget_bytes
    assert found


class Unseen(nn.Module):
    """What a product made is changed where no dispatcher sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh() * 2
        y.detach().numpy()[...] += 1
        return (y.sin() * y.exp()).tanh()


@pytest.mark.parametrize("tensors", ["real", "fake"])
def test_regions_verify_themselves_where_the_outcome_is_another(tensors):
    model, batch = nn.Sequential(*(Unseen() for _ in range(4))), torch.randn(64, 32)
    assert checked(model, batch, 0.95, fake=False, tensors=tensors) is Checked.VALUES


def test_a_write_that_nobody_sees_is_kept_by_a_fitted_plan():
    model, batch = nn.Sequential(*(Unseen() for _ in range(8))), torch.randn(64, 32)
    with pytest.warns(PinnedWarning, match="did not come back when it was replayed"):
        fitted = fit(model, batch, "95%")
    with fitted:
        assert fitted.checked is Checked.VALUES
        assert sum(region.pinned for region in fitted.status().regions) > 0
        assert fitted.audit().equal


def test_blocks_that_cannot_run_again_are_no_witness():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            type(self).calls += 1
            wide = super().forward(input)
            return wide.sin().exp() if type(self).calls % 2 else wide.tanh()

    model = nn.Sequential(*(Counting(32, 32) for _ in range(3)))
    assert checked(model, torch.randn(64, 32), 0.9) is Checked.NOTHING
