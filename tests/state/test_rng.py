"""Sources of random numbers: capture and restore their states."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from membudget.scope import Scope
from membudget.state.rng import (
    Source,
    Sources,
    bring_back,
    global_sources,
    global_streams,
    note,
    private_sources,
    source_of,
    torch_sources,
)
from tests.accelerators import pretend

GENERATORS = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.rand(2, generator=g),
    ),
    "torch's own": (lambda: torch.default_generator, lambda g: torch.rand(2)),
    "python": (lambda: random.Random(3), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random(2)),
    "numpy's legacy": (lambda: np.random.RandomState(3), lambda g: g.random_sample(2)),
    "numpy's legacy without a twister": (
        lambda: np.random.RandomState(np.random.PCG64(3)),
        lambda g: g.standard_normal(3),
    ),
}


def numbers(drawn: Any) -> list[float]:
    return np.asarray(drawn).ravel().tolist()


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_restored_source_draws_the_same_numbers(kind):
    make, draw = GENERATORS[kind]
    generator = make()
    source = source_of(generator)
    assert source is not None
    draw(generator)
    noted = source.note()
    first = [numbers(draw(generator)) for _ in range(3)]
    source.bring_back(noted)
    assert [numbers(draw(generator)) for _ in range(3)] == first


@pytest.mark.parametrize("kind", GENERATORS)
def test_an_unused_source_is_noted_as_the_same_pair(kind):
    make, draw = GENERATORS[kind]
    generator = make()
    source = source_of(generator)
    assert source is not None
    first = source.note()
    assert source.note() is first
    draw(generator)
    assert source.note() is not first


def test_a_system_random_generator_has_no_source():
    assert source_of(random.SystemRandom()) is None


def test_a_source_that_has_not_moved_is_not_written():
    written: list[int] = []
    state = [1]
    source = Source(lambda: state[0], written.append, lambda: state[0])
    noted = source.note()
    source.bring_back(noted)
    assert written == []
    state[0] = 2
    source.bring_back(noted)
    assert written == [1]


def test_a_source_without_a_mark_compares_its_state():
    state = [1]
    written: list[int] = []
    source = Source(lambda: state[0], written.append, None)
    noted = source.note()
    assert noted == ("1", 1)
    source.bring_back(noted)
    assert written == []
    state[0] = 2
    source.bring_back(noted)
    assert written == [1]


def test_sources_are_restored_inside_a_scope_and_again_at_its_end():
    generators = [random.Random(1), random.Random(2)]
    noted = note(source_of(g) for g in generators)  # type: ignore[misc]
    first = [g.random() for g in generators]
    after = [g.getstate() for g in generators]
    with Scope() as scope:
        bring_back(noted, scope)
        assert [g.random() for g in generators] == first
        generators[0].random()
    assert [g.getstate() for g in generators] == after


def test_global_sources_are_python_s_torch_s_and_numpy_s(monkeypatch):
    found = global_sources()
    assert len(found) == 3
    noted = note(found)
    first = (random.random(), torch.rand(2).tolist(), np.random.rand(2).tolist())  # noqa: NPY002
    with Scope() as scope:
        bring_back(noted, scope)
        again = (random.random(), torch.rand(2).tolist(), np.random.rand(2).tolist())  # noqa: NPY002
    assert again == first
    assert global_sources() is found
    without = global_sources(torch_too=False)
    assert len(without) == 2
    assert source_of(torch.default_generator) in found
    assert source_of(torch.default_generator) not in without
    monkeypatch.delitem(sys.modules, "numpy.random")
    assert len(global_sources()) == 2


def test_sources_share_one_list_of_states_until_one_draws():
    sources = global_sources()
    first = sources.note()
    assert sources.note() is first
    for draw in (random.random, lambda: torch.rand(1), np.random.rand):
        draw()
        second = sources.note()
        assert second is not first
        assert sources.note() is second
        # The generators that did not draw keep theirs.
        same = [a[1] is b[1] for a, b in zip(first, second, strict=True)]
        assert sorted(same) == [False, True, True]
        first = second


@pytest.mark.parametrize("draws", [True, False])
def test_sources_are_entered_until_a_scope_ends(draws: bool):
    sources = Sources(map(source_of, (random.Random(1), random.Random(2))))  # type: ignore[arg-type]
    noted = sources.note()
    if draws:
        sources[0].write(random.Random(3).getstate())
    before = [source.read() for source in sources]
    with Scope() as scope:
        sources.enter(noted, scope)
        assert [source.read() for source in sources] == [s[1] for _, s in noted]
        sources[1].write(random.Random(4).getstate())
    assert [source.read() for source in sources] == before


def test_private_sources_exclude_torch_s_default_generator():
    generators = [
        *(torch.Generator(), torch.default_generator, random.Random(0)),
        *(random.SystemRandom(), np.random.default_rng()),
    ]
    assert len(private_sources(generators, torch_too=True)) == 3
    assert len(private_sources(generators, torch_too=False)) == 2
    assert private_sources([], torch_too=True) == []


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Let two CUDA devices be in use; their generators lie on the CPU."""
    return pretend(monkeypatch).generators


def draws(generators: list[torch.Generator]) -> list[float]:
    return [torch.rand(1, generator=g).item() for g in generators]


def test_the_generators_of_every_device_in_use_are_global(devices):
    found = global_sources()
    assert len(found) == 5
    assert len(global_sources(torch_too=False)) == 2
    noted = note(found)
    first = draws(devices)
    with Scope() as scope:
        bring_back(noted, scope)
        assert draws(devices) == first


def test_torch_sources_are_the_cpu_and_the_devices_of_the_arguments(devices):
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert len(torch_sources([])) == 1
    assert len(torch_sources([second, second, first])) == 3
    noted = note(torch_sources([second]))
    assert len(noted) == 2
    zero, one = draws(devices)
    with Scope() as scope:
        bring_back(noted, scope)
        others = draws(devices)
    assert others[1] == one
    assert others[0] != zero


def test_the_generator_of_a_device_is_one_of_the_default_ones(devices):
    assert source_of(devices[0]) is source_of(devices[0])
    assert private_sources(devices, torch_too=True) == []
    assert {"torch cuda:0", "torch cuda:1"} <= global_streams().keys()
