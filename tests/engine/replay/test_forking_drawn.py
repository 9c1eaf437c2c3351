"""Drawn functions of views and writes, whose calls take some of several detours.

As in `test_turning.py`, but calls go many ways, and with tensors of several sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine.replay import following
from tests.engine.replay import test_turning
from tests.engine.replay.test_turning import KEEPS, LATEST, Operators, Statement

CALLS, DETOURS = 14, 3

# Without their tensors, calls of one operator are alike.
PLACES: Operators = [
    lambda t: torch.clamp(t, min=t * 0.5),
    lambda t: torch.clamp(t, max=t * 0.5),
    lambda t: torch.clamp(t, min=t * 0.5, max=t * 0.7),
    lambda t: torch.where(t > 0, t, t * 2),
    lambda t: torch.cat([t, t * 2], 1)[:, : t.shape[1]],
    lambda t: torch.cat([t, t, t.sin()], 1)[:, -t.shape[1] :],
    lambda t: failing(t).cos(),
]

Taken = tuple[bool, ...]
Drawn = Callable[[Tensor, Tensor, Taken], Tensor]


def failing(t: Tensor) -> Tensor:
    """Try an operator that raises for some sizes."""
    try:
        return t.unflatten(1, (3, -1)).flatten(1)
    except RuntimeError:
        return t.sin()


def drawn_statement(draw: random.Random) -> Statement:
    if draw.random() < 0.2:
        return Statement(draw.choice(PLACES), draw.randrange(LATEST))
    return test_turning.drawn_statement(draw)


def drawn_function(draw: random.Random) -> Drawn:
    """Return a function that runs more statements at places that a call is told."""
    statements = [drawn_statement(draw) for _ in range(draw.randint(4, 12))]
    detours: dict[int, list[tuple[int, list[Statement]]]] = {}
    for number in range(DETOURS):
        more = [drawn_statement(draw) for _ in range(draw.randint(1, 3))]
        at = draw.randrange(len(statements))
        detours.setdefault(at, []).append((number, more))
    forgets = draw.random() < 0.5

    def function(x: Tensor, buffer: Tensor, taken: Taken) -> Tensor:
        y, tensors = x.exp(), [buffer * 0.7, buffer]
        for at, statement in enumerate(statements):
            ways = [more for number, more in detours.get(at, ()) if taken[number]]
            for each in [*(s for more in ways for s in more), statement]:
                y = each.run(y, tensors)
                if forgets:
                    del tensors[:-LATEST]
        return (y * tensors[-1].sum()).cos().sum()

    return function


def outcome_of(function: Drawn, seed: int, rows: int, taken: Taken) -> list[Tensor]:
    """Return the loss, the gradient and the buffer."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x = torch.randn(5, generator=generator).requires_grad_()
    buffer = torch.randn(rows, 6, generator=generator)
    loss = function(x, buffer, taken)
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, buffer]


def check_drawn(seed: int, keep: str) -> None:
    """Compare calls of a drawn function with the same function as a region."""
    following._UNVERIFIED.clear()
    draw = random.Random(seed)
    function = drawn_function(draw)
    options = {"verify": draw.choice([False, True, 0.01]), "keep": KEEPS[keep]}
    region = mb.checkpoint(engine="replay", **options)(function)
    odds = draw.choice([0.2, 0.5])
    rows = draw.choice([(4,), (4, 5)])
    for call in range(CALLS):
        taken = tuple(call > 1 and draw.random() < odds for _ in range(DETOURS))
        given = call, draw.choice(rows), taken
        pairs = zip(
            outcome_of(function, *given), outcome_of(region, *given), strict=True
        )
        assert all(torch.equal(one, other) for one, other in pairs), given


@pytest.mark.parametrize("keep", KEEPS)
# Calls of the last one leave their route while a view of what is gone lives (Rule 4).
@pytest.mark.parametrize("seed", [*range(40), 402])
def test_rule11_calls_that_go_many_ways_are_bit_for_bit_as_plain(seed, keep):
    check_drawn(seed, keep)
