"""Which cases of a test run each time, and which with `run.py test --all` alone.

What is chosen follows from names and from their order: it is the same on every machine.
On the CPU, no test function is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from zlib import crc32

import pytest

from tests.planner.models import MODELS
from tests.table_models import TABLE

MOST = 100
"""Of a function's cases, about so many run each time, where it has more."""

EVERY = ("conformance", "offload", "profile", "replay", "rows")
"""The folders whose functions may take every case of the zoo, in every way."""

OF_RANKS = ("case", "way")
"""The parameters of distributed tests that name what their ranks run."""

ONE_IN = 3
"""Of models, and of what ranks run, one in so many runs, in the order of the list."""


def share_out(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what does not run each time, of the tests that are not yet."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    _of_ranks([item for item in quick if item.get_closest_marker("distributed")])
    for cases in by_function(quick):
        _of_models(cases)
        if not {*EVERY}.isdisjoint(cases[0].path.parts):
            leave_all_but(cases, one_in=math.ceil(len(cases) / MOST))


def wanted(request: pytest.FixtureRequest) -> list[str]:
    """Return what the tests of this file that were chosen need their ranks to run."""
    items = [item for item in request.session.items if item.path == request.path]
    names = dict.fromkeys(_parameter(item, OF_RANKS) for item in items)
    return [name for name in names if name]


def leave_all_but(cases: list[pytest.Item], one_in: int) -> None:
    """Mark all cases of a function as slow, but one in so many, and at least one."""
    chosen = [case for case in cases if hash_of(case.nodeid) % one_in == 0]
    leave_out(set(cases) - set(chosen or cases[:1]))


def leave_out(cases: Iterable[pytest.Item]) -> None:
    """Mark cases as slow."""
    for case in cases:
        case.add_marker("slow")


def hash_of(name: str) -> int:
    """Return a number that follows from a name, the same in every process."""
    return crc32(name.encode())


def by_function(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the cases of each test function."""
    functions = defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    return list(functions.values())


def _of_ranks(items: list[pytest.Item]) -> None:
    """Let the ranks of each file run a third of what they can."""
    files = defaultdict(list)
    for item in items:
        if _parameter(item, OF_RANKS):
            files[item.path].append(item)
    for tests in files.values():
        _leave_two_thirds(tests, OF_RANKS)


def _of_models(cases: list[pytest.Item]) -> None:
    """Let a function that takes models of a list take a third of them."""
    names = {_parameter(case, ("name",)) for case in cases}
    if names <= MODELS.keys() | TABLE.keys():
        _leave_two_thirds(cases, ("name",))


def _leave_two_thirds(items: list[pytest.Item], parameters: tuple[str, ...]) -> None:
    values = [_parameter(item, parameters) for item in items]
    chosen = list(dict.fromkeys(values))[::ONE_IN]
    for item, value in zip(items, values, strict=True):
        if value not in chosen:
            item.add_marker("slow")


def _parameter(item: pytest.Item, names: tuple[str, ...]) -> str:
    """Return the first of these parameters that a test has, or nothing."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return next((str(given[name]) for name in names if name in given), "")
