"""Row A7: Python state that a forward advances and nothing brings back."""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import RecomputeMismatchError
from tests.behaviours.steps import plain
from tests.oracles import CountedOperators

Draw = Callable[[], float]
Function = Callable[[Tensor], Tensor]


class Holder:
    """An object of the user's, with a count."""

    count = 0.0


def closure_list() -> Draw:
    grown: list[int] = []

    def draw() -> float:
        grown.append(1)
        return float(len(grown))

    return draw


def counter() -> Draw:
    count = 0.0

    def draw() -> float:
        nonlocal count
        count += 1.0
        return count

    return draw


def integer_counter() -> Draw:
    count = 0

    def draw() -> float:
        nonlocal count
        count += 1
        return float(count)

    return draw


def iterator() -> Draw:
    numbers = itertools.count(1)
    return lambda: float(next(numbers))


def short_iterator() -> Draw:
    numbers = iter([1.0])

    def draw() -> float:
        nonlocal numbers
        try:
            return next(numbers)
        except StopIteration:
            numbers = iter([2.0, 3.0, 4.0, 5.0])
            raise

    return draw


def thread_local() -> Draw:
    local = threading.local()
    local.count = 0.0

    def draw() -> float:
        local.count += 1.0
        return float(local.count)

    return draw


def environment() -> Draw:
    os.environ["MEMBUDGET_TEST_COUNT"] = "0"

    def draw() -> float:
        count = int(os.environ["MEMBUDGET_TEST_COUNT"]) + 1
        os.environ["MEMBUDGET_TEST_COUNT"] = str(count)
        return float(count)

    return draw


def config_dict() -> Draw:
    config = {"scale": 0.0}

    def draw() -> float:
        config["scale"] += 1.0
        return config["scale"]

    return draw


def object_attribute() -> Draw:
    holder = Holder()

    def draw() -> float:
        holder.count += 1.0
        return holder.count

    return draw


def class_attribute() -> Draw:
    def draw() -> float:
        Holder.count += 1.0
        return Holder.count

    return draw


def clock() -> Draw:
    # Two readings may be equal; then the recompute is right.
    return lambda: float(time.perf_counter_ns() % 1_000_003)


def operating_system() -> Draw:
    return lambda: float(int.from_bytes(os.urandom(2), "big") + 1)


def identifiers() -> Draw:
    return lambda: float(uuid.uuid4().int % 65_521 + 1)


def system_random() -> Draw:
    return random.SystemRandom().random


STATES: dict[str, Callable[[], Draw]] = {
    made.__name__: made
    for made in (
        *(closure_list, counter, integer_counter, iterator, short_iterator),
        *(thread_local, environment, config_dict, object_attribute, class_attribute),
        *(clock, operating_system, identifiers, system_random),
    )
}


def region_function(draw: Draw, drawn: list[float]) -> Function:
    """Return a function whose result hangs on what it draws; `drawn` tells what."""

    def function(x: Tensor) -> Tensor:
        drawn.append(draw())
        return (x * drawn[-1]).sin().exp()

    return function


def gradient(region: Callable[..., Any], function: Function) -> Tensor:
    x = torch.linspace(0.1, 1, 5, requires_grad=True)
    region(function, x).sum().backward()
    assert x.grad is not None
    return x.grad


def is_right_or_refused(
    region: Callable[..., Any], function: Function, drawn: list[float]
) -> bool:
    """Run a step, and tell whether it was right (and not refused)."""
    x = torch.linspace(0.1, 1, 5, requires_grad=True)
    y = region(function, x).sum()
    scale = drawn[-1]
    try:
        y.backward()
    except (RecomputeMismatchError, StopIteration):
        return False
    assert x.grad is not None
    expected = gradient(plain, lambda x: (x * scale).sin().exp())
    assert torch.equal(x.grad, expected)
    return True


@pytest.mark.parametrize("name", STATES)
def test_row_a07_the_first_step_is_right_or_refused_and_later_ones_are_right(name: str):
    drawn: list[float] = []
    function = region_function(STATES[name](), drawn)

    is_right_or_refused(mb.checkpoint, function, drawn)

    # A first step that was right by chance may be followed by one that is refused.
    results = [is_right_or_refused(mb.checkpoint, function, drawn) for _ in range(4)]
    assert results[-1]
    assert name == "clock" or all(results)


@pytest.mark.parametrize("name", ["counter", "config_dict", "identifiers"])
def test_row_a07_an_engine_that_was_chosen_stays_and_raises(name: str):
    drawn: list[float] = []
    function = region_function(STATES[name](), drawn)

    for _ in range(3):
        with pytest.raises(RecomputeMismatchError, match='engine="replay"'):
            gradient(functools.partial(mb.checkpoint, engine="rerun"), function)


class Counting(nn.Module):
    """Scales by a count in a config that the modules share."""

    def __init__(self, config: dict[str, float]) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        self.config["calls"] += 1
        return torch.tanh(self.inner(x) * self.config["calls"])


def test_row_a07_the_error_names_the_module_the_operator_the_cause_and_the_remedy():
    module = nn.Sequential(Counting({"calls": 0.0}))

    with pytest.raises(RecomputeMismatchError, match="run the step again") as caught:
        mb.checkpoint(module, torch.ones(2, 5)).sum().backward()

    error = caught.value
    assert error.module_path == "0"
    assert "tanh" in error.operator
    assert any("Python state" in cause for cause in error.causes)
    assert "replayed" in error.remedy


@pytest.mark.parametrize(
    "options",
    [
        {"verify": False},
        {"guards": False},
        {"determinism_check": "none"},
        {"preserve_rng_state": False},
    ],
)
def test_row_a07_verification_can_be_switched_off(options: dict[str, Any]):
    function = region_function(counter(), [])
    gradient(functools.partial(mb.checkpoint, engine="rerun", **options), function)


def test_row_a07_the_option_values_goes_on_comparing_every_call():
    scale = [1.0]
    region = functools.partial(mb.checkpoint, determinism_check="values")

    def function(x: Tensor) -> Tensor:
        return (x * scale[0]).sin().exp()

    for _ in range(5):
        gradient(region, function)
    # The sixth call is not sampled.
    x = torch.linspace(0.1, 1, 5, requires_grad=True)
    y = region(function, x).sum()
    scale[0] = 2.0
    with pytest.raises(RecomputeMismatchError, match="other values"):
        y.backward()


def test_row_a07_state_that_begins_to_move_later_is_found_in_a_call_that_is_sampled():
    calls, drawn = itertools.count(1), [1.0]

    def function(x: Tensor) -> Tensor:
        if drawn[0] >= 4:
            drawn[0] += next(calls)
        return (x * drawn[0]).sin().exp()

    for _ in range(3):
        gradient(mb.checkpoint, function)
    drawn[0] = 4.0
    with pytest.raises(RecomputeMismatchError, match="other values"):
        gradient(mb.checkpoint, function)


def test_row_a07_a_call_that_is_verified_runs_the_operators_of_any_other():
    def function(x: Tensor) -> Tensor:
        return x.sin().exp().tanh().mul(2).add(1)

    counts = []
    for _ in range(5):
        x = torch.linspace(0.1, 1, 5, requires_grad=True)
        with CountedOperators() as forward:
            y = mb.checkpoint(function, x).sum()
        with CountedOperators() as backward:
            y.backward()
        counts.append((forward.counts.total(), backward.counts.total()))

    assert len(set(counts)) == 1, counts
