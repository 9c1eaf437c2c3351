"""Loops over sequences of several lengths: calls have their own numbers (Rule 11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from membudget.engine.candidate import Candidate
from membudget.engine.policy import Policy
from tests.engine.replay.followed import KEEPS, replayed


def check_lengths(function: Any, region: Any, lengths: list[int]) -> None:
    for seed, length in enumerate(lengths):
        torch.manual_seed(seed)
        x = torch.randn(length, 8, requires_grad=True)
        torch.manual_seed(seed)
        (gradient,) = torch.autograd.grad(region(x, None), x)
        torch.manual_seed(seed)
        (plain,) = torch.autograd.grad(function(x, None), x)
        assert torch.equal(gradient, plain), seed


def viewed(x: Tensor, _: Any) -> Tensor:
    """Name sizes and dimensions in arguments, also of memory and of constants."""
    length = x.shape[0]
    h = x.view(length // 2, -1).sin() * x.new_zeros(length // 2, 1).add_(length)
    h = h.expand(3, -1, -1).transpose(0, length % 4).sum(0).reshape(-1).exp()
    return torch.cat([h, torch.full_like(h, 1 / length)]).split(h.numel() - 1)[0].sum()


def drawn(x: Tensor, _: Any) -> Tensor:
    """Draw and overwrite what has a size of its own."""
    mask = torch.empty_like(x[::2]).bernoulli_(0.5)
    h = x[: len(mask)] * mask.div_(len(mask))
    return (h.mul_(2).cos() * mask).exp().sum()


LENGTHS = [4, 4, 6, 4, 8, 6, 10, 2, 4]


@pytest.mark.parametrize("function", [viewed, drawn])
@pytest.mark.parametrize("keep", KEEPS)
def test_rule11_calls_of_other_lengths_follow_a_route_with_their_numbers(
    function, keep, trips
):
    check_lengths(function, replayed(function, KEEPS[keep]), LENGTHS)
    draws_on_device = function is drawn and torch.get_default_device().type != "cpu"
    assert trips == [True] * (0 if draws_on_device else 8)


def test_rule11_verified_calls_of_other_lengths_follow_a_route(trips):
    check_lengths(viewed, replayed(viewed, verify=0.01), [4, 6, *LENGTHS])
    # The first and second length are verified; the 4th and 8th call are sampled.
    assert trips == [True] * len(trips)
    assert len(trips) >= 5


def test_rule11_lengths_of_what_is_overwritten_in_parts_have_routes_of_their_own(trips):
    def function(x: Tensor, _: Any) -> Tensor:
        sums = x @ x.t()
        sums[:, :1].mul_(2)
        return sums.sin().sum()

    region = replayed(function)
    check_lengths(function, region, [4, 4, 6, 6, 4, 6, 6, 4])
    assert trips == [True, False, True, True, True, True]


class Long(Policy):
    """Keeps what has more than 32 elements."""

    reads_arguments = False

    def __init__(self) -> None:
        self.kept: list[int] = []

    def keeps(self, candidate: Candidate) -> bool:
        count = candidate.output.numel()
        self.kept += [count] * (count > 32)
        return count > 32


def test_rule11_a_policy_that_sees_sizes_is_asked_about_each_length(trips):
    def function(x: Tensor, _: Any) -> Tensor:
        return (x.sin().cos() * 2).exp().sum()

    policy = Long()
    check_lengths(function, replayed(function, policy), [4, 4, 6, 6, 4, 6])
    assert trips == [True, False, True, True, True]
    assert policy.kept == [48] * 4  # In the 3rd call, whose route is then known.


def test_rule11_another_dtype_or_device_in_an_argument_leaves_the_route(trips):
    def function(x: Tensor, dtype: torch.dtype) -> Tensor:
        return (x.to(dtype).exp() * x).sum()

    region = replayed(function)
    for dtype in (torch.float64, torch.float64, torch.float16, torch.float64):
        x = torch.randn(3, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(region(x, dtype), x)
        assert torch.equal(gradient, torch.autograd.grad(function(x, dtype), x)[0])
    assert trips == [True, False, True]
