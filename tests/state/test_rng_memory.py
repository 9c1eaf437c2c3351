"""Marks of random generators: while they are the same, so is the state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from membudget.state import rng_memory
from membudget.state.rng_memory import raw_state_reader

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
    assert raw_state_reader(KINDS[kind][0]()) is not None


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_mark_moves_exactly_when_the_state_does(
    kind: str, data: st.DataObject
) -> None:
    make, draws, state_of = KINDS[kind]
    generator = make()
    mark = raw_state_reader(generator)
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
    mark = raw_state_reader(generator)
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
    mark = raw_state_reader(generator)
    assert mark is not None
    before = mark()

    generator._bit_generator = np.random.MT19937(3)

    assert mark() != before


def test_a_generator_without_a_twister_has_no_mark() -> None:
    assert raw_state_reader(np.random.default_rng()) is None
    assert raw_state_reader(np.random.RandomState(np.random.PCG64(1))) is None


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """Let other probes decide whether marks of a kind can be trusted."""
    replaced: dict[Any, Any] = dict(rng_memory._PROBES)
    monkeypatch.setattr(rng_memory, "_PROBES", replaced)
    rng_memory._is_reliable.cache_clear()
    yield replaced
    rng_memory._is_reliable.cache_clear()


def probe_of(draw: Draw) -> Any:
    """Return a probe of Python's generators by one way of drawing."""
    generator = random.Random(0)
    return lambda owner: (generator, (lambda: draw(generator),))


def test_a_mark_that_a_draw_does_not_move_is_not_trusted(
    probes: dict[Any, Any],
) -> None:
    probes[rng_memory._python_reader] = probe_of(lambda g: g.random())
    assert raw_state_reader(random.Random(0)) is not None
    rng_memory._is_reliable.cache_clear()
    probes[rng_memory._python_reader] = probe_of(lambda g: None)
    assert raw_state_reader(random.Random(0)) is None


def test_a_mark_that_moves_by_itself_is_not_trusted(
    probes: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(99))
    moving: Any = lambda generator: lambda: next(numbers)  # noqa: E731
    monkeypatch.setattr(rng_memory, "_python_reader", moving)
    probes[moving] = probe_of(lambda g: g.random())
    assert raw_state_reader(random.Random(0)) is None


@pytest.mark.parametrize("error", [LookupError, TypeError, AttributeError])
def test_where_the_state_is_not_found_there_is_no_mark(
    probes: dict[Any, Any], error: type[Exception]
) -> None:
    def fail(owner: Any) -> Any:
        raise error

    probes[rng_memory._torch_reader] = fail
    assert raw_state_reader(torch.Generator()) is None


def test_a_subclass_that_draws_otherwise_is_tried_by_itself() -> None:
    class Constant(np.random.RandomState):
        def standard_normal(self, size: Any = None) -> Any:
            return 0.0

    assert raw_state_reader(Constant(0)) is None
    assert raw_state_reader(np.random.RandomState(0)) is not None
