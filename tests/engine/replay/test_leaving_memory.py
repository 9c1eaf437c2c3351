"""Calls that leave a route: what they have overwritten, and what shares memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from membudget import policies
from membudget.errors import ChangedSinceForwardError
from tests.engine.replay.followed import (
    Function,
    check,
    gradient_of,
    input_of,
    replayed,
    unpacked,
    with_given,
)


def test_rule4_a_call_that_leaves_its_route_reads_around_what_it_wrote(trips):
    def function(x: Tensor, reads_all: bool) -> Tensor:
        sums = x @ x.t()
        left = sums[:, :3].mul_(2)
        return (sums.sin() if reads_all else left.t().sin()).exp()

    check(function, replayed(function), [False, False, True, False, True])
    assert trips == [True, False, True, True]


def overwrites_product(x: Tensor, given: list[Tensor]) -> Tensor:
    return (given.pop() * 2).add_(1)


def overwrites_buffer(x: Tensor, given: list[Tensor]) -> Tensor:
    product = given[0] * 2
    given[0].add_(1)
    return product


def overwrites_statistics(x: Tensor, given: list[Tensor]) -> Tensor:
    product = given[0] * 2
    F.batch_norm(x.detach(), given[0], given[1], training=True)
    return product


@pytest.mark.parametrize(
    "product_of", [overwrites_product, overwrites_buffer, overwrites_statistics]
)
def test_rule4_a_call_that_leaves_its_route_needs_what_was_overwritten(
    product_of, trips
):
    """No replay of the route reads the product, so that nothing of it is held."""
    weight = input_of(0)[:, :6]

    def function(x: Tensor, multiplies: bool, given: list[Tensor]) -> Tensor:
        product = product_of(x, given)
        y = (weight @ (x + product)).sin()
        return y * product if multiplies else y + product

    region = with_given(replayed(function, policies.matmuls))
    check(with_given(function), region, [False, False, True, False, True])
    assert trips == [True, False, True, False]


@pytest.mark.parametrize("is_view", [False, True])
def test_rule6_a_call_that_has_left_its_route_copies_what_it_overwrites(is_view, trips):
    def function(x: Tensor, overwrites: bool, given: list[Tensor]) -> Tensor:
        buffer = given[0].view(2, 4) if is_view else given[0]
        y = x * buffer.exp().sum()
        if overwrites:
            buffer.mul_(2)
        return y.sin() * buffer.sum()

    region = with_given(replayed(function))
    check(with_given(function), region, [False, False, True, *[False] * 4, True])
    # The rest of the 3rd is surveyed in vain, as are three more.
    assert trips == [True, False, True, False]


def reads_what_it_made(x: Tensor, given: Tensor | None) -> Tensor:
    h = x * 2
    product = (h if given is None else given).detach() * 3
    z = x * product
    return z + h.mul_(5)


def reads_what_it_overwrites(x: Tensor, given: Tensor, buffer: Tensor) -> Tensor:
    y = x * (given * 2)
    buffer.add_(1)
    return y + x * (given * 3)


def normalises_by_what_it_reads(x: Tensor, given: Tensor, mean: Tensor) -> Tensor:
    y = x * (given * 2)
    return F.batch_norm(y, mean, torch.ones(8), training=True) + x * (given * 3)


@pytest.mark.parametrize(
    ("function", "apart", "aliased"),
    [
        (reads_what_it_made, lambda: (input_of(9),), lambda: (None,)),
        *(
            (
                function,
                lambda: (torch.ones(8), torch.ones(8)),
                lambda: (torch.ones(8),) * 2,
            )
            for function in (reads_what_it_overwrites, normalises_by_what_it_reads)
        ),
    ],
)
def test_rule11_a_call_whose_tensors_share_memory_otherwise_leaves_the_route(
    function, apart, aliased, trips
):
    region = unpacked(replayed(function))
    check(unpacked(function), region, [apart, apart, aliased, aliased, apart])
    assert trips == [True, False, *trips[2:]]


def test_rule6_a_call_that_reads_a_buffer_after_its_update_leaves_the_route(trips):
    buffers: dict[str, Tensor] = {}

    def function(x: Tensor, given: Tensor | None) -> Tensor:
        buffer = buffers["own"].add_(1)
        return x * ((buffer if given is None else given) * 2)

    def gradients(function: Function) -> list[Tensor]:
        """Backward passes run in the end, after all updates."""
        buffers["own"] = torch.ones(8)
        inputs = [input_of(seed).requires_grad_() for seed in range(4)]
        outputs = [function(x, torch.ones(8)) for x in inputs[:2]]
        outputs += [function(x, None) for x in inputs[2:]]
        return list(torch.autograd.grad([y.sum() for y in outputs], inputs))

    for one, other in zip(
        gradients(function), gradients(replayed(function)), strict=True
    ):
        assert torch.equal(one, other)
    assert trips == [True, False]


def exchanged(x: Tensor, given: Tensor, new: Tensor | None) -> Tensor:
    y = x * (given * 2)
    if new is not None:
        given.data = new
    return y + x * (given * 3)


def made_exchanged(x: Tensor, given: Tensor, new: Tensor | None) -> Tensor:
    h = given * 2
    y = x * h.sin()
    if new is not None:
        h.data = new
    return y + x * (h * 3).cos()


@pytest.mark.parametrize("function", [exchanged, made_exchanged])
def test_rule11_a_call_that_exchanges_memory_leaves_the_route(function, trips):
    def same() -> tuple[Any, ...]:
        return input_of(7), None

    def other() -> tuple[Any, ...]:
        return input_of(7), input_of(8)

    region = unpacked(replayed(function))
    check(unpacked(function), region, [same, same, other, same, other])
    assert trips == [True, False, True, True]


def test_rule5_a_parameter_exchanged_before_its_call_leaves_the_route_is_named(trips):
    parameter, region = nn.Parameter(input_of(7)), replayed(exchanged)
    for seed in range(2):
        gradient_of(region, seed, parameter, None)
    with pytest.raises(ChangedSinceForwardError, match="argument 2 was changed"):
        gradient_of(region, 2, parameter, input_of(8))


@pytest.mark.parametrize("keep", [policies.nothing, policies.everything])
def test_rule6_what_an_alias_overwrites_after_its_tensor_died_is_copied(keep, trips):
    """No operator that can be observed makes an alias, and none sees it die."""

    def function(x: Tensor, overwrites: bool, given: list[Tensor]) -> Tensor:
        buffer = given[0]
        product = buffer.detach() * 2
        h = (buffer + 1) * product
        alias = h.detach()
        y = (x * h.exp()).sin()
        del h
        if overwrites:
            buffer.add_(1)
            alias.mul_(0.5)
        return y.cos() * x

    region = with_given(replayed(function, keep))
    check(with_given(function), region, [False, False, True, False, True])
    assert trips == [True, False, True, True]
