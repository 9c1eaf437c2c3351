"""Which code a description follows, and which it only names."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from membudget.state import packages
from tests.state.test_description import words

HEAD = """
import math, torch
from functools import wraps, cached_property
"""

BODY = """
NUMBER = 3

def helper(x):
    return x * NUMBER

def decorated(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@decorated
def function(x, times=2):
    def inner(y):
        return helper(y)
    return inner(x) + times

class Base(torch.nn.Module):
    LIMIT = 5

    def other(self, x):
        return x + 1

class Net(Base):
    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return x

    @property
    def wide(self):
        return 4

    @cached_property
    def once(self):
        return 5

    def forward(self, x):
        return function(self.other(x)) if x in (6, 7) else x

def made(number):
    def inner(x):
        return x + number
    return inner
"""


def file(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a file of the user's, made from its text."""
    found = ModuleType(name)
    exec(compile(HEAD + text, f"{name}.py", "exec"), vars(found))
    monkeypatch.setitem(sys.modules, name, found)
    return found


def changed(old: str, new: str) -> str:
    assert old in BODY
    return BODY.replace(old, new)


CHANGES = {
    "a number that a helper names": ("NUMBER = 3", "NUMBER = 4"),
    "a helper": ("x * NUMBER", "x / NUMBER"),
    "a decorator": ("return function(*args)", "return function(args[0])"),
    "a function": ("inner(x) + times", "inner(x) - times"),
    "a default": ("times=2", "times=4"),
    "a constant of a function inside": ("return helper(y)", "return helper(y + 1)"),
    "a method of a base class": ("return x + 1", "return x + 2"),
    "a value of a base class": ("LIMIT = 5", "LIMIT = 6"),
    "a method": ("function(self.other(x))", "function(self.other(-x))"),
    "a constant": ("(6, 7)", "(6, 8)"),
    "a static method": (
        "static(x):\n        return x",
        "static(x):\n        return -x",
    ),
    "a class method": ("(cls, x):\n        return x", "(cls, x):\n        return -x"),
    "a property": ("return 4", "return 9"),
    "a cached property": ("return 5", "return 9"),
    "a line": ("class Net", "\nclass Net"),
    "a base": ("class Net(Base)", "class Net(torch.nn.Module)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_that_a_model_leads_to_is_described(change, monkeypatch):
    before = words(file("net", BODY, monkeypatch).Net())
    assert words(file("net", BODY, monkeypatch).Net()) == before
    other = file("net", changed(*CHANGES[change]), monkeypatch)
    assert words(other.Net()) != before


def test_what_a_function_closed_over_is_described(monkeypatch):
    net = file("net", BODY, monkeypatch)
    assert words(net.made(1)) == words(net.made(1)) != words(net.made(2))


def test_a_variable_that_has_no_value_yet_is_described():
    def early() -> Any:
        return late

    found = words(early)
    late = 3
    assert words(early) != found
    assert late


def test_code_of_another_file_is_described_by_what_is_named_of_it(monkeypatch):
    def word_of(value: int, other: int) -> str:
        inner = file("inner", f"LIMIT = {value}\nOTHER = {other}", monkeypatch)
        package = ModuleType("package")
        package.inner = inner  # type: ignore[attr-defined]
        inner.package = package  # type: ignore[attr-defined]
        text = "def function(x):\n    return x + package.inner.LIMIT"
        outer = file("outer", text, monkeypatch)
        outer.package = package  # type: ignore[attr-defined]
        return words(outer.function)

    assert word_of(1, 1) != word_of(2, 1)
    assert word_of(1, 1) == word_of(1, 2)


def test_code_counts_as_it_runs_and_not_as_its_file_reads(monkeypatch, tmp_path):
    path = tmp_path / "net.py"
    path.write_text("def forward(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    net: Any = __import__("net")
    try:
        before = words(net.forward)
        path.write_text("def forward(x):\n    return x + 2\n")
        assert words(net.forward) == before
    finally:
        del sys.modules["net"]


def test_a_function_that_a_test_replaced_is_described(monkeypatch):
    before = words(nn.ReLU())
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    # Classes of torch are described by its version, wherever they were changed.
    assert words(nn.ReLU()) == before

    class Own(nn.ReLU):
        pass

    before = words(Own())
    monkeypatch.setattr(Own, "forward", lambda self, x: x, raising=False)
    assert words(Own()) != before


def installed(root: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a package that was installed: a file among the site's packages."""
    path = root / "site-packages" / "package.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    found = file("package", text, monkeypatch)
    found.__file__ = str(path)
    return found


@pytest.fixture
def fresh() -> Any:
    packages.is_installed.cache_clear()
    yield
    packages.is_installed.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_of_an_installed_package_the_version_and_the_file_are_described(
    monkeypatch, tmp_path
):
    text = "__version__ = '{}'\nLIMIT = {}\ndef function(x):\n    return x + LIMIT"
    found = []
    for version, limit in [("1", 3), ("1", 3), ("2", 3), ("1", 44)]:
        package = installed(tmp_path, text.format(version, limit), monkeypatch)
        monkeypatch.setattr(packages, "Path", unchanging)
        found.append(words(package.function))
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert "code" not in found[0]


def unchanging(path: str) -> Any:
    """Return a path whose file was always written at the same time."""

    class Facts:
        st_size = Path(path).stat().st_size
        st_mtime_ns = 7

    class Unchanging:
        parts = Path(path).parts
        stat = Facts

    return Unchanging()


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function by one whose code is torch's."""
    return torch.no_grad()(function)


def test_what_a_wrapper_of_torch_wraps_is_described():
    def one(x: Any) -> Any:
        return x + 1

    def other(x: Any) -> Any:
        return x + 2

    other.__qualname__ = one.__qualname__
    wrapped = [words(logged(function)) for function in (one, other)]
    assert wrapped[0] != wrapped[1]


def test_a_class_that_was_made_for_one_module_is_described():
    class Half(nn.Module):
        def forward(self, x: Any) -> Any:
            return x / 2

    class Third(nn.Module):
        def forward(self, x: Any) -> Any:
            return x / 3

    found = []
    for kind in (Half, Third):
        kind.__qualname__ = "Part"
        layer = nn.Linear(3, 3)
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", kind())
        found.append(words(layer))
    assert found[0] != found[1]
    assert "class torch.nn.utils.parametrize.ParametrizedLinear" in found[0]


def test_a_traced_graph_is_described_by_its_code():
    def traced(function: Callable[..., Any]) -> nn.Module:
        return torch.fx.symbolic_trace(function)

    one = traced(lambda x: x + 1)
    other = traced(lambda x: x * 2)
    assert words(type(one)) != words(type(other))


def test_what_a_cache_wraps_is_described():
    functions = [lambda x: x + 1, lambda x: x + 2]
    found = [words(functools.cache(function)) for function in functions]
    assert found[0] != found[1]
