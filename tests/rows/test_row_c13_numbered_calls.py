"""Row C13: regions for single calls of a module that the model calls often."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import planning
from membudget.allowance import Budget
from membudget.fitted import Fitted
from membudget.planner.overheads import Overheads
from membudget.profile import profile_step
from membudget.recorded import fit_recorded
from membudget.step import step_of

STEPS = 40


def function(inputs: int = 32) -> nn.Module:
    """Return what the loops call."""
    parts = (nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    return nn.Sequential(*parts, nn.Linear(128, 32))


class Euler(nn.Module):
    """A differential equation, by forty steps of Euler's method."""

    def __init__(self) -> None:
        """Make the right side."""
        super().__init__()
        self.function = function()

    def forward(self, y: Tensor) -> Tensor:
        """Return the mean square of where it ends."""
        for _ in range(STEPS):
            y = y + self.function(y) / STEPS
        return y.square().mean()


class RungeKutta(Euler):
    """The same, by ten steps of the classic Runge-Kutta method."""

    def forward(self, y: Tensor) -> Tensor:
        """Return the mean square of where it ends."""
        h = 4 / STEPS
        for _ in range(STEPS // 4):
            a = self.function(y)
            b = self.function(y + h / 2 * a)
            c = self.function(y + h / 2 * b)
            d = self.function(y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
        return y.square().mean()


class Cell(nn.Module):
    """A recurrent cell whose first call makes the state, by operators of its own."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = function(64)

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Return the next state."""
        if state is None:
            state = torch.zeros_like(x)
        found: Tensor = self.layers(torch.cat([x, state], -1))
        return found


class Recurrent(nn.Module):
    """A loop over one cell."""

    def __init__(self) -> None:
        """Make the cell."""
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of all states."""
        states: list[Tensor] = []
        for place in range(x.shape[1]):
            states.append(self.cell(x[:, place], states[-1] if states else None))
        return torch.stack(states).square().mean()


PRICES = Overheads(
    record_s=45e-6,
    record_cold_s=45e-6,
    again_s=45e-6,
    rerun_region_s=100e-6,
    rerun_module_s=12e-6,
    rerun_nested_s=550e-6,
    rerun_saved_s=12e-6,
)
"""What engines take beside operators of 100 µs."""


def fitted(model: nn.Module, batch: Tensor, share: str) -> Fitted:
    """Fit a step with given seconds and prices, so that every machine plans alike."""
    step = step_of(model, batch, None, None)
    profile = profile_step(step, None, False, None)
    operators = tuple(replace(o, seconds=1e-4) for o in profile.graph.operators)
    timed = replace(profile, graph=replace(profile.graph, operators=operators))
    with patch.object(planning, "overheads_of", return_value=PRICES):
        return fit_recorded(step, timed, Budget.of(share, timed), measure="none")


@pytest.mark.parametrize(("kind", "percent"), [(Euler, 40), (RungeKutta, 70)])
def test_row_c13_a_solver_s_function_gets_a_region_in_some_of_its_calls(kind, percent):
    torch.manual_seed(0)
    model = kind()
    with fitted(model, torch.randn(256, 32), f"{percent}% of activations") as found:
        assert {region.path for region in found.plan.regions} == {"function"}
        numbers = [n for region in found.plan.regions for n in region.numbers]
        assert len(set(numbers)) == len(numbers) < STEPS
        (status,) = found.status().regions
        assert status.differences == 0
        assert found.peak_bytes <= found.plan.budget_bytes
        assert found.peak_bytes == pytest.approx(found.plan.peak_bytes, rel=0.001)
        assert found.audit()


def test_row_c13_a_recurrent_cell_gets_a_region_in_some_of_its_calls():
    torch.manual_seed(0)
    batch = torch.randn(256, 20, 32)
    with fitted(Recurrent(), batch, "80% of activations") as found:
        assert {region.path for region in found.plan.regions} == {"cell"}
        assert [r.differences for r in found.status().regions] == [0]
        assert found.peak_bytes <= found.plan.budget_bytes
        assert found.audit()


def test_row_c13_a_step_that_ends_early_shifts_no_later_step():
    torch.manual_seed(0)
    batch = torch.randn(256, 8, 32)
    model = Recurrent()
    with fitted(model, batch, "80% of activations") as found:
        peaks = []
        for length in (8, 3, 8):
            model.zero_grad()
            part = batch[:, :length]
            peaks.append(mb.peak(lambda part=part: model(part).backward()).peak_bytes)
        assert peaks[0] == peaks[2] <= found.plan.budget_bytes
        assert [r.differences for r in found.status().regions] == [0]


def test_row_c13_calls_that_the_plan_does_not_know_keep_nothing():
    torch.manual_seed(0)
    model = Recurrent()
    with fitted(model, torch.randn(256, 8, 32), "80% of activations") as found:
        more = torch.randn(256, 11, 32)
        assert found.audit(more)
        assert [r.differences for r in found.status().regions] == [3]


def test_row_c13_a_plan_of_numbered_calls_is_read_from_a_file(tmp_path):
    torch.manual_seed(0)
    model, batch = Euler(), torch.randn(256, 32)
    with fitted(model, batch, "40% of activations") as found:
        plan, peak_bytes = found.plan, found.peak_bytes
    assert not [m for m in model.modules() if "_membudget" in " ".join(vars(m))]
    plan.to_json(tmp_path / "plan.json")
    applied = mb.apply(model, tmp_path / "plan.json")
    model(batch).backward()
    model.zero_grad()
    assert mb.peak(lambda: model(batch).backward()).peak_bytes == peak_bytes
    assert applied.names == ("function",)
    assert mb.audit(model, batch)
