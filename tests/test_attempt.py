"""A plan whose regions change what a step computes is made anew without them."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import attempt
from membudget.errors import BudgetError, RecomputeMismatchError, UnrepeatableWarning
from membudget.planner.plan import Plan
from tests.changing import Changing
from tests.model_state import state_of
from tests.planner.drafts import PLAN


def is_in_region() -> bool:
    """Return whether the caller runs in a region; a model sees it nowhere else."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "/membudget/engine/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Telling(Changing):
    """A block that computes something else while a region records or replays it."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x).tanh()
        return (self.changed(output) if is_in_region() else output).sin()


def telling(changes: dict[int, str], blocks: int = 8) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Telling(32, changes.get(n, "")) for n in range(blocks)))
    return model, torch.randn(1024, 32)


def test_the_search_for_regions_at_fault_does_not_warn(monkeypatch):
    tried: list[tuple[str, ...]] = []

    def run_under(step: Any, plan: Plan, plain: Any) -> Any:
        tried.append(tuple(region.path for region in plan.regions))
        warnings.warn("kept", UnrepeatableWarning, stacklevel=1)
        raise RecomputeMismatchError("wrong alone")

    monkeypatch.setattr(attempt, "run_under", run_under)
    error = RecomputeMismatchError("wrong together")
    step: Any = Mock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = attempt._reasons(step, PLAN, Mock(), error)
    assert found == {"0": "wrong alone", "1": "wrong alone"}
    assert tried == [("0",), ("1",)]


def test_regions_that_are_right_alone_are_taken_off_again(monkeypatch):
    removed = Mock()
    monkeypatch.setattr(attempt, "run_under", lambda *_: (None, removed))
    step: Any = Mock()
    found = attempt._reasons(step, PLAN, Mock(), RecomputeMismatchError("together"))
    assert found == {"0": "together", "1": "together"}
    assert removed.remove.call_count == 2


def test_each_region_at_fault_is_named_with_why():
    error = attempt.RegionsAtFaultError({"h.0": "it is wrong", "": "it is, too"})
    assert str(error) == (
        "there is no region on 'h.0', under which it is wrong; "
        "there is no region on 'the model', under which it is, too"
    )
    assert error.reasons == {"h.0": "it is wrong", "": "it is, too"}


def gradients(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        "buffer",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("loss", "gradient")),
    ],
)
def test_a_module_that_computes_otherwise_under_a_region_gets_none(changes):
    model, batch = telling({2: changes, 5: changes})
    plain, before = gradients(model, batch), state_of(model)
    with pytest.warns(UnrepeatableWarning, match="there is no region on"):
        fitted = mb.fit(model, batch, "80%", lambda output, _: output.square().mean())

    status = fitted.status()
    assert {*status.left_out} >= {"2", "5"}
    assert status.regions
    assert not {*status.left_out} & {region.name for region in status.regions}
    assert fitted.peak_bytes <= fitted.plan.budget_bytes
    assert f"2       (no region, under which the {changes}" in str(status)
    assert "no region, under which values differ" in fitted.report()
    for one, other in zip(plain, gradients(model, batch), strict=True):
        assert torch.equal(one, other)
    fitted.remove()
    assert state_of(model) == before


def test_where_no_module_may_have_a_region_the_budget_is_refused():
    model, batch = telling(dict.fromkeys(range(4), "loss"), blocks=4)
    before = state_of(model)
    with (
        pytest.warns(UnrepeatableWarning, match="there is no region on"),
        pytest.raises(BudgetError, match="no plan fits") as caught,
    ):
        mb.fit(model, batch, "60%")
    assert any("there is no region on" in note for note in caught.value.__notes__)
    assert state_of(model) == before
    assert mb.fit(model, batch, caught.value.least_bytes).plan.regions == ()
