"""What the code of a step names is as it was after the step has run, wherever it is."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.utils import parametrizations, parametrize

import membudget as mb
from membudget.state.variables import variables_kept

CALLS = 0
TABLE: dict[int, Tensor] = {}
MASK: Tensor | None = None
SETTINGS = SimpleNamespace()
STREAM = torch.Generator()
PYTHON_STREAM = random.Random(1)
NUMPY_STREAM = np.random.default_rng(1)
COUNT = itertools.count()
ARRAY = np.zeros(3)


class OnClass:
    """Holds a table that the first call fills."""

    table: Tensor | None = None


def made(size: int) -> Tensor:
    return torch.full((size, size), 2.0).triu(1)


@functools.lru_cache(maxsize=4)
def cached(size: int) -> Tensor:
    return made(size)


def in_a_global(size: int) -> Tensor:
    global MASK
    if MASK is None:
        MASK = made(size)
    return MASK


def in_a_dict(size: int) -> Tensor:
    return TABLE.setdefault(size, made(size))


def in_a_default(size: int, memo: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return memo.setdefault(size, made(size))


def on_a_class(size: int) -> Tensor:
    if OnClass.table is None:
        OnClass.table = made(size)
    return OnClass.table


def on_an_object(size: int) -> Tensor:
    if not hasattr(SETTINGS, "mask"):
        SETTINGS.mask = made(size)
    mask: Tensor = SETTINGS.mask
    return mask


def on_a_function(size: int) -> Tensor:
    held: Any = on_a_function
    if not hasattr(held, "mask"):
        held.mask = made(size)
    mask: Tensor = held.mask
    return mask


def closed_over() -> Callable[[int], Tensor]:
    memo: Tensor | None = None

    def mask(size: int) -> Tensor:
        nonlocal memo
        if memo is None:
            memo = made(size)
        return memo

    return mask


TABLES = [
    *(cached, in_a_global, in_a_dict, in_a_default, on_a_class, on_an_object),
    *(on_a_function, closed_over()),
]


class Masked(nn.Module):
    """Adds a mask that a function makes, perhaps once."""

    def __init__(self, mask: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.mask(8)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Forget what the real steps of these tests have filled."""
    global MASK, CALLS
    yield
    MASK, CALLS, OnClass.table = None, 0, None
    TABLE.clear()
    cached.cache_clear()
    vars(SETTINGS).clear()
    vars(on_a_function).clear()


@pytest.mark.parametrize("mask", TABLES, ids=lambda mask: mask.__name__)
def test_a_table_that_a_fake_step_fills_is_not_that_of_the_next_step(mask):
    model, x = Masked(mask), torch.randn(8, 8)
    mb.profile(model, x, fake=True)
    assert not isinstance(mask(8), FakeTensor)
    model(x).sum().backward()
    with mb.budget(model, "1GiB"):
        model(x).sum().backward()
    assert torch.equal(mask(8), made(8))


def test_what_a_cache_held_before_it_still_holds():
    before = cached(8)
    mb.profile(Masked(cached), torch.randn(8, 8), fake=True)
    assert cached(8) is before
    assert cached.cache_info().misses == 1


class Draws(nn.Module):
    """Draws from streams, and counts, as variables that only its code names."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        type(self).calls += 1
        ARRAY[0] += 1
        noise = torch.rand(x.shape, generator=STREAM)
        factor = PYTHON_STREAM.random() + float(NUMPY_STREAM.random())
        counts = CALLS + type(self).calls + next(COUNT) + float(ARRAY[0])
        return x * noise * factor + counts


def drawn(around: Any) -> list[float]:
    """Return the losses of some steps, all variables as at first."""
    global CALLS, COUNT
    CALLS, COUNT, Draws.calls, ARRAY[0] = 0, itertools.count(), 0, 0
    STREAM.manual_seed(1)
    PYTHON_STREAM.seed(1)
    NUMPY_STREAM.bit_generator.state = np.random.default_rng(1).bit_generator.state
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Draws(), nn.Linear(4, 4))
    x, losses = torch.randn(3, 4), []
    with around(model, x) or nullcontext():
        for _ in range(3):
            loss = model(x).sum()
            loss.backward()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "around",
    [
        lambda model, x: mb.budget(model, "1GiB"),
        lambda model, x: mb.profile(model, x) and None,
        lambda model, x: mb.profile(model, x, fake=True) and None,
        lambda model, x: mb.fit(model, x, "100%"),
    ],
    ids=["budget", "profile", "fake", "fit"],
)
def test_streams_and_counters_that_only_code_names_are_put_back(around):
    assert drawn(around) == drawn(lambda model, x: None)


def test_what_a_hook_collects_is_dropped_after_a_recording():
    kept: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: kept.append(output))
    mb.profile(model, torch.randn(2, 4), fake=True)
    assert kept == []


def test_a_recording_leaves_torchs_cache_of_parametrizations_alone():
    model = parametrizations.weight_norm(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    with parametrize.cached():
        weight = model.weight
        mb.profile(model, x, fake=True)
        assert model.weight is weight
        model(x).sum().backward()


def test_a_class_that_got_an_attribute_loses_it_again():
    class Counting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            type(self).ran = getattr(type(self), "ran", 0) + 1  # type: ignore[attr-defined]
            return super().forward(input)

    with variables_kept([model := Counting(2, 2)], is_fake=False):
        model(torch.ones(1, 2))
        assert vars(Counting)["ran"] == 1
    assert "ran" not in vars(Counting)


def test_variables_are_put_back_after_an_error():
    class Fails(Draws):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(f"{super().forward(x).sum()}: mine")

    before = repr(COUNT)
    with (
        variables_kept([model := Fails()], False),
        pytest.raises(KeyError, match="mine"),
    ):
        model(torch.ones(2))
    assert (CALLS, repr(COUNT)) == (0, before)
