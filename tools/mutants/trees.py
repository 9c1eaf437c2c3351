"""Copies of the repository, one a worker: the checkout itself is never edited."""

from __future__ import annotations

import compileall
import py_compile
import shutil
from pathlib import Path

COPIED = ("src", "tests", "tools", "benchmarks", "examples", "docs")
FILES = ("pyproject.toml", "run.py", "README.md", "constraints.txt")


def copy_tree(root: Path, tree: Path) -> None:
    """Copy what the tests need to an empty folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=ignored)
    for name in FILES:
        if (root / name).is_file():
            shutil.copy2(root / name, tree / name)
    # Bytecode is looked up by a hash of its source: by the time of the last change, a
    # mutant of the same second and size would be taken for the file as it was.
    checked = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(tree / "src", quiet=2, invalidation_mode=checked)


def write(tree: Path, path: str, text: str) -> None:
    """Let one file of a copy read so."""
    (tree / path).write_text(text, encoding="utf-8")
