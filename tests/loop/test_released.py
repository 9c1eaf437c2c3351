"""A budget holds no model in a circle: it is freed as soon as nobody refers to it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import nn

import membudget as mb

LATER, FEW, MANY = 600_000, 16, 16_000


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def layers() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(4)))


def loop(
    model: nn.Module, rows: list[int], optimizer: torch.optim.Optimizer | None = None
) -> None:
    for count in rows:
        model(torch.randn(count, 32)).square().sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def test_a_model_lives_no_longer_than_its_loop():
    def run() -> weakref.ReferenceType[nn.Module]:
        model = layers()
        with mb.budget(model, "90%") as fitted:
            loop(model, [64] * 3)
        assert fitted.status().situations
        return weakref.ref(model)

    assert run()() is None


def test_models_of_one_budget_live_no_longer_than_their_loop():
    def run() -> list[weakref.ReferenceType[nn.Module]]:
        models = [layers(), layers()]
        with mb.budget(models, "1GiB"):
            for model in models:
                loop(model, [64] * 2)
        return [weakref.ref(model) for model in models]

    assert [reference() for reference in run()] == [None, None]


def test_an_optimizer_that_was_not_given_lives_no_longer_than_in_the_plain_loop():
    model = layers()
    with mb.budget(model, "1GiB"):
        optimizer = torch.optim.AdamW(model.parameters())
        loop(model, [FEW] * 2, optimizer)
        first = weakref.ref(optimizer)
        del optimizer
        assert first() is None
        loop(model, [FEW], torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("budget", "rows", "makes_state"),
    [(10_000, [FEW], False), (LATER, [FEW, FEW, MANY], False), (250_000, [FEW], True)],
    ids=["first", "later", "optimizer"],
)
def test_a_refused_model_lives_no_longer_than_the_error(budget, rows, makes_state):
    def run() -> weakref.ReferenceType[nn.Module]:
        model = layers()
        # Its state is found out when it first steps, and may be too much then.
        make = torch.optim.Adam if makes_state else torch.optim.SGD
        optimizer = make(model.parameters(), lr=0.1)
        raised = False
        with suppress(mb.BudgetError):
            raised = True
            with mb.budget(model, budget):
                loop(model, rows, optimizer)
            raised = False
        assert raised
        return weakref.ref(model)

    assert run()() is None


def test_a_budget_that_was_not_stopped_lives_as_long_as_its_model():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters())
    budgeted = weakref.ref(mb.budget(model, "1GiB").start())
    gc.collect()
    with pytest.warns(mb.BudgetWarning, match="the forward of Sequential was never"):
        optimizer.step()
    found = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert found() is None
    assert budgeted() is None
