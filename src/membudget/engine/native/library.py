"""Compile a library in C++ once, and find it again: the recorder, for one.

A library is compiled from the folder of its sources by a plain call of the compiler,
against the headers of the installed torch. Its name contains a hash of everything it
depends on: sources, torch, Python and compiler flags. It is looked up beside the
sources, where a wheel that was built for this torch has it, and in the user's cache
folder.

Several processes may need it at once (the ranks of a job): a file lock lets one of them
compile. The kernel releases the lock of a process that is killed, and the library
appears under its name only when it is complete.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from membudget.errors import MembudgetError
from membudget.progress import stage

# `NDEBUG`, because torch's libraries are built with it: some of its headers differ.
_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-DNDEBUG")


class NoExtensionError(MembudgetError):
    """The library cannot be built here; the message says why."""


@dataclass(frozen=True)
class Library:
    """One library and how it is built.

    Attributes:
        name: What its file names begin with.
        sources: The folder of its sources; `module.cpp` includes the others.
        what: What it is, for a person.
        optimize: The flag that says how much the compiler optimizes.
    """

    name: str
    sources: Path
    what: str
    optimize: str = "-O2"

    @cached_property
    def file_name(self) -> str:
        """The file name of the library, unique to all that it depends on."""
        flags = (self.optimize, *_FLAGS, torch.compiled_with_cxx11_abi())
        digest = hashlib.sha256(repr(flags).encode())
        for pattern in ("*.h", "*.cpp"):
            for source in sorted(self.sources.glob(pattern)):
                digest.update(source.read_bytes())
        tag = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
        return f"{self.name}-{torch.__version__}-{tag}-{digest.hexdigest()[:16]}.so"

    def find(self) -> Path | None:
        """Return the library if it was built already."""
        for folder in (self.sources, cache_folder()):
            if (path := folder / self.file_name).is_file():
                return path
        return None

    def why_not(self) -> str:
        """Return why the library cannot be built here; an empty text if it may be."""
        try:
            if self.find() is None:
                _compiler()
        except NoExtensionError as error:
            return str(error)
        return ""

    def build(self, again: bool = False) -> Path:
        """Return the library; compile it if it is missing, or if `again` is set.

        Raises:
            NoExtensionError: No compiler, or the compiler failed, now or the last time.
        """
        found = self.find()
        if found is not None and not again:
            return found
        compiler = _compiler()
        path = cache_folder() / self.file_name
        failed = path.with_suffix(".log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                if path.is_file() and not again:
                    return path  # Another process has built it meanwhile.
                if failed.is_file() and not again:
                    raise NoExtensionError(f"it did not compile; see {failed}")
                self._compile(compiler, path, failed)
        except OSError as error:
            raise NoExtensionError(f"its folder cannot be used: {error}") from None
        return path

    def _compile(self, compiler: str, path: Path, failed: Path) -> None:
        """Compile into a temporary file, then give it the library's name at once."""
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        source = str(self.sources / "module.cpp")
        command = [compiler, self.optimize, *_FLAGS, *_headers(), source]
        command += [*_libraries(), "-o", str(temporary)]
        try:
            with stage(f"compiling {self.what}, once; it takes half a minute"):
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False
                )
            if done.returncode:
                report = f"{' '.join(command)}\n{done.stderr}"
                failed.write_text(report, encoding="utf-8")
                raise NoExtensionError(f"it did not compile; see {failed}")
            temporary.replace(path)
            failed.unlink(missing_ok=True)
        finally:
            temporary.unlink(missing_ok=True)

    def imported(self, module: str) -> Any:
        """Return the extension module in the library, built if necessary."""
        path = str(self.build())
        loader = ExtensionFileLoader(module, path)
        spec = importlib.util.spec_from_file_location(module, path, loader=loader)
        assert spec is not None
        extension = importlib.util.module_from_spec(spec)
        loader.exec_module(extension)
        return extension


RECORDER = Library("recorder", Path(__file__).parent, "the recorder in C++")


def cache_folder() -> Path:
    """Return the folder for libraries: `MEMBUDGET_CACHE`, or the user's cache."""
    if chosen := os.environ.get("MEMBUDGET_CACHE"):
        return Path(chosen)
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "membudget"


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


def _headers() -> list[str]:
    headers = Path(torch.__file__).parent / "include"
    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{headers}",
        f"-isystem{headers / 'torch/csrc/api/include'}",
        f"-isystem{sysconfig.get_paths()['include']}",
    ]


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch_python"]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; a process that ends, in whatever way, releases it."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
