"""The peak of a call by a counting allocator in C++, which shares nothing with `src`.

The first use compiles `counting_allocator.cpp`, which takes seconds, and puts it in
front of torch's CPU allocator, where it stays until the process ends.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")


class NoCompilerError(Exception):
    """The counting allocator cannot be built; the text says what to do."""


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most bytes that live during a call, beyond those before it."""
    gc.collect()
    before = restarted()
    function()
    return so_far() - before


def restarted() -> int:
    """Begin to look for a new peak; return the bytes that live now."""
    return int(_counter().restart())


def so_far() -> int:
    """Return the most bytes that lived since the last restart."""
    return int(_counter().most())


@functools.cache
def _counter() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(_compiled(Path(folder))))
    library.restart.restype = library.most.restype = ctypes.c_int64
    library.install()
    return library


def _compiled(folder: Path) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise NoCompilerError(
            "The field suite measures peaks by an allocator in C++, and this machine "
            "has neither g++ nor clang++. On Debian and Ubuntu: apt install g++"
        )
    installed = Path(torch.__file__).parent
    built = folder / "counting_allocator.so"
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", str(SOURCE)]
    command += ["-o", str(built), f"-I{installed / 'include'}"]
    command += [f"-L{installed / 'lib'}", "-lc10"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise NoCompilerError(
            f"{compiler} could not compile {SOURCE.name}, which the field suite "
            f"measures peaks with; it says:\n{found.stderr[-2000:]}"
        )
    return built
