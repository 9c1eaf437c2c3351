"""Random numbers that are as large, or as small, as can be."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

import membudget as mb
from membudget.draws import MOST_NUMBERS, drawing
from tests.oracles import CountedOperators

LEGACY: Any = np.random  # The functions that models call.
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ALL = "L" * 9


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_are_nearly_one_or_nearly_zero_in_every_dtype(dtype: torch.dtype):
    with drawing("LLLSS"):
        assert 0.99 < torch.rand((), dtype=dtype) < 1
        assert 2.9 < torch.empty(3, dtype=dtype).uniform_(1, 3)[0] <= 3
        assert 2.9 < torch.empty(3, dtype=dtype).uniform_(to=3)[0] <= 3
        assert 0 < torch.rand(1, dtype=dtype) < 0.004
        assert 0 < torch.rand_like(torch.zeros(2, dtype=dtype))[1] < 0.004


def test_each_draw_has_its_letter_and_those_beyond_are_as_drawn():
    torch.manual_seed(0)
    expected = [torch.rand(()) for _ in range(5)]
    torch.manual_seed(0)
    with drawing("-L-S"):
        first, second, third, fourth, fifth = [torch.rand(()) for _ in range(5)]
    assert [first, third, fifth] == expected[::2]
    assert second > 0.999
    assert fourth < 0.001


def test_a_loop_that_draws_until_a_number_is_large_ends():
    with drawing("SS"):
        count = 1
        while torch.rand(()) < 0.5:
            count += 1
    assert count > 2


def test_generators_go_on_as_if_the_numbers_had_been_drawn():
    own = torch.Generator()
    states = []
    for letters in ("", "LSL"):
        torch.manual_seed(0)
        own.manual_seed(0)
        with drawing(letters):
            torch.rand(())
            torch.rand(5)
            torch.rand(1, generator=own)
        states += [torch.get_rng_state(), own.get_state()]
    assert torch.equal(states[0], states[2])
    assert torch.equal(states[1], states[3])


def test_many_numbers_and_other_distributions_are_as_they_are_drawn():
    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(0)
        many = torch.rand(MOST_NUMBERS + 1), torch.rand(2, dtype=torch.complex64)
        return [*many, torch.randn(2), torch.randint(9, (3,)), torch.rand(0)]

    expected = drawn()
    with drawing(ALL):
        assert all(map(torch.equal, drawn(), expected))


def test_nothing_is_set_after_a_context_or_an_error_in_it():
    with pytest.raises(ValueError, match="in it"), drawing(ALL):
        raise ValueError("in it")
    assert (torch.rand(20) < 0.99).any()
    with drawing("S"):
        with drawing(ALL):
            assert torch.rand(()) > 0.99
        assert torch.rand(()) < 0.01


def test_another_thread_draws_as_before():
    seen: list[bool] = []
    with drawing(ALL):
        thread = threading.Thread(
            target=lambda: seen.append(bool((torch.rand(20) < 0.9).any()))
        )
        thread.start()
        thread.join()
    assert seen == [True]


def test_an_operator_that_draws_stays_one():
    with drawing(ALL), CountedOperators() as operators:
        torch.rand(())
    assert dict(operators.counts) == {"rand": 1}


@pytest.mark.parametrize("engine", ["replay", "rerun"])
def test_a_recompute_draws_the_same_numbers(engine: str):
    def function(x: torch.Tensor) -> torch.Tensor:
        large, small, drawn = torch.rand(()), torch.rand(()), torch.rand(())
        x = (x * large).exp() if large > 0.5 else x.sin()
        return (x * drawn).exp() if small < 0.5 else x.sin()

    x = torch.linspace(0, 1, 5, requires_grad=True)
    gradients = []
    for run in (function, lambda x: mb.checkpoint(function, x, engine=engine)):
        torch.manual_seed(0)
        with drawing("LS-"):
            (gradient,) = torch.autograd.grad(run(x).sum(), x)
        gradients.append(gradient)
    assert torch.equal(*gradients)
    assert gradients[0].min() > 0.04


def test_draws_of_a_forward_are_told():
    told: list[int] = []
    with drawing("", lambda: told.append(1)):
        torch.rand(3)  # Not without letters: whoever records operators sees it.
        random.random()
        LEGACY.rand(2)
    assert len(told) == 2
    with drawing("-", lambda: told.append(1)):
        torch.rand(3)
        random.uniform(0, 1)
        torch.rand(MOST_NUMBERS + 1)
    assert len(told) == 4


def test_numbers_that_python_draws_are_set():
    random.seed(0)
    expected = [random.random() for _ in range(4)][3]
    random.seed(0)
    with drawing("LLS"):
        assert 0.99 < random.random() < 1
        assert 2.98 < random.uniform(1, 3) < 3
        assert 1 < random.uniform(b=3, a=1) < 1.002
    assert random.random() == expected


def test_numbers_that_numpy_draws_are_set():
    LEGACY.seed(0)
    expected = LEGACY.rand(11)[10]
    LEGACY.seed(0)
    with drawing("LLSS"):
        assert 0.99 < LEGACY.random() < 1
        assert 2.98 < LEGACY.uniform(low=1, high=3) <= 3
        assert LEGACY.uniform([0, 1], 2, (2, 2)).min() > 0.1  # As they are drawn.
        assert LEGACY.rand(3).max() < 0.001
        assert LEGACY.random_sample() < 0.001
    assert LEGACY.rand() == expected


def test_functions_of_modules_are_theirs_again_after_all_contexts():
    functions = random.random, random.uniform, LEGACY.rand, LEGACY.uniform
    with drawing(""), drawing(ALL):
        assert random.random is not functions[0]
    assert functions == (
        *(random.random, random.uniform),
        *(LEGACY.rand, LEGACY.uniform),
    )
