"""Set up this project and run it, with nothing but Python.

    python3 run.py demo              train a small GPT plain and under regions, compare
    python3 run.py test [--all] ...  lint, types, tests; --all adds the slow ones
    python3 run.py check             lint and types only
    python3 run.py bench NAME ...    one benchmark, such as region_cost
    python3 run.py help              this text

The first use makes `.venv` and installs what `constraints.txt` pins; later ones find it
ready. `--cpu` before the command installs PyTorch's CPU build from PyTorch's own index,
for machines whose package index offers only the CUDA build.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "ready"
LOCK = ROOT / ".venv.lock"
OLDEST = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    arguments = list(arguments)
    cpu = "--cpu" in arguments[:1]
    if cpu:
        arguments.pop(0)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    commands = {"demo": demo, "test": test, "check": check, "bench": bench}
    if command not in commands:
        print(__doc__)
        return 0 if command in {"help", "--help", "-h"} else 2
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"membudget needs Python 3.11 or newer; this is {found}.")
        return 2
    try:
        set_up(cpu)
    except SetUpError as error:
        print(error)
        return 2
    return commands[command](rest)


def demo(arguments: Sequence[str]) -> int:
    """Run the main job."""
    return run_python("examples/demo.py", *arguments)


def test(arguments: Sequence[str]) -> int:
    """Run lint, types and tests; the exit code is the first that is not 0."""
    rest = [argument for argument in arguments if argument != "--all"]
    markers = [] if "--all" in arguments else ["-m", "not slow"]
    workers = ["-n", str(max(2, os.cpu_count() or 2))]
    checked = check([])
    # Last, so that pytest's closing line is the last one.
    tested = run_python("-m", "pytest", "-q", *workers, *markers, *rest)
    return checked or tested


def check(arguments: Sequence[str]) -> int:
    """Run lint and types."""
    codes = [
        run_python("-m", "ruff", "format", "--check", "--quiet", "."),
        run_python("-m", "ruff", "check", "--quiet", "."),
        run_python("-m", "mypy", *arguments),
    ]
    return next((code for code in codes if code), 0)


def bench(arguments: Sequence[str]) -> int:
    """Run one benchmark by its name."""
    names = sorted(
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if path.stem != "harness"
    )
    if not arguments or arguments[0] not in names:
        print(f"name a benchmark: {', '.join(names)}")
        return 2
    return run_python(f"benchmarks/{arguments[0]}.py", *arguments[1:])


def run_python(*arguments: str) -> int:
    """Run the environment's Python in the project's folder, on one thread a process."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.call([venv_python(), *arguments], cwd=ROOT, env=environment)


class SetUpError(Exception):
    """The environment could not be made; the text says what to do."""


def set_up(cpu: bool) -> None:
    """Make `.venv`, unless it is ready for these requirements and this Python."""
    wanted = fingerprint()
    with only_one_process():
        if STAMP.is_file() and STAMP.read_text() == wanted:
            return
        print("Setting up .venv (once; PyTorch is a download of some 200 MB) ...")
        if VENV.is_symlink():
            VENV.unlink()  # what it points to may serve another checkout
        elif VENV.exists():
            shutil.rmtree(VENV)
        make_venv()
        install(cpu)
        # Written last: an environment without it is made anew.
        STAMP.write_text(wanted)


def fingerprint() -> str:
    """Return a hash of everything that the environment depends on."""
    # Not sys.executable: python3, python3.11 and `.venv`'s own are one Python.
    digest = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def make_venv() -> None:
    """Make an empty environment."""
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        raise SetUpError(
            "This Python cannot make virtual environments. On Debian and Ubuntu, "
            "install what is missing with: apt install python3-venv"
        )
    # The Python under a virtual environment: that may be `.venv`, which is gone now.
    python = getattr(sys, "_base_executable", sys.executable)
    if subprocess.call([python, "-m", "venv", str(VENV)]):
        raise SetUpError(f"{python} could not make {VENV}; it says why above.")


def install(cpu: bool) -> None:
    """Install the project, for editing, with what its tests need."""
    command = [venv_python(), "-m", "pip", "install", "--quiet"]
    environment = dict(os.environ)
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--python", venv_python()]
        # uv reads its own name of this setting.
        if links := environment.get("PIP_FIND_LINKS"):
            environment.setdefault("UV_FIND_LINKS", links)
    if cpu:
        command += ["--extra-index-url", CPU_INDEX]
    command += ["-c", "constraints.txt", "-e", ".[test]"]
    code = subprocess.call(command, cwd=ROOT, env=environment)
    if code:
        raise SetUpError(
            "The packages could not be installed; pip says why above. "
            "constraints.txt pins a PyTorch whose CPU build may not exist for Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}; Python 3.11 is what we test."
        )


def venv_python() -> str:
    """Return the environment's Python."""
    folder = "Scripts" if os.name == "nt" else "bin"
    return str(VENV / folder / "python")


@contextlib.contextmanager
def only_one_process() -> Iterator[None]:
    """Let one set-up at a time touch `.venv`; a second one waits."""
    try:
        import fcntl
    except ImportError:  # Windows; there, two set-ups at once are not kept apart.
        yield
        return
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
