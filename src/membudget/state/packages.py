"""Whose code a function is: Python's, torch's, an installed package's, the user's.

What Python and torch bring along refers to no state of the user's. An installed package
may, but its functions are not replaced while a program runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = os.path.dirname(os.__file__)


def root_of(kind: type) -> str:
    """Return the package or file that a class belongs to."""
    return str(kind.__module__).partition(".")[0]


@cache
def is_built_in(root: str) -> bool:
    """Return whether a package is torch, NumPy, or of the standard library."""
    if root in sys.stdlib_module_names - {"__main__"}:
        # A file of the user's may be called `test.py` or `profile.py`.
        file = getattr(sys.modules.get(root), "__file__", None)
        return file is None or file.startswith(_STANDARD)
    return root in ("torch", "numpy")


@cache
def is_library(module: str | None) -> bool:
    """Return whether a module is part of torch, NumPy, membudget or Python itself."""
    root = (module or "").partition(".")[0]
    return root == "membudget" or is_built_in(root)


@cache
def is_installed(module: str | None) -> bool:
    """Return whether a module was installed with a package, as user code is not."""
    return is_library(module) or bool(_INSTALLED.intersection(_file(module).parts))


def package_of(module: str) -> str:
    """Return the package that a file was installed with; empty for the user's own."""
    root = module.partition(".")[0]
    if is_library(module):
        return root
    if not is_installed(module):
        return ""
    version = getattr(sys.modules.get(root), "__version__", "")
    with suppress(OSError):  # Such as a file in an archive.
        facts = _file(module).stat()
        version = f"{version} {facts.st_size} {facts.st_mtime_ns}"
    return f"{root} {version}"


def _file(module: str | None) -> Path:
    return Path(getattr(sys.modules.get(module or ""), "__file__", None) or ".")
