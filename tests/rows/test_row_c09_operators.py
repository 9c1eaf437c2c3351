"""Row C9: the zoo and torch's tables of operators, profiled, metered and planned.

A step with each case has the profile's peak when it is measured, and the planner
returns a schedule or says what would fit. What plain refuses is not tried.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import membudget as mb
from membudget.errors import BudgetError
from membudget.planning import planner_of
from tests.operators.checks import as_they_come
from tests.operators.test_table import ROWS
from tests.operators.variants import Extent
from tests.zoo import CASES, Call, Case

ONE_OF = 24
"""Every test run takes one in so many operators, by its name alone."""

OTHER_EACH_STEP = {
    "nested_region",  # Its region saves the states of generators.
    "python_random_branch",  # Gradients exist already of layers that were drawn before.
}

pytestmark = as_they_come


class CaseModel(nn.Module):
    """A layer, and behind it the call of a case."""

    def __init__(self, call: Call):
        """Register what the call trains."""
        super().__init__()
        self.layer, self.call = nn.Linear(3, 3), call
        self.function = call.function if isinstance(call.function, nn.Module) else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a number that depends on every output of the call."""
        for tensor in self.leaves():
            tensor.grad = None
        call = self.call
        with call.around():
            outputs = call.function(*call.args, **call.kwargs)
        total = torch.tanh(self.layer(x)).tanh().sum()
        for tensor in pytree.tree_leaves(call.used(outputs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                total = total + real(tensor).float().sum()
        return total

    def clear(self) -> None:
        """Drop all gradients."""
        self.zero_grad()
        for tensor in self.leaves():
            tensor.grad = None

    def leaves(self) -> Iterator[Tensor]:
        """Yield the tensors of the call, which the model does not name."""
        call = self.call
        for tensor in pytree.tree_leaves((call.args, call.kwargs, call.state)):
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                yield tensor


def real(tensor: Tensor) -> Tensor:
    """Return a strided tensor of real numbers."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def plain_peak(case: Case) -> int | None:
    """Return the measured peak of the third plain step; `None` if plain refuses."""
    model, x = CaseModel(case.build()), torch.ones(2, 3)
    try:
        for _ in range(2):
            model(x).backward()
            model.clear()
        return mb.peak(lambda: model(x).backward()).peak_bytes
    except Exception:
        return None


def check_planned(case: Case) -> None:
    """Compare the profile of a case with the meter, and plan it at some budgets."""
    measured = plain_peak(case)
    if measured is None:
        return
    model, x = CaseModel(case.build()), torch.ones(2, 3)
    model(x).backward()
    model.clear()
    found = mb.profile(model, x)  # Of its second step, which is the model's third.
    if case.name not in OTHER_EACH_STEP:
        assert found.peak_bytes == measured, case.name
    planner = planner_of(found)
    for share in (0.9, 0.4):
        budget_bytes = int(share * found.peak_bytes)
        with suppress(BudgetError):
            schedule = planner.fastest(budget_bytes, quickly=True)
            assert schedule.peak_bytes <= budget_bytes


@pytest.fixture(autouse=True)
def _timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timing: Any = sys.modules["membudget.profile.timing"]
    for name in ("FEWEST_TIMED", "MOST_TIMED"):
        monkeypatch.setattr(timing, name, 1)


@pytest.mark.parametrize("size", [0, 200])
def test_row_c09_an_output_that_its_operator_enlarges_counts_once(size: int) -> None:
    x = torch.randn(200, 200)

    def sorted_into(size: int) -> Tensor:
        out = torch.empty(size, 200)
        torch.msort(x, out=out)
        return out

    check_planned(Case("msort", lambda: Call(sorted_into, (size,))))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_c09_a_case_of_the_zoo_is_planned(case: Case) -> None:
    check_planned(case)


def check_row(name: str) -> None:
    """Check one sample of an operator or module, and its forms."""
    for case in ROWS[name](Extent({torch.float32: 1}, formed=1)):
        check_planned(case)


@pytest.mark.parametrize(
    "name", [name for name in ROWS if zlib.crc32(name.encode()) % ONE_OF == 1]
)
def test_row_c09_an_operator_of_the_share_is_planned(name: str) -> None:
    check_row(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ROWS)
def test_row_c09_an_operator_is_planned(name: str) -> None:
    check_row(name)
