"""Of calls that differ in sizes alone, some are verified, by both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine.calls import calls_of
from membudget.engine.comparison import metadata
from membudget.engine.controls import verification_postponed
from membudget.engine.replay import verified
from membudget.engine.replay.checks import Checks
from membudget.engine.sampling import Sampling
from tests.devices import array

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


@pytest.fixture(autouse=True)
def nothing_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin with nothing verified."""
    verified.VERIFIED.clear()


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


def test_at_most_seven_choices_of_known_layers_are_due():
    found = verified.Verified(0.01)
    layers = "mm", "gelu", "mm", "add"
    due = 0
    for number in range(200):
        path = (number, *layers)
        due += found.spliced(path) is None
        found.add(path)
    assert due == 7


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


class Dropping:
    """A chain of four alike layers, of which some are dropped; one writes unseen."""

    def __init__(self, wrong: int = -1) -> None:
        self.dropped: set[int] = set()
        self._wrong = wrong
        self._writes = 0

    def __call__(self, x: Tensor) -> Tensor:
        for number in range(4):
            if number not in self.dropped:
                inner = x.sin()
                if number == self._wrong:
                    self._writes += 1
                    array(inner.detach())[0] += self._writes
                x = inner.exp().tanh().cos()
        return x.sqrt().sinh().sum()


def compared(layers: Dropping, verify: Any, choices: list[set[int]]) -> list[int]:
    """Run steps that drop layers; return the numbers of those that were verified."""
    region = mb.checkpoint(engine="replay", verify=verify)(layers)
    begun: list[set[int]] = []
    numbers = []
    real = Checks._verify_from_here

    def noted(checks: Checks, recorder: Any, by_fingerprints: bool) -> None:
        numbers.append(len(begun))
        real(checks, recorder, by_fingerprints)

    with patch.object(Checks, "_verify_from_here", noted):
        for layers.dropped in choices:
            begun.append(layers.dropped)
            region(torch.ones(3, requires_grad=True)).backward()
    return numbers


# They give three sequences of operators: the layers are alike.
CHOICES = [set[int](), {0}, {1, 2}, {3}, {2, 0}, set[int]()]


def test_of_new_choices_of_layers_the_first_second_and_fourth_are_compared():
    assert compared(Dropping(), 0.0001, CHOICES) == [1, 2]
    assert compared(Dropping(), 0.0001, [{0, 1, 2}]) == [1]


def test_without_a_share_each_new_choice_of_layers_is_compared():
    assert compared(Dropping(), "fingerprints", CHOICES) == [1, 2, 3]


def test_a_rerun_waits_for_the_second_path_and_not_for_the_third():
    function, x = torch.sin, torch.ones(1)
    paths = [[metadata(x.double())], [metadata(x)], [metadata(x[None])]]
    calls = calls_of(function, (x,), {}, 0.0001)
    for path in paths[:2]:
        assert calls.begin(False) or path is paths[1]
        assert calls.end(path)
        assert calls.begin(False)
        calls.verified(path)
    assert calls.end(paths[2])
    assert not calls_of(function, (x,), {}, 0.0001).begin(False)


def test_where_an_output_is_unrepeatable_each_new_choice_of_layers_is_compared():
    layers = Dropping(wrong=3)
    region = mb.checkpoint(engine="replay", verify=0.0001)(layers)
    wrong = []
    for number, layers.dropped in enumerate([set[int](), {0}, {0, 1}, {0, 1, 2}]):
        try:
            region(torch.ones(3, requires_grad=True)).backward()
        except mb.RecomputeMismatchError:
            wrong.append(number)
    assert wrong == [0, 1, 2, 3]
