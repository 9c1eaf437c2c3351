"""Operators that are not torch's own: what replaying them must not touch."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from membudget.engine.replay import execute
from membudget.engine.replay.execute import call_noting_draws, replay_foreign
from tests.devices import array


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("membudget_foreign", "FRAGMENT") as library:
        yield library


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what earlier tests found out of operators."""
    monkeypatch.setattr(execute, "FAULTY", set())
    monkeypatch.setattr(execute, "_TRUSTED", set())


def known() -> tuple[set[Any], set[Any]]:
    """Return the operators that are faulty, and those that are trusted."""
    return execute.FAULTY, execute._TRUSTED


def operator(library: Any, name: str, run: Callable[..., Any], schema: str = "") -> Any:
    schema = schema or "(Tensor x) -> Tensor"
    library.define(f"{name}{schema}")
    library.impl(name, run, "CPU")
    return getattr(torch.ops.membudget_foreign, name).default


def streams() -> str:
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - any code may use it
    return repr((random.getstate(), numpy, torch.get_rng_state().tolist()))


DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "torch": lambda: torch.rand(1),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_a_replay_leaves_the_random_streams_where_they_were(library, kind):
    def run(x: Tensor) -> Tensor:
        DRAWS[kind]()
        return x * 2

    draws = operator(library, f"draws_{kind}", run)
    before = streams()
    for _ in range(2):  # On copies, and when it is trusted.
        assert torch.equal(
            replay_foreign(draws, (torch.ones(2),), {}), torch.full((2,), 2.0)
        )
        assert streams() == before


@pytest.mark.parametrize("kind", DRAWS)
def test_a_forward_that_moves_a_random_stream_is_noticed(library, kind):
    def run(x: Tensor) -> Tensor:
        DRAWS[kind]()
        return x * 2

    draws = operator(library, f"noted_{kind}", run)
    output, moved = call_noting_draws(draws, (torch.ones(2),), {})
    assert moved
    assert torch.equal(output, torch.full((2,), 2.0))


def test_an_operator_that_draws_nothing_moves_nothing(library):
    plain = operator(library, "plain", lambda x: x * 2)
    output, moved = call_noting_draws(plain, (torch.ones(2),), {})
    assert not moved
    assert torch.equal(output, torch.full((2,), 2.0))


def test_an_operator_that_writes_what_it_does_not_declare_gets_copies(library):
    def run(x: Tensor) -> Tensor:
        array(x)[:] += 1
        return x * 2

    writes = operator(library, "writes", run)
    x = torch.ones(2)
    for _ in range(2):
        assert torch.equal(replay_foreign(writes, (x,), {}), torch.full((2,), 4.0))
        assert torch.equal(x, torch.ones(2))
    assert known() == ({writes}, set())


def test_an_operator_that_writes_nothing_gets_copies_but_once(library):
    seen: list[int] = []

    def run(x: Tensor) -> Tensor:
        seen.append(x.data_ptr())
        return x * 2

    reads = operator(library, "reads", run)
    x = torch.ones(2)
    replay_foreign(reads, (x,), {})
    replay_foreign(reads, (x,), {})
    assert [pointer == x.data_ptr() for pointer in seen] == [False, True]
    assert known() == (set(), {reads})


def test_what_an_operator_declares_to_write_it_may_write(library):
    def run(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    declares = operator(
        library, "declares", run, "(Tensor(a!) x, *, Tensor y) -> Tensor"
    )
    x = torch.ones(2)
    found = replay_foreign(declares, (x,), {"y": torch.full((2,), 3.0)})
    assert torch.equal(found, torch.full((2,), 6.0))
    assert torch.equal(x, torch.full((2,), 2.0))
    assert known() == (set(), set())


def test_an_operator_that_is_the_first_to_import_numpys_generators_counts_as_drawing(
    library: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy_random = sys.modules["numpy.random"]

    def run(x: Tensor) -> Tensor:
        sys.modules["numpy.random"] = numpy_random
        return x * float(numpy_random.rand())

    imports = operator(library, "imports_numpy", run)
    monkeypatch.delitem(sys.modules, "numpy.random")
    output, drew = call_noting_draws(imports, (torch.ones(2),), {})

    assert drew
    assert output.shape == (2,)
