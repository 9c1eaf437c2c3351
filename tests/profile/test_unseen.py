"""What a recorder cannot see is counted, so that predicted peaks are exact."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import membudget as mb
from membudget.engine import native
from membudget.planner.timeline import live_bytes
from membudget.profile.lifetimes import RecordedStorage
from membudget.profile.unseen import _ranges, note_unseen

Binary = Callable[[Any, Any], Any]
ARITHMETIC = [operator.mul, operator.truediv, operator.add, operator.sub, operator.pow]


class Block(nn.Module):
    """A sine, then arithmetic with a number, eight times."""

    def __init__(self, arithmetic: Binary) -> None:
        super().__init__()
        self.arithmetic = arithmetic

    def forward(self, x: Tensor) -> Tensor:
        for number in range(8):
            x = self.arithmetic(x.sin(), number + 1.5)
        return x


class Numbers(nn.Module):
    """Four blocks behind a linear layer."""

    def __init__(self, arithmetic: Binary) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(arithmetic) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.cpu_only("numbers are wrapped in the host's memory")
@pytest.mark.parametrize("arithmetic", ARITHMETIC, ids=lambda f: f.__name__)
def test_a_profile_counts_the_numbers_that_autograd_saves(arithmetic):
    model, x = Numbers(arithmetic), torch.rand(32, 16)
    model(x).backward()
    model.zero_grad()

    found = mb.profile(model, x)

    assert found.peak_bytes == mb.peak(lambda: model(x).backward()).peak_bytes


@pytest.mark.cpu_only("numbers are wrapped in the host's memory")
@pytest.mark.parametrize("arithmetic", ARITHMETIC, ids=lambda f: f.__name__)
@pytest.mark.parametrize("budget", ["70%", "40%"])
@pytest.mark.skipif(not native.is_available(), reason="other plans, without C++")
def test_numbers_are_live_under_a_plan_as_predicted(arithmetic, budget):
    model, x = Numbers(arithmetic), torch.rand(32, 16)

    (attempt,) = mb.fit(model, x, budget, measure="none").attempts

    assert attempt.plan.regions
    assert attempt.peak_bytes == attempt.plan.peak_bytes


def recorded(*storages: tuple[int, int | None, int], operators: int) -> Any:
    made = [RecordedStorage(n, "activation", "", b, d) for b, d, n in storages]
    lifetimes = SimpleNamespace(storages=made)
    return SimpleNamespace(operators=[None] * operators, lifetimes=lifetimes)


def test_bytes_that_two_operators_find_in_no_recorded_storage_are_one_of_its_own():
    recorder = recorded((0, None, 20), (1, 4, 20), operators=7)
    counted = dict(enumerate([0, 20, 48, 56, 36, 28, 20]))

    note_unseen(recorder, counted)

    found = [(s.birth, s.death, s.bytes) for s in recorder.lifetimes.storages[2:]]
    assert found == [(4, 5, 8), (3, 6, 8)]


def test_nothing_is_noted_where_nobody_counts_or_one_operator_alone_finds_more():
    for counted in ({}, {0: 0, 1: 28, 2: 20}, {0: 0, 1: 12, 2: 12}):
        recorder = recorded((0, None, 20), operators=3)
        note_unseen(recorder, counted)
        assert len(recorder.lifetimes.storages) == 1


@given(st.lists(st.integers(0, 5)))
def test_ranges_add_up_to_the_live_bytes_that_they_are_of(live):
    found = list(_ranges(live))
    assert live_bytes(len(live), found) == live
    assert all(birth < death and size for birth, death, size in found)
