"""Loops over sequences of several lengths: each length has a route (Rule 11)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from membudget.engine.replay import verified
from tests.engine.replay.followed import replayed


def test_rule11_calls_of_each_length_follow_a_route_of_their_own(trips):
    def function(x: Tensor, _: Any) -> Tensor:
        return (x.view(x.shape[0] // 2, -1).sin() * 2).exp().sum()

    region = replayed(function, verify=0.01)
    for step in range(12):
        x = torch.randn(2 + 2 * (step % 3), 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(region(x, None), x)
        (plain,) = torch.autograd.grad(function(x, None), x)
        assert torch.equal(gradient, plain)
    # The first and the second length are verified; then each is surveyed once, and the
    # 8th call is sampled.
    assert trips == [True] * 6


def test_rule11_routes_of_few_lengths_are_known_at_once(trips, monkeypatch):
    monkeypatch.setattr(verified, "_MOST_SIZES", 2)
    region = replayed(lambda x, _: x.sin().exp().sum(), verify=0.01)
    for _ in range(4):
        for length in (2, 3, 4):  # Each drops the oldest, which comes next.
            x = torch.randn(length, requires_grad=True)
            region(x, None).backward()
    assert trips == []
    for length in (3, 4) * 4:
        x = torch.randn(length, requires_grad=True)
        region(x, None).backward()
    assert trips == [True] * 7  # The 16th call is sampled.
