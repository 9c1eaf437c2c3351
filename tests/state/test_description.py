"""What a description tells apart, and what it leaves out."""

from __future__ import annotations

import argparse
import enum
import functools
import os
import subprocess
import sys
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import membudget as mb
from membudget.state import description
from membudget.state.code import IndescribableError
from membudget.state.description import describe
from membudget.state.walk import MAX_VALUES


def words(value: Any) -> str:
    return "\n".join(describe(value))


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Number(enum.IntEnum):
    ONE, TWO = 1, 2


@dataclass
class Options:
    """Attributes of a plain object, and another one below."""

    width: Any = 3
    inner: Any = None


@dataclass(slots=True)
class Slots:
    width: Any = 3


Pair = namedtuple("Pair", "left right")


def twice(x: Any, times: Any = 2) -> Any:
    return x * times


def linear(**changes: Any) -> nn.Module:
    """Return a layer with other attributes."""
    layer = nn.Linear(3, 4)
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


def hooked(*hooks: Any) -> nn.Module:
    layer = nn.Linear(3, 4)
    for hook in hooks:
        layer.register_forward_hook(hook)
    return layer


def tied(is_tied: bool) -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    if is_tied:
        second.weight = first.weight
    return nn.Sequential(first, second)


base = torch.zeros(12)

DIFFERENT: dict[str, list[Any]] = {
    "numbers": [1, 2, 1.0, True, 1j, None, "1", b"1", ..., float("nan")],
    "enums": [Colour.RED, Colour.BLUE, Number.ONE, Number.TWO, 1],
    "of torch": [
        *(torch.float32, torch.int64, torch.strided, torch.preserve_format),
        *(torch.device("cpu"), torch.device("meta"), torch.Size([1])),
        *(torch.relu, torch.tanh, torch.ops.aten.relu.default, nn.Linear, nn.GELU),
        torch.nn.functional.silu,
    ],
    "of the library": [range(3), range(4), slice(3), len, max, os, sys],
    "of NumPy": [
        *(numpy.float64(1), numpy.int64(1), numpy.int64(2), numpy.dtype("int64")),
        *(numpy.zeros(3), numpy.zeros(4), numpy.zeros(3, "int64"), numpy.add),
    ],
    "containers": [
        *([], (), {}, set(), frozenset(), deque(), OrderedDict(), UserDict()),
        *([1], [2], [1, 1], [[1], 1], [[1, 1]], (1,), {1: 2}, {2: 1}, {1}, {2}),
        *(deque([1]), OrderedDict(a=1), Pair(1, 2), Pair(2, 1), (1, 2)),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, UserDict(a=1), UserDict(a=2)),
        *(list(range(MAX_VALUES + 1)), list(range(MAX_VALUES + 2))),
        {linear},
        {hooked},
    ],
    "objects": [
        *(Options(), Options(4), Options(inner=Options()), Options(inner=Options(4))),
        *(Slots(), Slots(4), argparse.Namespace(a=1), argparse.Namespace(a=2)),
        *(twice, functools.partial(twice, times=2), functools.partial(twice, times=3)),
        *(Options(2).__repr__, Options(3).__repr__, functools.cache(twice)),
    ],
    "tensors": [
        *(torch.zeros(3, 4), torch.zeros(4, 3), torch.zeros(4, 3).t()),
        *(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4, device="meta")),
        *(torch.zeros(3, 4, requires_grad=True), base[:3], base[3:6]),
        *(torch.zeros(3), torch.zeros(3).to_sparse(), nn.Parameter(torch.zeros(3, 4))),
        torch.zeros(3, 4, requires_grad=True) * 2,
        [base, base],
        [base, base[:]],
        [base, torch.zeros(12)],
    ],
    "modules": [
        *(nn.Linear(3, 4), nn.Linear(3, 4, bias=False), nn.Bilinear(3, 1, 4)),
        *(linear(training=False), linear(words="a"), linear(words="b"), linear(n=None)),
        *(linear(inner=nn.ReLU()), linear(inner=nn.GELU()), linear(options=Options())),
        *(linear(options=Options(4)), linear(forward=twice), linear(act=torch.tanh)),
        *(linear(act=torch.relu), linear(kind=torch.float16), linear(kind=torch.int8)),
        *(hooked(twice), hooked(twice, twice), hooked(lambda *args: None)),
        *(tied(True), tied(False), nn.Dropout(0.1), nn.Dropout(0.2)),
    ],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_objects_are_described_in_different_words(kind):
    found = [words(value) for value in DIFFERENT[kind]]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_an_object_is_described_twice_in_the_same_words(kind):
    for value in DIFFERENT[kind]:
        assert words(value) == words(value)


def test_what_is_made_again_is_described_in_the_same_words():
    assert words(linear(inner=hooked(twice))) == words(linear(inner=hooked(twice)))
    assert words(Options(Slots())) == words(Options(Slots()))


def test_contents_of_tensors_and_gradients_are_not_described():
    layer = linear()
    before = words([layer, torch.zeros(3)])
    layer(torch.ones(2, 3)).sum().backward()
    assert words([layer, torch.ones(3)]) == before


def test_addresses_and_hashes_are_not_described():
    value = object()
    assert words([id(value), hash("a") | 1 << 62]) == words([1 << 40, 1 << 63])
    assert words((1 << 40) - 1) != words((1 << 40) - 2)


def test_only_the_number_of_values_of_a_large_container_is_described():
    many = [0] * (MAX_VALUES + 1)
    assert words(many) == words([1] * (MAX_VALUES + 1))
    # What is no value is described all the same.
    assert words([*many, torch.zeros(1)]) != words([*many, torch.zeros(2)])


def test_objects_are_entered_to_the_depth_of_a_walk_and_no_deeper():
    def nested(depth: int, width: int) -> Any:
        return Options(inner=nested(depth - 1, width)) if depth else Options(width)

    assert words(nested(1, 3)) != words(nested(1, 4))
    assert words(nested(2, 3)) == words(nested(2, 4))
    # Depth counts from the next module.
    assert words(Options(linear(a=nested(1, 3)))) != words(
        Options(linear(a=nested(1, 4)))
    )


def test_what_was_met_too_deep_is_described_where_it_is_met_again():
    def shared(width: int) -> Any:
        deep = Options(width)
        return [Options(inner=Options(inner=deep)), deep]

    assert words(shared(3)) != words(shared(4))


def test_a_cycle_is_described():
    one, other = Options(), Options()
    one.inner, other.inner = other, one
    assert "object 1 again" in words([one])


def with_region() -> nn.Module:
    layer = nn.Linear(3, 4)
    mb.apply(layer, where=lambda name, module: True)
    return layer


def compiled_in_place() -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.compile()
    return layer


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.compile(nn.Linear(3, 4)), "OptimizedModule is compiled"),
        (lambda: torch.compile(twice), "twice is compiled"),
        (compiled_in_place, "Linear is compiled"),
        (lambda: torch.jit.script(nn.Linear(3, 4)), "ScriptModule is compiled"),
        (lambda: torch.jit.script(nn.functional.relu), "ScriptFunction is compiled"),
        (with_region, "Linear carries a region"),
    ],
)
def test_what_runs_otherwise_than_its_code_says_is_not_described(make, why):
    with pytest.raises(IndescribableError, match=why):
        words(linear(inner=make()))


def test_what_leads_to_too_many_objects_is_not_described(monkeypatch):
    monkeypatch.setattr(description, "MOST_OBJECTS", 50)
    assert words([1] * 49)
    with pytest.raises(IndescribableError, match="more than 50 objects"):
        words([1] * 50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_uses_the_same_words(seed):
    code = (
        "from tests.state.test_description import *\n"
        "texts = {'a', 'b', 'c', 'd', 'e', 'f'}\n"
        "print(words([tied(True), hooked(twice), Options(), twice, texts]))"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    texts = {"a", "b", "c", "d", "e", "f"}
    here = words([tied(True), hooked(twice), Options(), twice, texts])
    assert done.stdout.strip() == here
