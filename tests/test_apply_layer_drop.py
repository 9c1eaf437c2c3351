"""Layers that are dropped at random, in a whole model that goes back by stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.dropping import BATCH, LAYERS, Stack, staged_plan
from tests.oracles import CountedOperators


def outcome(model: Stack, seed: int) -> list[Tensor | None]:
    """Return the loss, the gradients and the random stream of a step."""
    torch.manual_seed(seed)
    loss = model(BATCH)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [loss.detach(), torch.get_rng_state(), *gradients]


def are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def recomputed_exponentials(model: Stack) -> int:
    """Return how often a backward pass computes what each layer's forward does once."""
    torch.manual_seed(0)
    loss = model(BATCH)
    with CountedOperators() as operators:
        loss.backward()
    model.zero_grad()
    return operators.counts["exp"]


@pytest.mark.parametrize("planned", [(), (1,), (0, 5, 8)])
@pytest.mark.parametrize("dropped", [(), (0,), (7,), (11,), (3, 4), (0, 2, 9, 11)])
def test_other_layers_than_planned_do_not_make_each_stage_begin_anew(planned, dropped):
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    plan, recomputed = staged_plan(model, frozenset(planned))
    mb.apply(model, plan)
    model.dropped = frozenset(planned)
    as_planned = recomputed_exponentials(model)
    assert 0 < as_planned < recomputed
    for step in range(3):  # Known sequences of operators as well as new ones.
        plain.dropped = model.dropped = frozenset(dropped)
        assert all(map(are_equal, outcome(plain, step), outcome(model, step)))
    # What leads to a layer that the plan does not know is recomputed another time.
    ran = LAYERS - len(dropped)
    unknown = max(0, len(planned) - len(dropped))
    assert recomputed_exponentials(model) <= as_planned + ran + unknown
