"""Calls that follow a route on which they overwrite memory part by part (Rule 11)."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import membudget as mb
from membudget import policies
from tests.engine.replay.followed import (
    Staged,
    check,
    gradient_of,
    input_of,
    replayed,
)
from tests.engine.replay.test_shared_memory import (
    gates,
    parts_then_all,
    program,
    runge_kutta,
)
from tests.oracles import CountedOperators

torch.manual_seed(0)
LSTM, GRU = nn.LSTMCell(8, 6), nn.GRUCell(8, 6)


def lstm(x: Tensor) -> Tensor:
    state = None
    for place in range(3):
        state = LSTM(x * place, state)
    assert state is not None
    return state[0].exp()


def gru(x: Tensor) -> Tensor:
    state = None
    for place in range(3):
        state = GRU(x * place, state)
    assert state is not None
    return state.exp()


def square_gates(x: Tensor) -> Tensor:
    return gates(x @ x.t())


def square_parts(x: Tensor) -> Tensor:
    return parts_then_all(x @ x.t())


def shifted(x: Tensor) -> Tensor:
    """Fill a tensor place by place, and read all of it, as T5 does to its labels."""
    right = x.new_zeros(x.shape)
    right[:, 1:] = x[:, :-1].clone()
    right[:, 0] = 2
    right.masked_fill_(right < 0, 0.5)
    return (right * x).exp()


def outputs_of_a_loop(x: Tensor) -> Tensor:
    found, state = torch.empty(4, *x.shape), x
    for place in range(4):
        state = state.sin()
        found[place] = state
    return found.exp().sum(0) * state


def reads_between(x: Tensor) -> Tensor:
    """Save a part, and all, of what is overwritten next: a replay copies it."""
    made = x.detach() * 2
    part = made[2:4]
    read = x.exp() * made.sum()
    part.mul_(3)
    read = read.sin() * made[3:5].clone().sum()
    made[4].add_(made[0])
    return (read * made.sum()).cos() * part.sum()


def lent_between(x: Tensor) -> Tensor:
    """Save a part whose memory a replay reads after autograd has asked for it."""
    made = x.detach() * 2
    read = (x * made[3:].sin().sum()).sum()
    part = made[:3].mul_(3)
    return read + (x[:3] * part).sum()


FUNCTIONS = (
    *(gru, lent_between, lstm, outputs_of_a_loop, reads_between, runge_kutta),
    *(shifted, square_gates, square_parts),
)
KEEPS = {
    "nothing": policies.nothing,
    "some": policies.operators("addmm", "sigmoid_", "copy_", "mul_"),
    "everything": policies.everything,
    "nothing, in stages": Staged(*[set()] * 40),
    "retained": Staged(*({(n, 0) for n in range(1, 80, 3)} for _ in range(40))),
    "written": Staged(*({(n, 1) for n in range(1, 80, 2)} for _ in range(40))),
}


def is_followed(function: Callable[[Tensor], Tensor], keep: str) -> bool:
    """Return whether calls follow a route.

    Python looks at the views of what is kept and then overwritten in part.
    """
    if function is lent_between:
        return keep != "everything"
    keeps_parts = keep in ("some", "everything")
    return not (keeps_parts and function in (reads_between, runge_kutta))


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rule11_calls_that_overwrite_parts_follow_their_route(function, keep, trips):
    def region(x: Tensor, _: Any) -> Tensor:
        return called(x)

    called = replayed(function, KEEPS[keep])
    check(lambda x, _: function(x), region, [None] * 4)
    assert trips == [True] * (3 if is_followed(function, keep) else 0)


VIEWS = {"as_strided", "expand", "select", "slice", "squeeze", "t", "unsafe_split"}
VIEWS |= {"unsqueeze", "view"}


def replay_of(function: Callable[[Tensor], Tensor]) -> tuple[Counter[str], int]:
    """Return what a backward pass runs, without views, and the peak of its bytes."""
    x = input_of(0).requires_grad_()
    loss = function(x).sum()
    with CountedOperators() as operators:
        found = mb.peak(lambda: torch.autograd.grad(loss, x))
    counts = {n: count for n, count in operators.counts.items() if n not in VIEWS}
    return Counter(counts), found.peak_bytes


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rule4_a_replay_from_a_route_overwrites_what_one_from_a_tape_does(
    function, keep, trips
):
    region = replayed(function, KEEPS[keep])
    recorded, *others = (replay_of(region) for _ in range(3))
    assert trips == [True] * (2 if is_followed(function, keep) else 0)
    assert [operators for operators, _ in others] == [recorded[0]] * 2
    assert all(peak_bytes <= recorded[1] for _, peak_bytes in others)


@pytest.mark.parametrize("keep", ["nothing", "nothing, in stages", "retained"])
@pytest.mark.parametrize("seed", range(20))
def test_rule4_calls_that_follow_a_route_save_parts_as_they_were(seed, keep, trips):
    region = replayed(program(seed, clones=False), KEEPS[keep])
    with warnings.catch_warnings():
        # Plain autograd refuses parts that are written since they were saved.
        warnings.simplefilter("ignore", mb.OverwrittenWarning)
        for _ in range(3):
            x = input_of(0)[:, :6].requires_grad_()
            (expected,) = torch.autograd.grad(program(seed, clones=True)(x), x)
            (found,) = torch.autograd.grad(region(x), x)
            assert torch.equal(found, expected)
    assert trips == [True] * 2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rule11_a_call_that_overwrites_parts_leaves_its_route_anywhere(function, trips):
    """What it has written goes on the tape, from which the rest is recorded."""

    def leaves(x: Tensor, turn: int) -> Tensor:
        turns = random.Random(turn)

        class Turn(torch.overrides.TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if turn and turns.random() < 0.05:
                    (args[0] if isinstance(args[0], Tensor) else x).detach().cos()
                return func(*args, **(kwargs or {}))

        with Turn():
            return function(x)

    check(leaves, replayed(leaves, policies.matmuls), [0, 0, 3, 0, 4, 5, 0, 6])
    assert True in trips


def test_rule11_a_call_whose_memory_has_another_shape_leaves_its_route(trips):
    """Where the parts lie that it overwrites is part of the route."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        made = x @ weight
        made[:, :3].mul_(2)
        return made.sin().sum(1)

    wide, narrow = torch.ones(8, 8), torch.ones(8, 5)
    check(function, replayed(function), [wide, wide, narrow, narrow, wide, narrow])
    assert trips == [True, False, True, True]  # The 4th is surveyed from its start.


def test_rule11_a_part_that_is_read_by_another_tensor_is_no_other_part(trips):
    def function(x: Tensor, reads_last: bool) -> Tensor:
        made = x.sin()
        first, last = made[:2], made[-2:]
        made[2:4].mul_(2)
        return (last if reads_last else first).cos() * F.softmax(x[:2], 1)

    check(function, replayed(function), [False, False, True, False, True])
    assert trips == [True, False, True, True]


def test_a_replay_of_gates_from_a_route_copies_none_of_them(trips):
    region = replayed(square_gates)
    gradient_of(region, 0)
    x = input_of(1).requires_grad_()
    loss = region(x).sum()
    with CountedOperators() as operators:
        loss.backward()
    assert operators.counts["clone"] == 0
    assert trips == [True]


def test_a_call_that_overwrites_other_parts_copies_none_that_is_kept(trips):
    region = replayed(gates, policies.operators("sigmoid_"))
    for _ in range(2):
        x = torch.randn(600, 600, requires_grad=True)
        forward = mb.peak(partial(region, x))
        # The product, and the output, of a third of its size.
        assert forward.end_bytes < 1.4 * x.nbytes
        forward.result.sum().backward()
    assert trips == [True]
