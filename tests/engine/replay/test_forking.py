"""Calls that go different ways: where their routes part, they go on along another."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from membudget.engine.candidate import Candidate
from membudget.engine.policy import Policy
from membudget.engine.replay import routes
from tests.engine.replay.followed import (
    KEEPS,
    Function,
    check,
    replayed,
)


class Layers(nn.Module):
    """Layers of their own, of which a call runs those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, run: tuple[int, ...]) -> Tensor:
        for number in run:
            x = x + self.layers[number](x.sin()).relu_()
        h = self.norm(x).view(3, 2, 8)
        h[:, :1].mul_(2)
        return h.tanh().cos()


RUNS = [(), (0,), (1, 3), (0, 1, 2, 3), (2, 1), (3,), (0, 1, 2)]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("verify", [False, True, 0.01])
def test_rule11_calls_that_drop_layers_go_on_along_another_route(keep, verify, trips):
    """Layers are told apart by their number only: which they are does not matter."""
    torch.manual_seed(0)
    model = Layers()
    region = replayed(model, KEEPS[keep], verify=verify)
    draw = random.Random(0)
    check(model, region, RUNS)
    check(model, region, [draw.choice(RUNS) for _ in range(30)])
    trips.clear()
    check(model, region, RUNS)
    assert trips == [True] * len(trips)
    assert len(trips) >= 5  # Verified calls may be sampled.


def test_rule11_routes_part_at_a_tensor_that_autograd_saves(trips):
    def function(x: Tensor, saves: bool) -> Tensor:
        y = x.sin() if saves else x.detach().sin()
        return (y.exp() * x).cos()

    region = replayed(function)
    check(function, region, [True, True, False, False, True, False, False, True])
    assert trips == [True, False, *[True] * 5]


def test_rule11_routes_part_where_an_operator_makes_memory_of_another_kind(trips):
    """The same operator, which has run: what it made is compared with each route."""

    def function(x: Tensor, rows: int) -> Tensor:
        sums = x[:rows] @ x.t()
        sums[:, :3].mul_(2)
        return sums.sin() @ x

    check(function, replayed(function), [2, 2, 3, 3, 2, 3, 3, 2])
    assert trips == [True, False, *[True] * 4]  # The 4th is surveyed from its start.


def sines(x: Tensor, count: int) -> Tensor:
    for _ in range(count):
        x = x.sin()
    return x.exp()


def test_rule11_the_routes_of_a_signature_are_few(trips, monkeypatch):
    monkeypatch.setattr(routes, "_MOST_ROUTES", 3)
    region = replayed(sines)
    check(sines, region, [1, 2, 3, 1, 2, 3])
    assert trips == [False, False, True, True, True]
    trips.clear()
    check(sines, region, [4, 1, 4])  # The route of one sine was the oldest.
    assert trips == [False, False, True]


def test_rule11_routes_that_most_calls_leave_are_given_up(trips, monkeypatch):
    monkeypatch.setattr(routes, "_MOST_LEFT", 4)
    check(sines, replayed(sines), [*range(1, 8), 3, 3])
    assert trips == [False] * 4


def test_rule11_surveys_in_vain_are_few(trips):
    def function(x: Tensor, turns: bool) -> Tensor:
        if turns:  # A view of memory from outside the region, which Python records.
            return x.as_strided((6, 4), (8, 1)).exp()
        return x.exp().sin()

    check(function, replayed(function), [False, True, *[False] * 9])
    assert trips == [False, *[True] * 6]


def test_rule11_tensors_at_other_places_among_the_arguments_are_another_route(trips):
    """Without their tensors, both calls of `clamp` have the same arguments."""

    def function(x: Tensor, low: bool, more: bool) -> Tensor:
        bound = x.detach() * 0.5
        y = torch.clamp(x, min=bound) if low else torch.clamp(x, max=bound)
        y = y.exp().sin() if more else y.exp()
        return y * y

    def both(call: Function) -> Function:
        return lambda x, ways: call(x, *ways)

    ways = [(1, 0), (0, 1), (1, 0), (1, 1), (0, 1), (0, 0), (0, 0), (1, 1)]
    check(both(function), both(replayed(function)), ways)
    assert trips[-2:] == [True, True]


@pytest.mark.parametrize("goes_on", [False, True])
def test_rule11_numbers_of_a_call_that_failed_are_forgotten(goes_on, trips):
    def function(x: Tensor, rows: int) -> Tensor:
        y = x.sin()
        try:
            z = y.view(rows, -1)
        except RuntimeError:
            z = y.view(2, -1) if goes_on else y.exp()
        return (z.exp() * z.flatten()[:6].cos().sum()).sum()

    check(function, replayed(function), [2, 2, 7, 2, 7, 3])
    assert trips == [True, goes_on, *[True] * 3]


class Large(Policy):
    """Keeps what has more elements than any tensor here."""

    reads_arguments = False

    def keeps(self, candidate: Candidate) -> bool:
        return candidate.output.numel() > 1000


def test_rule11_a_policy_that_sees_sizes_has_a_route_for_each_number(trips):
    def function(x: Tensor, factor: float) -> Tensor:
        return (x * factor).sin().exp()

    check(function, replayed(function, Large()), [0.5, 0.7, 0.5, 0.7, 0.5, 0.7])
    assert trips == [False, True, True, True, True]
