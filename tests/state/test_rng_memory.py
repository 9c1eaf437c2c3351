"""Raw states of random generators: while they are equal, so is the public state."""

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
def test_every_kind_of_generator_can_be_read_raw(
    kind: str,
) -> None:
    assert raw_state_reader(KINDS[kind][0]()) is not None


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_raw_state_changes_exactly_when_the_state_does(
    kind: str, data: st.DataObject
) -> None:
    make, draws, state_of = KINDS[kind]
    generator = make()
    read = raw_state_reader(generator)
    assert read is not None
    names = data.draw(st.lists(st.sampled_from(sorted(draws)), max_size=8))
    for name in names:
        before, state = read(), state_of(generator)
        assert read() == before

        draws[name](generator)

        assert (read() == before) == (state_of(generator) == state)


# A torch generator keeps the bytes of a spare Gaussian that is used up, so its raw
# state may differ while the state is equal; that costs one needless write.
@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_the_raw_state_is_restored_with_the_state(kind: str) -> None:
    make, draws, _ = KINDS[kind]
    generator = make()
    read = raw_state_reader(generator)
    assert read is not None
    start = read()
    other = make()

    for draw in draws.values():
        draw(generator)
    restore(generator, other)

    assert read() == start


def restore(generator: Any, other: Any) -> None:
    """Give a generator the state of another one of its kind."""
    if isinstance(generator, random.Random):
        generator.setstate(other.getstate())
    else:
        generator.set_state(other.get_state())


def test_a_replaced_bit_generator_of_numpy_is_noticed() -> None:
    generator = np.random.RandomState(3)
    read = raw_state_reader(generator)
    assert read is not None
    before = read()

    generator._bit_generator = np.random.MT19937(3)

    assert read() != before


def test_a_generator_without_a_mersenne_twister_is_not_read_raw() -> None:
    assert raw_state_reader(np.random.default_rng()) is None
    assert raw_state_reader(np.random.RandomState(np.random.PCG64(1))) is None


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """Replace the probes that decide which kinds of generators are read raw."""
    replaced: dict[Any, Any] = dict(rng_memory._PROBES)
    monkeypatch.setattr(rng_memory, "_PROBES", replaced)
    rng_memory._is_reliable.cache_clear()
    yield replaced
    rng_memory._is_reliable.cache_clear()


def probe_of(draw: Draw) -> Any:
    """Return a probe of Python's generators by one way of drawing."""
    generator = random.Random(0)
    return lambda owner: (generator, (lambda: draw(generator),))


def test_a_raw_state_that_a_draw_leaves_unchanged_is_not_trusted(
    probes: dict[Any, Any],
) -> None:
    probes[rng_memory._python_reader] = probe_of(lambda g: g.random())
    assert raw_state_reader(random.Random(0)) is not None
    rng_memory._is_reliable.cache_clear()
    probes[rng_memory._python_reader] = probe_of(lambda g: None)
    assert raw_state_reader(random.Random(0)) is None


def test_a_raw_state_that_changes_without_a_draw_is_not_trusted(
    probes: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(99))
    moving: Any = lambda generator: lambda: next(numbers)  # noqa: E731
    monkeypatch.setattr(rng_memory, "_python_reader", moving)
    probes[moving] = probe_of(lambda g: g.random())
    assert raw_state_reader(random.Random(0)) is None


@pytest.mark.parametrize("error", [LookupError, TypeError, AttributeError])
def test_a_state_that_is_not_found_is_not_read_raw(
    probes: dict[Any, Any], error: type[Exception]
) -> None:
    def fail(owner: Any) -> Any:
        raise error

    probes[rng_memory._torch_reader] = fail
    assert raw_state_reader(torch.Generator()) is None


def test_a_subclass_that_draws_differently_is_probed_on_its_own() -> None:
    class Constant(np.random.RandomState):
        def standard_normal(self, size: Any = None) -> Any:
            return 0.0

    assert raw_state_reader(Constant(0)) is None
    assert raw_state_reader(np.random.RandomState(0)) is not None
