"""Whose code a function is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from membudget.state import packages
from membudget.state.packages import is_built_in, is_installed, is_library, package_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cached = is_built_in, is_library, is_installed
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def module(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType(path.stem)
    made.__file__, made.__version__ = str(path), "3.2"
    monkeypatch.setitem(sys.modules, path.stem, made)


def test_python_torch_and_we_ourselves_are_libraries():
    for name in ("random", "torch.nn", "numpy.random", "membudget.fit"):
        assert is_library(name)
        assert is_installed(name)
        assert package_of(name) == name.partition(".")[0]
    assert not is_library("__main__")
    assert not is_library(None)
    assert not is_library("torchvision.ops")


def test_a_file_of_the_users_may_have_the_name_of_one_of_the_library(
    monkeypatch, tmp_path
):
    assert is_built_in("profile")
    is_built_in.cache_clear()
    module(tmp_path / "profile.py", monkeypatch)
    assert not is_built_in("profile")


def test_a_package_is_installed_where_the_sites_packages_lie(monkeypatch, tmp_path):
    module(tmp_path / "own.py", monkeypatch)
    folder = tmp_path / "site-packages"
    folder.mkdir()
    module(folder / "given.py", monkeypatch)
    (folder / "given.py").write_text("text")
    assert not is_installed("own")
    assert package_of("own") == ""
    assert is_installed("given")
    assert package_of("given").startswith("given 3.2 4 ")


def test_a_file_in_an_archive_is_known_by_its_version(monkeypatch):
    module(Path("site-packages/given.zip/given.py"), monkeypatch)
    assert package_of("given") == "given 3.2"


def test_code_without_a_file_is_the_users():
    assert not is_installed(None)
    assert not is_installed("never_imported")
    assert packages.package_of("never_imported") == ""
