"""The recorder in C++ is compiled once, found again, and never half there.

The compilers here are scripts, which say that they ran and write what they are told to.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from membudget.engine import native
from membudget.engine.native.library import RECORDER, Library, NoExtensionError

SUCCEEDS = 'for output; do :; done; echo library > "$output"'
FAILS = "echo no such header >&2; exit 1"
NEVER_ENDS = "exec sleep 1000"

build, find = RECORDER.build, RECORDER.find


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEMBUDGET_CACHE", str(folder))
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return how to install a script as the compiler; a line of `runs` is one run."""

    def install(script: str) -> Path:
        path, runs = tmp_path / "compiler", tmp_path / "runs"
        path.write_text(f"#!/bin/sh\necho run >> {runs}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return runs

    return install


def test_a_library_is_compiled_once_and_found_again(cache: Path, compiler) -> None:
    runs = compiler(SUCCEEDS)
    assert find() is None
    assert build() == cache / RECORDER.file_name == build() == find()
    assert runs.read_text() == "run\n"
    assert build(again=True) == cache / RECORDER.file_name
    assert runs.read_text() == "run\nrun\n"


def test_processes_that_need_it_at_once_compile_it_once(compiler) -> None:
    runs = compiler(f"sleep 0.3; {SUCCEEDS}")
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build(), range(4)))
    assert len(paths) == 1
    assert runs.read_text() == "run\n"


def test_a_build_that_was_killed_leaves_nothing_in_the_way(
    cache: Path, compiler
) -> None:
    runs = compiler(NEVER_ENDS)
    program = "from membudget.engine.native.library import RECORDER; RECORDER.build()"
    killed = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    while not runs.exists():
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    compiler(SUCCEEDS)
    assert build().read_text() == "library\n"


def test_a_compiler_that_failed_is_not_asked_again(cache: Path, compiler) -> None:
    runs = compiler(FAILS)
    for _ in range(2):
        with pytest.raises(NoExtensionError, match=r"did not compile; see .*\.log"):
            build()
    assert runs.read_text() == "run\n"
    (log,) = cache.glob("*.log")
    assert "no such header" in log.read_text()
    assert list(cache.glob("*.tmp")) == []


def test_a_failed_build_can_be_repeated_on_request(cache: Path, compiler) -> None:
    compiler(FAILS)
    with pytest.raises(NoExtensionError, match="did not compile"):
        build()
    compiler(SUCCEEDS)
    assert build(again=True) == find()
    assert list(cache.glob("*.log")) == []


def test_without_a_compiler_an_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoExtensionError, match="there is no C\\+\\+ compiler"):
        build()
    assert RECORDER.why_not() == "there is no C++ compiler"


def test_a_cache_that_is_no_folder_is_an_error(cache: Path, compiler) -> None:
    compiler(SUCCEEDS)
    cache.write_text("")
    with pytest.raises(NoExtensionError, match="its folder cannot be used"):
        build()


def test_a_library_beside_the_sources_is_preferred(tmp_path: Path, compiler) -> None:
    compiler(SUCCEEDS)
    beside = Library("beside", tmp_path, "a library")
    beside.build()
    (tmp_path / beside.file_name).write_text("from a wheel")
    assert beside.find() == tmp_path / beside.file_name


def test_the_name_changes_with_a_source(tmp_path: Path) -> None:
    names = []
    for text in ("int one;", "int two;"):
        (tmp_path / "module.cpp").write_text(text)
        names.append(Library("changing", tmp_path, "a library").file_name)
    assert names[0] != names[1]


def test_the_status_says_which_recorder_serves(
    compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_LOADED", [])
    monkeypatch.setattr(native, "_WHY_NOT", [])
    monkeypatch.setenv("MEMBUDGET_NATIVE", "0")
    assert native.status() == "Python (MEMBUDGET_NATIVE=0)"
    monkeypatch.setenv("MEMBUDGET_NATIVE", "1")
    compiler(FAILS)
    assert native.status() == "C++, which the first replay region builds"
    assert native.extension() is None
    assert native.status().startswith("Python; of the one in C++: it did not compile")
    monkeypatch.setattr(native, "_LOADED", [object()])
    assert native.status() == "C++"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_first_replay_region_builds_the_recorder_and_uses_it(cache: Path) -> None:
    program = """\
import torch
import membudget as mb
from membudget.engine import native

def block(x):
    return torch.nn.functional.dropout(x.sin().exp(), 0.5).relu_()

gradients = []
for run in (mb.checkpoint, lambda f, x, **_: f(x)):
    torch.manual_seed(0)
    x = torch.linspace(0, 1, 6, requires_grad=True)
    run(block, x, engine="replay").sum().backward()
    gradients.append(x.grad)
print(native.status(), torch.equal(*gradients))
"""
    environment = {**os.environ, "MEMBUDGET_NATIVE": "1"}
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, env=environment, text=True)
    assert printed == "C++ True\n"
    assert len(list(cache.glob("*.so"))) == 1
