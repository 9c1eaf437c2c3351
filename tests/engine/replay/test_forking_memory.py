"""What calls hold, free and overwrite where they go on along another route."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb
from membudget import policies
from membudget.engine.replay.routes import Routes
from tests.dropping import BATCH, Stack, staged_plan
from tests.engine.replay.followed import (
    Function,
    Staged,
    check,
    input_of,
    replayed,
    with_given,
)
from tests.engine.replay.test_forking import Large
from tests.oracles import CountedOperators


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


def test_rule11_memory_has_the_size_of_its_own_call_after_a_fork(trips):
    def function(x: Tensor, count: int) -> Tensor:
        y = x.sin()
        made = torch.empty(count)
        made.fill_(2.0)
        return (y * made.sum()).exp() + y.exp() * made.sum()

    check(function, replayed(function, Large()), [3, 5, 3, 5, 5, 3, 5, 3, 5])
    assert trips[-3:] == [True] * 3


def test_rule5_a_parameter_that_is_held_at_a_fork_is_read_as_it_is_then(trips):
    """Autograd reads what `.data =` puts into a parameter: so does a replay."""
    weight = nn.Parameter(torch.ones(8))

    def function(x: Tensor, multiplies: bool) -> Tensor:
        y = x.exp() + weight.detach() + (weight + 1)
        return y * weight if multiplies else y.tanh()

    def gradients(call: Function) -> list[Tensor]:
        found: list[Tensor] = []
        for seed, multiplies in enumerate([False, False, True, True, False, True]):
            x = input_of(seed).requires_grad_()
            weight.data = torch.ones(8)
            loss = call(x, multiplies).sum()
            weight.data = torch.full((8,), 3.0)
            found += torch.autograd.grad(loss, x)
        return found

    region = replayed(function, policies.everything)
    assert all(map(torch.equal, gradients(region), gradients(function)))
    assert trips == [True, False, True, True, True]


def test_rule11_what_a_call_overwrites_dies_with_its_last_tensor(trips):
    freed: list[bool] = []

    def function(x: Tensor, given: list[Tensor]) -> Tensor:
        other = given.pop().mul(1)
        memory = StorageWeakRef(other.untyped_storage())
        y = x + other
        other.mul_(2)
        del other
        y = y.exp()
        freed.append(memory.expired())
        return y.sin()

    region = with_given(replayed(lambda x, _, given: function(x, given)))
    check(with_given(lambda x, _, given: function(x, given)), region, [None] * 4)
    assert freed == [True] * 8
    assert trips == [True] * 3


@pytest.mark.parametrize("through_view", [False, True])
def test_rule6_a_buffer_that_a_call_overwrote_before_it_left_is_copied(
    through_view, trips
):
    """The next call overwrites it before the backward pass of this one."""
    buffers: dict[str, Tensor] = {}

    def function(x: Tensor, reads: bool) -> Tensor:
        buffer = buffers["own"]
        y = x + buffer
        (buffer[:4] if through_view else buffer).add_(1)
        y = y.sin()
        return y * (buffer * 2).exp() if reads else y.exp()

    def gradients(call: Function) -> list[Tensor]:
        buffers["own"] = torch.ones(8)
        inputs = [input_of(seed).requires_grad_() for seed in range(5)]
        turns = False, False, True, True, False
        outputs = [call(x, turn) for x, turn in zip(inputs, turns, strict=True)]
        return list(torch.autograd.grad([y.sum() for y in outputs], inputs))

    assert all(map(torch.equal, gradients(replayed(function)), gradients(function)))
    assert trips == [True, False, *trips[2:]]


def test_rule11_a_stage_on_a_route_retains_nothing_that_is_not_needed(trips):
    """The second part of each split is used by nobody."""
    keep = Staged(*({(n, 1) for n in range(1, 40)} for _ in range(20)))

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        for _ in range(4):
            y = torch.cat([y, y.exp()], 1).split(8, 1)[0].tanh()
        return (y * y).cos().sum()

    region = replayed(function, keep)
    peaks = []
    for _ in range(3):
        x = torch.randn(64, 8).requires_grad_()
        x.grad = torch.zeros_like(x)
        loss = region(x)
        peaks.append(mb.peak(loss.backward).peak_bytes)
        del loss
    assert trips == [True, True]
    assert peaks[1:] == peaks[:1] * 2


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
