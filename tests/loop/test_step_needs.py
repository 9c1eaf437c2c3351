"""An optimizer's step is foreseen, also where parameters join it late."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.loop.step_needs import StepNeeds
from tests.loop.training import counted, live_bytes

WIDTH = 64


class Halves(nn.Module):
    """Two layers, of which the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, is_whole: bool) -> torch.Tensor:
        x = self.one(x)
        return self.other(x) if is_whole else x


def state_bytes(module: nn.Module) -> int:
    return 2 * sum(p.nbytes for p in module.parameters())


def train(model: Halves, optimizer: torch.optim.Optimizer, is_whole: bool) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH), is_whole).sum().backward()
    optimizer.step()


def test_state_of_a_parameter_that_joins_late_is_lacking_until_it_steps():
    model = Halves()
    optimizer = torch.optim.Adam(model.parameters())
    needs = StepNeeds(model)
    model(torch.ones(2, WIDTH), False).sum().backward()
    assert needs.bytes_of(optimizer) >= state_bytes(model.one)
    train(model, optimizer, is_whole=False)
    beside_bytes = needs.bytes_of(optimizer)
    assert beside_bytes < state_bytes(model.one)
    model(torch.ones(2, WIDTH), True).sum().backward()
    assert needs.bytes_of(optimizer) >= state_bytes(model.other)
    assert needs.bytes_of(optimizer) < state_bytes(model.other)


def test_what_is_known_of_an_optimizer_goes_with_it():
    """Its address may be that of a later one, whose state has yet to be made."""
    model = Halves()
    needs = StepNeeds(model)
    optimizer = torch.optim.Adam(model.parameters())
    needs.bytes_of(optimizer)
    assert len(needs._known) == 1
    del optimizer
    gc.collect()
    assert not needs._known


def test_a_step_that_makes_late_state_over_budget_is_refused():
    model = Halves()
    optimizer = torch.optim.Adam(model.parameters())
    with mb.budget(model, 1_000_000_000) as fitted:
        model(torch.ones(2, WIDTH), False)
    in_use = 1_000_000_000 - fitted.status().situations[0].left_bytes
    # For gradients and state of the first layer, and no more than that of the second.
    limit = in_use + int(2.6 * state_bytes(model.one))
    with mb.budget(model, limit):
        train(model, optimizer, is_whole=False)
        with pytest.raises(mb.BudgetError, match="the next step of Adam"):
            train(model, optimizer, is_whole=True)
    assert not optimizer.state[model.other.weight]


class WithClosure(torch.optim.SGD):
    """An optimizer that steps with a closure alone."""

    def step(self, closure=None):
        if closure is None:
            raise TypeError("this optimizer needs a closure")
        return super().step(closure)


def test_a_step_that_cannot_be_recorded_is_expected_to_take_what_the_last_two_did():
    model = Halves()
    optimizer = WithClosure(model.parameters())
    needs = StepNeeds(model)
    model(torch.ones(2, WIDTH), True).sum().backward()
    taken = []
    for took_bytes in (500, 100, 200):
        needs.begin(optimizer, is_measured=True)
        needs.learn(took_bytes)
        taken.append(needs.bytes_of(optimizer))
    assert taken == [0, 100, 100]
    assert "closure" in needs.why_not


@pytest.mark.parametrize("multiple", [4, 7, 20])
def test_a_step_of_lbfgs_is_refused_before_it_is_over_budget(multiple: int):
    """The first one has yet to make its state, and each adds to its history."""
    model = Halves()
    parameters_bytes = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x = torch.randn(2, WIDTH)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, True).square().mean()
        loss.backward()
        return loss

    error = pytest.raises(mb.BudgetError, match="the next step of LBFGS")
    with counted() as seen:
        limit = live_bytes() + multiple * parameters_bytes
        with mb.budget(model, limit), error:
            for _ in range(20):
                optimizer.step(closure)
    assert limit - 6 * parameters_bytes < seen.most_bytes <= limit


@pytest.mark.parametrize("is_over", [False, True])
def test_what_is_kept_free_for_state_is_no_excess_as_long_as_there_is_no_state(is_over):
    """The micro-batch took more than it was planned to, but no more than there was."""
    model = Halves()
    optimizer = torch.optim.AdamW(model.parameters())
    limit = live_bytes() + (1 << 20)
    with counted(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", mb.BudgetWarning)
        with mb.budget(model, limit, optimizer=optimizer):
            loss = model(torch.ones(2, WIDTH), True).sum()
            free_bytes = limit - live_bytes()
            beside_bytes = free_bytes + state_bytes(model) * (1 if is_over else -1) // 2
            torch.empty(beside_bytes, dtype=torch.uint8)
            loss.backward()
    text = [str(warning.message) for warning in told]
    assert [("more than were left for it" in one) for one in text] == [True] * is_over
