"""Calls that go different ways: where their routes part, they go on along another."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb
from membudget import policies
from membudget.engine.replay import routes
from membudget.engine.replay.routes import Routes
from tests.dropping import BATCH, Stack, staged_plan
from tests.engine.replay.followed import KEEPS, check, replayed
from tests.oracles import CountedOperators


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


def test_rule11_a_fork_holds_what_only_the_other_route_needs(trips):
    """Freed on the first route, a source is held as soon as a call takes the second."""

    def function(x: Tensor, multiplies: bool) -> Tensor:
        scale = x.detach() * 2
        y = x.exp() + scale.sin()
        return y * scale.cos() if multiplies else y.tanh()

    region = replayed(function)
    check(function, region, [False, False, True, False, True, True, False])
    assert trips == [True, False, *[True] * 4]


def test_rule11_what_only_the_first_route_needs_is_freed_at_a_fork(trips):
    freed: list[bool] = []

    def function(x: Tensor, multiplies: bool) -> Tensor:
        scale = (x.detach() * 2).sin()
        memory = StorageWeakRef(scale.untyped_storage())
        y = x.exp()
        y = y * scale if multiplies else y.tanh()
        del scale
        freed.append(memory.expired())
        return y.cos()

    region = replayed(function, policies.everything)
    check(function, region, [True, True, False, True, False])
    assert trips == [True, False, True, True]
    assert freed == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2


def test_rule11_the_routes_of_a_signature_are_few(trips, monkeypatch):
    monkeypatch.setattr(routes, "_MOST_ROUTES", 3)

    def function(x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = x.sin()
        return x.exp()

    region = replayed(function)
    check(function, region, [1, 2, 3, 1, 2, 3])
    assert trips == [False, False, True, True, True]
    trips.clear()
    check(function, region, [4, 1, 4])  # The route of one sine was the oldest.
    assert trips == [False, False, True]


def test_rule11_routes_that_most_calls_leave_are_given_up(trips, monkeypatch):
    monkeypatch.setattr(routes, "_MOST_LEFT", 4)

    def function(x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = x.sin()
        return x.exp()

    check(function, replayed(function), [*range(1, 8), 3, 3])
    assert trips == [False] * 4


def test_rule11_surveys_in_vain_are_few(trips):
    def function(x: Tensor, turns: bool) -> Tensor:
        if turns:  # A view of memory from outside the region, which Python records.
            return x.as_strided((6, 4), (8, 1)).exp()
        return x.exp().sin()

    check(function, replayed(function), [False, True, *[False] * 9])
    assert trips == [False, *[True] * 6]


def taken(model: Stack, seed: int) -> tuple[int, Counter[str]]:
    """Return the peak of a step, and the operators of its backward pass."""
    torch.manual_seed(seed)
    peak_bytes = mb.peak(lambda: model(BATCH).backward()).peak_bytes
    model.zero_grad()
    loss = model(BATCH)
    with CountedOperators() as operators:
        loss.backward()
    model.zero_grad()
    return peak_bytes, Counter(operators.counts)


@pytest.mark.parametrize("planned", [(), (1,), (0, 5, 8)])
def test_rule11_steps_that_drop_layers_take_no_more_on_routes_than_recorded(
    planned, trips, monkeypatch
):
    torch.manual_seed(0)
    model = Stack()
    plan, _ = staged_plan(model, frozenset(planned))
    steps = [(), (7,), (3, 4), (0, 2, 9, 11), (1,), (7,), (2,), ()]
    with monkeypatch.context() as recorded:
        recorded.setattr(Routes, "survey", lambda routes: None)
        mb.apply(model, plan)
        expected = []
        for seed in range(2):  # The second time, no sequence is new.
            for dropped in steps:
                model.dropped = frozenset(dropped)
                expected.append(taken(model, seed))
    assert not trips
    mb.apply(model, plan)
    for seed in range(5):
        for dropped, (peak_bytes, operators) in zip(steps, expected[8:], strict=True):
            model.dropped = frozenset(dropped)
            trips.clear()
            found = taken(model, seed)
            if seed == 4:
                assert trips.count(False) <= 1, dropped
            if trips == [True, True]:
                assert found[1] == operators, dropped
                assert found[0] <= peak_bytes, dropped
