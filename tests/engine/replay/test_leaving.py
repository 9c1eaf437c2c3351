"""Calls that leave the route of an earlier call (Rule 11)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import membudget as mb
from membudget import policies
from membudget.engine.replay.routes import Routes
from tests.engine.replay.followed import (
    KEEPS,
    check,
    gradient_of,
    input_of,
    replayed,
)
from tests.oracles import CountedOperators


def test_rule11_a_route_is_left_where_running_statistics_have_another_size(trips):
    norms = {n: nn.BatchNorm1d(n) for n in (8, 4)}

    def function(x: Tensor, features: int) -> Tensor:
        return norms[features](x.unflatten(1, (features, -1))).sin().exp()

    check(function, replayed(function), [8, 8, 4, 8, 4])
    assert trips == [True, False, True, True]


def turning(x: Tensor, turn: Any) -> Tensor:
    """Take another turn on the way if asked to, and then go on as before."""
    h = (x * 2).sin()
    if callable(turn):
        h = turn(h)
    return (h + x).cos() * x.exp()


# Each leaves the route of the others in another way.
TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "another operator": torch.tanh,
    "another number": lambda h: h * 3,
    "a view": lambda h: h.flatten().view(6, 8),
    "a write": lambda h: h.mul_(2),
    "a write to a view": lambda h: (h[0].mul_(2), h)[1],
    "no gradient": lambda h: h.detach() * 2,
    "operators that Python records": lambda h: torch.frac(h).clamp_(0.1).sort(1)[0],
    "a tensor of its own": lambda h: h + torch.ones(6, 8),
    "the number of another dtype": lambda h: (h.double() * 2).float(),
    "random numbers": lambda h: F.dropout(h, 0.5),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("keep", KEEPS)
def test_rule11_a_call_that_leaves_its_route_is_recorded_from_its_start(
    turn, keep, trips
):
    arguments = [None, None, TURNS[turn], None, TURNS[turn], TURNS[turn], None]
    check(turning, replayed(turning, KEEPS[keep]), arguments)
    assert trips[0] is True
    assert False in trips


def test_rule7_a_choice_made_of_numbers_leaves_the_route_of_one_made_of_integers(trips):
    def function(x: Tensor, scores: Tensor) -> Tensor:
        return torch.where(scores > 0, x.sin(), x * 2) * x

    region, counts = replayed(function), []
    for dtype in (torch.int64, torch.int64, torch.float32):
        y = region(input_of(1).requires_grad_(), input_of(2).to(dtype))
        with CountedOperators() as counted:
            y.sum().backward()
        counts.append(counted.counts["gt"])
    assert counts == [1, 1, 0]
    assert trips == [True, False]


def test_rule11_a_call_that_leaves_its_route_holds_nothing_for_it(trips):
    alive: list[bool] = []

    def function(x: Tensor, turns: bool) -> Tensor:
        y = x.relu()
        made = StorageWeakRef(y.untyped_storage())
        z = y.tanh() if turns else y.sin()
        del y
        alive.append(not made.expired())
        return z * 2

    region = replayed(function)
    for seed, turns in enumerate([False, False, True]):
        gradient_of(region, seed, turns)
    assert trips == [True, False]
    assert alive == [False] * 3


@pytest.mark.parametrize("turn", TURNS)
def test_rule11_a_verified_call_that_leaves_its_route_is_verified_from_there(
    turn, trips
):
    arguments: list[Any] = [None] * 6 + [TURNS[turn]] + [None] * 3 + [TURNS[turn]]
    check(turning, replayed(turning, verify=True), arguments)
    assert True in trips


def test_rule11_a_tensor_that_is_kept_by_its_name_leaves_the_route(trips):
    def function(x: Tensor, is_named: bool) -> Tensor:
        h = x.sin().exp()
        return (mb.name(h, "h") if is_named else h).cos() * x

    region = replayed(function, policies.named("h"))
    check(function, region, [False, False, True, False])
    assert trips == [True, False]


def test_rule11_a_call_that_ends_on_its_way_leaves_the_route(trips):
    def function(x: Tensor, goes_on: bool) -> Tensor:
        y = x.sin().exp()
        return (y.cos() * x) if goes_on else y

    check(function, replayed(function), [True, True, False, True, False])
    assert trips == [True, False, True, True]


def test_rule11_an_argument_that_is_another_tensor_leaves_the_route(trips):
    def function(x: Tensor, is_swapped: bool) -> Tensor:
        a, b = x.sin(), x.cos()
        return (b if is_swapped else a).exp() * b

    check(function, replayed(function), [False, False, True, True, False])
    assert trips == [True, False, True, True]


def test_rule11_a_tensor_that_autograd_saves_elsewhere_leaves_the_route(trips):
    """The mask needs no gradient in other calls, so that less is saved."""
    scale = torch.ones(8)

    def function(x: Tensor, trains: bool) -> Tensor:
        return (x.sin() * scale.requires_grad_(trains)).exp()

    check(function, replayed(function), [False, False, True, False, True])
    assert trips == [True, False, True, True]


def test_rule11_a_call_that_saves_nothing_holds_nothing_for_a_backward(trips):
    alive: list[bool] = []

    def function(x: Tensor, _: Any) -> Tensor:
        y = x.exp()
        made = StorageWeakRef(y.untyped_storage())
        y = y.sin().cos()
        alive.append(not made.expired())
        return y.tanh()

    region = replayed(function, policies.everything)
    for seed in range(2):
        gradient_of(region, seed, None)
    region(input_of(2), None)
    assert alive == [True, True, False]
    assert trips == [True, False]


def test_rule11_a_backward_inside_the_forward_leaves_the_route(trips):
    def function(x: Tensor, is_inside: bool) -> Tensor:
        y = x.sin().exp()
        if is_inside:
            (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return inner * y
        return y * 2

    check(function, replayed(function), [False, False, True, True, False])
    assert trips[:2] == [True, False]


def test_garbage_is_not_collected_while_a_call_that_leaves_its_route_is_recorded(
    trips, monkeypatch
):
    """It could free the graph of an earlier part, which the recording goes through."""
    collects: list[bool] = []
    survey = Routes.survey

    def noted(routes: Routes) -> Any:
        collects.append(gc.isenabled())
        return survey(routes)

    monkeypatch.setattr(Routes, "survey", noted)
    region = replayed(turning)
    check(turning, region, [None, None])
    before = len(collects)
    check(turning, region, [torch.tanh])
    assert (trips, collects[before:]) == ([True, False], [False])
    assert gc.isenabled()


# The backward of a call that has followed its route.
