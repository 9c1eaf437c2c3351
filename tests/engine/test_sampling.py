"""Of calls that differ in sizes alone, some are verified, by both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine.controls import verification_postponed
from membudget.engine.sampling import Sampling
from tests.devices import array

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


def due(found: Sampling, signatures: Iterable[Any]) -> list[int]:
    """Count calls, and return the numbers of those that are due."""
    numbers = []
    for number, signature in enumerate(signatures, 1):
        found.count(signature)
        if found.is_due:
            numbers.append(number)
    return numbers


def test_the_first_second_fourth_and_eighth_size_are_due():
    assert due(Sampling(0.001), [5, 5, 6, 7, 7, 8, 9, 6, 10, 11, 12]) == [1, 3, 6, 11]


def test_a_share_of_all_calls_is_due():
    assert due(Sampling(0.25), [5] * 13) == [1, 4, 8, 12]
    assert due(Sampling(1.0), [5] * 3) == [1, 2, 3]


def test_at_most_eight_of_the_first_hundred_new_sizes_are_due():
    assert len(due(Sampling(0.01), range(100))) == 8


def test_nothing_is_counted_while_verification_is_postponed():
    found = Sampling(0.5)
    with verification_postponed():
        assert due(found, [5, 5, 5]) == []
    assert due(found, [5, 5]) == [1, 2]


def test_no_more_sizes_are_known_than_a_bound():
    found = Sampling(0.0001)
    assert due(found, range(9000))[-1] == 4096


def hidden(writes: Callable[[int], bool]) -> Callable[[Tensor], Tensor]:
    """Return a function whose bits depend on how often it ran, for some sizes."""
    calls = [0]

    def function(x: Tensor) -> Tensor:
        inner = x.sin()
        if writes(len(x)):
            calls[0] += 1
            array(inner.detach())[0] += calls[0]
        return inner.exp().tanh()

    return function


def mismatches(region: Callable[[Tensor], Tensor], lengths: Iterable[int]) -> list[int]:
    """Run steps; return the numbers of those whose gradients are known to be wrong."""
    wrong = []
    for number, length in enumerate(lengths, 1):
        x = torch.ones(length, requires_grad=True)
        try:
            region(x).sum().backward()
        except mb.RecomputeMismatchError:
            wrong.append(number)
    return wrong


@ENGINES
def test_of_new_sizes_the_first_second_and_fourth_are_compared(engine):
    """Sizes 2 and 3 are known when the fourth comes, which is the first to be wrong."""
    function = hidden(lambda length: length >= 4)
    region = mb.checkpoint(engine=engine, verify=0.001)(function)
    assert mismatches(region, [2, 2, 3, 2, 4, 5])[0] == 6


@ENGINES
def test_a_share_of_all_calls_is_compared(engine):
    begun: list[Tensor] = []
    function = hidden(lambda length: len(begun) > 3)

    def counted(x: Tensor) -> Tensor:
        begun.append(x)
        return function(x)

    region = mb.checkpoint(engine=engine, verify=0.2)(counted)
    wrong = mismatches(region, [3] * 10)
    assert wrong[0] in (4, 5)


def test_a_replayed_output_that_is_not_reproducible_is_kept_for_all_sizes():
    function = hidden(lambda length: True)
    region = mb.checkpoint(engine="replay", verify=0.001)(function)
    assert mismatches(region, [3, 3, 4, 5, 6]) == [1]


@pytest.mark.parametrize(("engine", "at"), [("replay", 4), ("rerun", 5)])
def test_a_new_path_is_verified_whatever_its_size(engine, at):
    """A replay notices the new path in the call, a rerun after it."""
    function = hidden(lambda length: length == 4)

    def branching(x: Tensor) -> Tensor:
        return function(x) if len(x) < 4 else function(x).cos()

    region = mb.checkpoint(engine=engine, verify=0.0001)(branching)
    assert mismatches(region, [2, 2, 3, 4, 4])[0] == at


@ENGINES
@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, "sometimes"])
def test_a_share_that_is_none_is_refused(engine, share):
    with pytest.raises(mb.OptionError, match="or a share of all calls"):
        mb.checkpoint(engine=engine, verify=share)
