"""A user is told of numbers that make ever new situations."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import membudget as mb


class Timed(nn.Module):
    """Is called with a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor, time: float | Tensor = 0.0) -> Tensor:
        return self.layers(x) * time


def texts_of(*calls: tuple[Tensor, float | Tensor]) -> list[str]:
    """Train on some calls; return what a user is warned of."""
    model = Timed()
    with warnings.catch_warnings(record=True) as caught, mb.budget(model, "1GiB"):
        warnings.simplefilter("always")
        for call in calls:
            model(*call).sum().backward()
            model.zero_grad()
    return [str(w.message) for w in caught if w.category is mb.BudgetWarning]


def test_numbers_that_change_all_the_time_are_warned_of_once():
    (text,) = texts_of(*((torch.ones(2, 8), 0.5 * step) for step in range(10)))
    assert text.startswith("the model was called with 8 different numbers in otherwise")


@pytest.mark.parametrize("number", [0.5, torch.tensor(0.5)])
def test_other_sizes_and_tensors_make_no_warning(number):
    assert not texts_of(
        *((torch.ones(rows, 8), rows * number) for rows in range(1, 5)),
        *((torch.ones(rows, 8), number) for rows in range(5, 10)),
    )
