"""Row C14: steps that take other bytes than their profile counts."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.allowance import Budget
from membudget.outcome import plain_run
from membudget.planning import unseen_bytes
from membudget.profile import Profile
from membudget.recorded import fit_recorded
from membudget.step import Step


def step_and_profile(is_fake: bool = False) -> tuple[Step, Profile]:
    """Return a step of four blocks, and its profile."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU()) for _ in range(4))
    model = nn.Sequential(*(nn.Sequential(b, nn.Linear(64, 16)) for b in blocks))
    x = torch.randn(256, 16)
    return Step(model, x, None), mb.profile(model, x, fake=is_fake)


def with_workspace(plain: Profile, more_bytes: int) -> Profile:
    """Return a profile that counts another workspace at each operator."""
    operators = tuple(
        dataclasses.replace(o, workspace_bytes=o.workspace_bytes + more_bytes)
        for o in plain.graph.operators
    )
    graph = dataclasses.replace(plain.graph, operators=operators)
    return dataclasses.replace(plain, graph=graph)


def test_row_c14_a_profile_that_is_right_is_not_corrected() -> None:
    step, plain = step_and_profile()
    assert unseen_bytes(plain, plain_run(step)) == 0
    fitted = fit_recorded(step, plain, Budget.of("70%", plain))
    assert "corrected" not in fitted.report()
    assert fitted.plan.plain_peak_bytes == plain.peak_bytes


@pytest.mark.parametrize("more_bytes", [40_000, -40_000])
def test_row_c14_a_plan_is_made_from_what_the_plain_step_was_measured_to_take(
    more_bytes: int,
) -> None:
    step, right = step_and_profile()
    wrong = with_workspace(right, more_bytes)
    unseen = unseen_bytes(wrong, plain_run(step))
    assert unseen == right.peak_bytes - wrong.peak_bytes
    budget = Budget.of(right.graph.static.total + int(0.7 * right.peak_bytes), right)
    fitted = fit_recorded(step, wrong, budget)
    assert len(fitted.attempts) == 1
    assert fitted.plan.plain_peak_bytes == right.peak_bytes
    assert fitted.peak_bytes == pytest.approx(fitted.plan.peak_bytes, rel=0.01)
    ratio = right.peak_bytes / wrong.peak_bytes
    assert f"measured: {ratio:.4f} of its profile" in fitted.report()
    assert fitted.audit()


def test_row_c14_a_profile_on_fake_tensors_is_not_metered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, plain = step_and_profile(is_fake=True)
    monkeypatch.setattr(sys.modules["membudget.recorded"], "plain_run", not_called)
    fit_recorded(step, with_workspace(plain, 40_000), Budget.of("70%", plain))
    assert unseen_bytes(with_workspace(plain, 40_000), None) == 0


def not_called(step: Step) -> None:
    """Stand for what must not run."""
    raise AssertionError("the plain step ran, and it may not fit")
