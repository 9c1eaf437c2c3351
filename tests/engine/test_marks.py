"""Marks of random generators: while they are the same, so is the state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from membudget.engine.marks import mark_of

Draw = Callable[[Any], object]

PYTHON: dict[str, Draw] = {
    "random": lambda g: g.random(),
    "gauss": lambda g: g.gauss(0, 1),
    "choice": lambda g: g.choice([1, 2, 3]),
    "shuffle": lambda g: g.shuffle([1, 2, 3]),
    "seed": lambda g: g.seed(g.random()),
}
NUMPY: dict[str, Draw] = {
    "random_sample": lambda g: g.random_sample(),
    "standard_normal": lambda g: g.standard_normal(),
    "permutation": lambda g: g.permutation(5),
    "randint": lambda g: g.randint(9),
}
TORCH: dict[str, Draw] = {
    "rand": lambda g: torch.rand(3, generator=g),
    "randn": lambda g: torch.randn(1, generator=g),
    "randn_double": lambda g: torch.randn(1, dtype=torch.float64, generator=g),
    "randn_many": lambda g: torch.randn(32, generator=g),
    "bernoulli": lambda g: torch.full((2,), 0.5).bernoulli_(generator=g),
    "randperm": lambda g: torch.randperm(5, generator=g),
    "seed": lambda g: g.seed(),
}
KINDS: dict[str, tuple[Callable[[], Any], dict[str, Draw], Draw]] = {
    "python": (lambda: random.Random(3), PYTHON, lambda g: g.getstate()),
    "numpy": (
        lambda: np.random.RandomState(3),
        NUMPY,
        lambda g: repr(g.get_state(legacy=False)),
    ),
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        TORCH,
        lambda g: bytes(g.get_state().tolist()),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_this_python_and_this_torch_have_marks_of_every_kind(kind: str) -> None:
    assert mark_of(KINDS[kind][0]()) is not None


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_mark_moves_exactly_when_the_state_does(
    kind: str, data: st.DataObject
) -> None:
    make, draws, state_of = KINDS[kind]
    generator = make()
    mark = mark_of(generator)
    assert mark is not None
    names = data.draw(st.lists(st.sampled_from(sorted(draws)), max_size=8))
    for name in names:
        before, state = mark(), state_of(generator)
        assert mark() == before

        draws[name](generator)

        assert (mark() == before) == (state_of(generator) == state)


# A torch generator keeps the bytes of a spare Gaussian that is used up, so its mark may
# be another one for the same state; the state is then written once more than needed.
@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_a_mark_comes_back_with_the_state(kind: str) -> None:
    make, draws, _ = KINDS[kind]
    generator = make()
    mark = mark_of(generator)
    assert mark is not None
    start = mark()
    other = make()

    for draw in draws.values():
        draw(generator)
    restore(generator, other)

    assert mark() == start


def restore(generator: Any, other: Any) -> None:
    """Give a generator the state of another one of its kind."""
    if isinstance(generator, random.Random):
        generator.setstate(other.getstate())
    else:
        generator.set_state(other.get_state())


def test_an_exchanged_twister_of_numpy_is_noticed() -> None:
    generator = np.random.RandomState(3)
    mark = mark_of(generator)
    assert mark is not None
    before = mark()

    generator._bit_generator = np.random.MT19937(3)

    assert mark() != before


def test_a_generator_without_a_twister_has_no_mark() -> None:
    assert mark_of(np.random.default_rng()) is None
    assert mark_of(np.random.RandomState(np.random.PCG64(1))) is None
