"""A budget says which calls did not follow their plan."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.loop.notes import not_followed
from tests.loop.training import tokens
from tests.loops.models import Language


class Block(nn.Module):
    """May run another operator from its second micro-batch on, on the same sizes."""

    def __init__(self, changes: bool):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.changes, self.calls = changes, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += type(x) is Tensor  # A recording's tensors are fake.
        x = self.first(x).sin()
        x = x.cos() if self.changes and self.calls > 1 else x.exp()
        return self.second(x).tanh()


def notes_of(changes: bool) -> list[str]:
    model = nn.Sequential(*(Block(changes) for _ in range(3)))
    budget = mb.budget(model, "70%", on_exceed="warn")
    with warnings.catch_warnings(), budget as fitted:
        warnings.simplefilter("ignore", mb.BudgetWarning)
        for _ in range(3):
            model(torch.randn(64, 32)).sum().backward()
    return [n for n in fitted.status().notes if "other operators than planned" in n]


def test_a_budget_says_which_calls_ran_other_operators_than_planned():
    (note,) = notes_of(changes=True)
    assert note.endswith("may have kept less than their plan, in the model (2)")


def test_a_budget_says_nothing_of_plans_that_were_followed():
    assert not notes_of(changes=False)


def test_a_plan_that_cannot_be_put_on_is_refused_each_time_with_the_reason():
    torch.manual_seed(0)
    model, ids = Language(drop=0.1), tokens(24)  # Each block has a region of its own.
    with mb.budget(model, "60%"):
        model(ids).sum().backward()
        model.zero_grad()  # The next plan knows what the loop needs, and is another.
        blocks = model.blocks._modules
        model.blocks._modules = {f"other{n}": block for n, block in blocks.items()}
        for _ in range(2):
            with pytest.raises(mb.PlanError, match="which the model lacks"):
                model(ids)


def test_regions_that_differ_most_are_named_and_the_others_counted():
    note = not_followed(Counter({"a": 0, "b": 1, "c": 4, "d": 2, "e": 3, "f": 1}))
    assert note.endswith("plan, in c (4), e (3), d (2), and in 2 more")
