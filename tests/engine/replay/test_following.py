"""Calls that follow the route of an earlier call (Rule 11)."""

from __future__ import annotations

import copy
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import membudget as mb
from membudget import policies
from membudget.errors import ChangedSinceForwardError
from tests.engine.replay.followed import (
    KEEPS,
    Function,
    check,
    gradient_of,
    input_of,
    replayed,
)
from tests.oracles import CountedOperators


class Layers(nn.Module):
    """What the routes of real models have: views, dropout, BatchNorm and writes.

    The draws of a device are recorded in Python, so there is no dropout there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).relu_()
        h = h.unflatten(1, (4, 4)).transpose(1, 2).flatten(1)
        if h.is_cpu:
            h = F.dropout(h, 0.3)
        return x + self.second(h).tanh()


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("verify", [False, True])
def test_rule11_calls_that_follow_a_route_are_bit_for_bit_as_plain(keep, verify, trips):
    torch.manual_seed(0)
    plain = Layers()
    region = copy.deepcopy(plain)
    called = replayed(region, KEEPS[keep], verify=verify)
    for seed in range(9):
        expected = gradient_of(plain, seed)
        assert torch.equal(gradient_of(called, seed), expected)
        for one, other in zip(plain.parameters(), region.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffer, region.get_buffer(name))
    # Of the verified, the 1st is compared, and the 2nd, 4th and 8th are sampled.
    assert trips == [True] * (5 if verify else 8)


def test_rule6_a_buffer_that_calls_on_a_route_read_and_write_is_copied(trips):
    def stepped(function: Function) -> list[Tensor]:
        state = torch.ones(8)
        return [
            *(gradient_of(lambda x: function(x, state), seed) for seed in range(4)),
            state,
        ]

    def function(x: Tensor, state: Tensor) -> Tensor:
        y = (x + state).sin()
        state.add_(1)
        return y * x

    found = stepped(replayed(function))
    assert all(map(torch.equal, found, stepped(function)))
    assert trips == [True] * 3


def test_rule11_another_function_with_the_same_code_follows_the_route(trips):
    layers = [nn.Linear(8, 8) for _ in range(3)]
    for layer in layers:

        def block(x: Tensor, layer: nn.Module = layer) -> Tensor:
            return layer(x).sin().cos()

        check(lambda x, _, b=block: b(x), replayed(lambda x, _, b=block: b(x)), [0])
    assert trips == [True, True]


def added_to_view(x: Tensor) -> Tensor:
    """As a linear layer adds its bias where its input is no contiguous matrix."""
    h = (x.t() @ x).view(2, 4, 8).add_(x[0])
    return h.transpose(0, 1).sin()


def written_in_turn(x: Tensor) -> Tensor:
    """As a GRU cell writes its gates, part by part."""
    gates = x @ x.t()
    left, right = gates[:, :3], gates[:, 3:]
    left.add_(1)
    right.mul_(2)
    left.neg_()
    return right.exp() * left


def written_to_part_alone(x: Tensor) -> Tensor:
    return (x @ x.t())[:, 1:].mul_(2).t().add_(1).sin().exp()


def written_to_one_of_two(x: Tensor) -> Tensor:
    """Another part is read after the write, so that there is no route."""
    sums = x @ x.t()
    left, right = sums[:, :3], sums[:, 3:]
    return left.mul_(2) * right.sin()


def put_at_indices(x: Tensor) -> Tensor:
    """As a mixture of experts puts together what they have made."""
    rows = torch.tensor([1, 3, 4])
    h = x * 2
    h[rows] = x[rows].sin()
    h[:, rows] += 1
    return h.index_put((rows,), x[:3], accumulate=True).exp()


WRITES = [added_to_view, written_in_turn, written_to_part_alone, written_to_one_of_two]


@pytest.mark.parametrize("function", WRITES)
@pytest.mark.parametrize("keep", KEEPS)
def test_rule4_writes_to_views_are_recorded_and_followed_in_cpp(
    function, keep, trips, seen
):
    def turning_at_the_end(x: Tensor, turns: bool) -> Tensor:
        y = function(x)
        return y.cos() if turns else y * 2

    region = replayed(turning_at_the_end, KEEPS[keep])
    check(turning_at_the_end, region, [False, False, True, False, True, True])
    assert not seen
    expected = [True, False, True, True, True]
    assert trips == (expected if function in WRITES[::2] else trips)


@pytest.mark.parametrize("keep", KEEPS)
def test_rule4_writes_at_indices_are_recorded_and_followed_in_cpp(keep, trips, seen):
    def function(x: Tensor, _: Any) -> Tensor:
        return put_at_indices(x)

    check(function, replayed(function, KEEPS[keep]), [None] * 4)
    assert trips == [True] * 3
    assert not seen


def copied_before(x: Tensor) -> Tensor:
    """As `silu_` has its input copied by autograd."""
    h = x * 2
    before = h.clone()
    h.sigmoid_()
    return before * h.sin()


def viewed_before(x: Tensor) -> Tensor:
    """The row is made again where it is asked for: after the write."""
    h = x @ x.t()
    row = h[0] * 2
    h.add_(1)
    return row.sin() * h.sin()


def overwritten_twice(x: Tensor) -> Tensor:
    h = x * 2
    before = h * 3
    h.mul_(2)
    between = h * 5
    h.sigmoid_()
    return before.sin() * between.cos() * h.tanh()


@pytest.mark.parametrize("function", [copied_before, viewed_before, overwritten_twice])
@pytest.mark.parametrize("keep", KEEPS)
def test_rule4_a_replay_copies_what_it_overwrites_and_needs(function, keep, trips):
    region = replayed(lambda x, _: function(x), KEEPS[keep])
    check(lambda x, _: function(x), region, [None] * 4)
    assert trips == [True] * 3


def test_rule11_constants_are_recorded_and_followed_in_cpp(trips, seen):
    def function(x: Tensor, like: Tensor) -> Tensor:
        zeros = x.new_zeros(8).add_(x.detach().sum(0))
        halves = torch.full_like(like, 0.5, dtype=torch.float64)
        return (x.sin() * zeros).exp() * halves.sum().float()

    one, other = torch.ones(6, 2), torch.ones(2, 3)
    check(function, replayed(function), [one, one + 1, other, one, other])
    assert trips == [True] * 4
    assert not seen


def test_rule11_what_a_call_kept_and_overwrote_is_freed_with_its_tensor(trips):
    alive: list[bool] = []

    def function(x: Tensor, _: Any) -> Tensor:
        h = x * 2
        made = StorageWeakRef(h.mul_(3).untyped_storage())
        x = x + h
        del h
        alive.append(not made.expired())
        return x.sin()

    region = replayed(function, policies.everything)
    for seed in range(3):
        gradient_of(region, seed, None)
    assert trips == [True, True]
    assert alive == [False] * 3


def test_rule11_signatures_whose_surveys_find_no_route_are_recorded(trips):
    def function(x: Tensor, _: Any) -> Tensor:
        # A view of memory from outside the region, which Python records.
        return x.as_strided((6, 4), (8, 1)).exp()

    check(function, replayed(function), [None] * 8)
    assert trips == []


def followed(
    function: Function, keep: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the input and the output of a call on a route."""
    region = replayed(function, keep, **options)
    for seed in range(2):
        x = input_of(seed).requires_grad_()
        y = region(x)
        if seed == 0:
            y.sum().backward()
    return x, y


def wave(x: Tensor) -> Tensor:
    """Take six operators, four of which save what they make or read."""
    return (x.sin().exp() * x.cos()).tanh() + x


def test_rule11_a_second_backward_replays_as_much_as_the_first(trips):
    x, y = followed(wave)
    with CountedOperators() as operators:
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        counted = dict(operators.counts)
        (second,) = torch.autograd.grad(y.sum(), x)
    assert trips == [True]
    assert counted["tanh"] == counted["exp"] == 1
    assert operators.counts["exp"] == 2
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(wave(x).sum(), x)[0])


def test_rule11_a_double_backward_is_as_plain(trips):
    def penalty(x: Tensor, y: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad((gradient**2).sum(), x)[0]

    x, y = followed(wave)
    assert torch.equal(penalty(x, y), penalty(x, wave(x)))


def test_rule11_an_execution_group_shares_what_is_recomputed(trips):
    x, y = followed(wave)
    with mb.execution_group(), CountedOperators() as operators:
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.sum(), x)
    assert operators.counts["exp"] == 1
    assert torch.equal(first, second)


def test_rule11_regions_are_recomputed_ahead(trips):
    region = replayed(wave)
    gradient_of(region, 0)
    x = input_of(1).requires_grad_()
    with mb.collect_regions() as regions:
        y = region(x)
    regions.recompute()
    with CountedOperators() as operators:
        (found,) = torch.autograd.grad(y.sum(), x)
    assert operators.counts["exp"] == 0
    assert torch.equal(found, torch.autograd.grad(wave(x).sum(), x)[0])


@pytest.mark.parametrize("exchanges", [False, True])
def test_rule5_a_source_that_changes_after_a_call_on_a_route_is_named(exchanges, trips):
    weight = torch.ones(8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return ((x * weight).sin() * x).exp()

    _, y = followed(function)
    with torch.no_grad():
        if exchanges:
            weight.data = weight.data + 1
        else:
            weight.add_(1)
    with pytest.raises(ChangedSinceForwardError, match="weight"):
        y.sum().backward()


def test_rule11_what_fails_while_it_is_recomputed_is_recomputed_again(trips):
    x, y = followed(wave)

    class Fails(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.exp.default:
                raise MemoryError("as an allocation that fails")
            return func(*args, **(kwargs or {}))

    with Fails(), pytest.raises(MemoryError, match="as an allocation"):
        y.sum().backward(retain_graph=True)
    x.grad = None
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(wave(x).sum(), x)[0])


def test_rule10_an_abandoned_call_on_a_route_frees_what_it_held(trips):

    held = []

    def function(x: Tensor, fails: bool) -> Tensor:
        y = x.sin()
        held.append(ref(y))
        y = y.exp()
        if fails:
            raise ValueError("as a user's error")
        return y * x

    region = replayed(function, policies.everything)
    gradient_of(region, 0, False)
    with pytest.raises(ValueError, match="user's error"):
        gradient_of(region, 1, True)
    assert held[-1]() is None
    assert torch.equal(gradient_of(region, 2, False), gradient_of(function, 2, False))
