"""The whole command, on a small file and one file of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst")
pytest.importorskip("mutmut")
pytest.importorskip("coverage")

ROOT = Path(__file__).parents[2]

SOURCE = '''\
"""Numbers."""


def half(number: int) -> int:
    """Divide by two; the rest is lost."""
    return number // 2


def unseen(number: int) -> int:
    """Nobody tests this."""
    return number + 1
'''
TESTS = """\
from membudget.numbers import half


def test_half():
    assert half(9) == 4
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one source file, one file of tests, and these tools."""
    (tmp_path / "src/membudget").mkdir(parents=True)
    (tmp_path / "src/membudget/__init__.py").write_text("")
    (tmp_path / "src/membudget/numbers.py").write_text(SOURCE)
    (tmp_path / "tests/tools").mkdir(parents=True)
    (tmp_path / "tests/test_numbers.py").write_text(TESTS)
    (tmp_path / "tests/tools/equivalent.toml").write_text("")
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    return tmp_path


def run(repository: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.mutants", "--count", "99"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutants_of_what_is_tested_are_caught_and_the_others_named(repository):
    done = run(repository)
    assert done.stderr == ""
    outcome = {}
    for line in done.stdout.splitlines():
        word, place, operator, *_ = [*line.split(), "", ""]
        if word in {"caught", "survived", "equivalent"}:
            outcome[place, operator] = word
    assert outcome == {
        ("numbers.py:6", "number"): "caught",
        ("numbers.py:6", "swap_op"): "caught",
        ("numbers.py:11", "number"): "survived",
        ("numbers.py:11", "swap_op"): "survived",
    }
    assert "0 tests run these lines" in done.stdout
    assert done.returncode == 1
    assert (repository / "src/membudget/numbers.py").read_text() == SOURCE
