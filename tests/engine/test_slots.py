"""Where state may lie beyond the functions of an installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget.engine import slots
from membudget.engine.reach import reach
from membudget.state import packages

TEXT = """
import logging, torch
from torch import nn

first, second, fourth, fifth = (torch.ones(n) for n in (1, 2, 4, 5))
late, logger, pair = None, logging.getLogger(), (1, None, logging)
registered = {}

def decorated(function, held=torch.ones(6)):
    def wrapper(x, given=held):
        return function(x) + held
    return wrapper

def one(x):
    return two(x) + first + pair

@decorated
def two(x):
    logger.info(late)
    return three(x) + second

def three(x):
    return four(x, registered) if x else one(x)

def four(x, *others):
    return x + fourth + five(x)

def five(x):
    return fifth

class Layer(nn.Module):
    def forward(self, x):
        return one(x)

class Record:
    def save(self):
        return one(self)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: Any = ModuleType("package_of_slots")
    made.__file__ = str(tmp_path / "site-packages" / "package_of_slots.py")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(TEXT, vars(made))
    monkeypatch.setattr(slots, "CODE_SLOTS", {})
    yield made
    packages.is_installed.cache_clear()


def sizes(function: Any, *others: Any) -> set[int]:
    return {t.numel() for t in reach(function, others).tensors}


def test_tensors_are_found_behind_any_number_of_installed_functions(package):
    assert sizes(package.one) == {1, 2, 4, 5, 6}
    assert sizes(package.Layer()) == {1, 2, 4, 5, 6}
    assert sizes(lambda x: package.one(x)) == set()
    one = package.one
    assert sizes(lambda x: one(x)) == {1, 2, 4, 5, 6}


def test_the_methods_of_an_object_are_followed_to_a_depth(package):
    assert sizes(package.Record()) == {1, 6}


def test_a_tensor_bound_anew_in_an_installed_file_is_found_in_the_next_walk(package):
    layer = package.Layer()
    assert 9 not in sizes(layer)
    package.fourth = torch.ones(9)
    package.late = torch.ones(10)
    assert {9, 10} < sizes(layer)


def test_a_function_of_the_users_is_found_where_a_package_registers_it(package):
    state = torch.ones(11)

    def attention(x: Tensor) -> Tensor:
        return x + state

    layer = package.Layer()
    assert 11 not in sizes(layer)
    package.registered["user"] = attention
    assert 11 in sizes(layer)


def test_a_function_of_the_users_is_followed_anew_in_each_walk(package):
    """As where a user replaced a function of a package by one of their own."""

    def attention(x: Tensor) -> Tensor:
        return attention.__defaults__  # type: ignore[return-value]

    package.five = attention
    layer = package.Layer()
    before = sizes(layer)
    attention.__defaults__ = (torch.ones(12),)
    assert sizes(layer) - before == {12}


def test_what_stays_as_it_is_is_not_looked_up(package):
    names = {key for _, key, _ in slots.global_slots(package.one)}
    expected = {"first", "second", "fourth", "fifth", "late", "registered", "held"}
    assert names == expected | {"wrapper's default"}


def test_users_may_replace_any_name_of_their_own_files(package, monkeypatch):
    monkeypatch.setattr(packages, "_INSTALLED", set())
    packages.is_installed.cache_clear()
    names = {key for _, key, _ in slots.global_slots(package.one)}
    assert names == {"two", "first", "pair"}
    assert sizes(package.Layer()) == {1, 2, 4, 5, 6}


def test_modules_of_torch_name_nothing():
    assert slots.class_slots(nn.Linear) == ([], False)


def test_namespaces_of_code_that_ran_long_ago_are_dropped(monkeypatch):
    monkeypatch.setattr(slots, "_MOST_CODES", 3)
    before = dict(slots.CODE_SLOTS)
    slots.CODE_SLOTS.clear()
    for _ in range(5):
        namespace: dict[str, Any] = {"weight": torch.ones(2)}
        exec("def scaled(x): return x * weight", namespace)
        assert reach(namespace["scaled"]).tensors == [namespace["weight"]]
    assert len(slots.CODE_SLOTS) == 3
    slots.CODE_SLOTS.update(before)
