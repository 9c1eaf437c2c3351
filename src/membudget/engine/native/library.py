"""Compile the recorder in C++ once, and find it again.

The extension is one shared library, compiled by a plain call of the compiler against
the headers of the installed torch. Its name contains a hash of everything it depends
on: sources, torch, Python and compiler flags. It is looked up beside the sources, where
a wheel that was built for this torch has it, and in the user's cache folder.

Several processes may need it at once (the ranks of a job): a file lock lets one of them
compile. The kernel releases the lock of a process that is killed, and the library
appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from membudget.errors import MembudgetError
from membudget.progress import stage

SOURCES = Path(__file__).parent

# `NDEBUG`, because torch's libraries are built with it: some of its headers differ.
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-DNDEBUG")


class NoExtensionError(MembudgetError):
    """The recorder in C++ cannot be built here; the message says why."""


@cache
def library_name() -> str:
    """Return the file name of the library, unique to all that it depends on."""
    digest = hashlib.sha256(repr((_FLAGS, torch.compiled_with_cxx11_abi())).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    tag = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return f"recorder-{torch.__version__}-{tag}-{digest.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Return the folder for libraries: `MEMBUDGET_CACHE`, or the user's cache."""
    if chosen := os.environ.get("MEMBUDGET_CACHE"):
        return Path(chosen)
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "membudget"


def find() -> Path | None:
    """Return the library if it was built already."""
    for folder in (SOURCES, cache_folder()):
        if (path := folder / library_name()).is_file():
            return path
    return None


def why_not() -> str:
    """Return why the library cannot be built here; an empty text if it may be."""
    try:
        if find() is None:
            _compiler()
    except NoExtensionError as error:
        return str(error)
    return ""


def build(again: bool = False) -> Path:
    """Return the library; compile it if it is missing, or if `again` is set.

    Raises:
        NoExtensionError: No compiler, or the compiler failed, now or the last time.
    """
    found = find()
    if found is not None and not again:
        return found
    compiler = _compiler()
    path = cache_folder() / library_name()
    failed = path.with_suffix(".log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if path.is_file() and not again:
                return path  # Another process has built it meanwhile.
            if failed.is_file() and not again:
                raise NoExtensionError(f"it did not compile; see {failed}")
            _compile(compiler, path, failed)
    except OSError as error:
        raise NoExtensionError(f"its folder cannot be used: {error}") from None
    return path


def _compiler() -> str:
    """Return the path of a C++ compiler."""
    if sys.platform != "linux":
        raise NoExtensionError("it is built on Linux alone")
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name))), "")
    if not found:
        raise NoExtensionError("there is no C++ compiler")
    python = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not python.is_file():
        raise NoExtensionError("the headers of Python are not installed")
    return found


def _compile(compiler: str, path: Path, failed: Path) -> None:
    """Compile into a temporary file, then give it the library's name at once."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *_arguments(), "-o", str(temporary)]
    try:
        with stage("compiling the recorder in C++, once; it takes half a minute"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            failed.write_text(f"{' '.join(command)}\n{done.stderr}", encoding="utf-8")
            raise NoExtensionError(f"it did not compile; see {failed}")
        temporary.replace(path)
        failed.unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)


def _arguments() -> list[str]:
    root = Path(torch.__file__).parent
    headers = root / "include"
    return [
        *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{headers}",
        f"-isystem{headers / 'torch/csrc/api/include'}",
        f"-isystem{sysconfig.get_paths()['include']}",
        str(SOURCES / "module.cpp"),
        f"-L{root / 'lib'}",
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; a process that ends, in whatever way, releases it."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
