"""Public is a list, and it is the truth."""

from __future__ import annotations

import inspect

import pytest

import membudget
from membudget import compat, memory, pipeline


@pytest.mark.parametrize("module", [membudget, compat, memory, pipeline])
def test_the_public_names_are_sorted_and_there(module):
    # Constants come first, as ruff sorts.
    in_order = sorted(module.__all__, key=lambda name: (not name.isupper(), name))
    assert module.__all__ == in_order
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_what_the_package_holds_is_public():
    held = {name for name in dir(membudget) if not name.startswith("_")}
    imports = {"TYPE_CHECKING", "Any", "ModuleType", "annotations", "import_module"}
    modules = {n for n in held if inspect.ismodule(getattr(membudget, n))}
    assert held - imports - modules == set(membudget.__all__) - {"compat", "policies"}


def test_functions_win_over_the_modules_of_their_name():
    import membudget.apply
    import membudget.audit

    assert callable(membudget.apply)
    assert callable(membudget.audit)


@pytest.mark.parametrize("name", membudget.__all__)
def test_a_public_thing_comes_from_the_package(name):
    value = getattr(membudget, name)
    if not inspect.ismodule(value):
        assert value.__module__.startswith("membudget")
        assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        membudget.nothing  # noqa: B018
