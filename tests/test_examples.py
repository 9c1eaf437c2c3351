"""Each example runs, small, and says by its exit code that all bits were equal."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--quick"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("demo", "equal to the last bit"),
        ("fit", "of the predicted"),
        ("sequential", "equal"),
        ("cifar_cnn", "weights and buffers equal bit for bit"),
    ],
)
def test_an_example_ends_with_equal_bits(name: str, says: str):
    done = run(name)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_example_with_transformers_ends_with_equal_bits():
    done = run("gpt_neox")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    find_spec("transformers") is not None, reason="transformers is there"
)
def test_the_example_without_transformers_says_what_to_install():
    done = run("gpt_neox")
    assert done.returncode == 2
    assert 'pip install "membudget[hf]"' in done.stderr
