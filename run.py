"""Set up this project and run it, with nothing but Python.

    python3 run.py demo              train a small GPT plain and under regions, compare
    python3 run.py test [--all] ...  lint, types, a share of the tests; or all of them
    python3 run.py test --field ...  other libraries' models (it installs them), loops
    python3 run.py check             lint and types only
    python3 run.py bench NAME ...    one benchmark, such as region_cost
    python3 run.py gpu               on a machine with a GPU: its tests, its figures
    python3 run.py mutants ...       plant faults at random, print what the tests miss
    python3 run.py sentences ...     docstring sentences at random, to be read aloud
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
import re
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
# More test processes than this would spend their time on importing torch.
MOST_WORKERS = 8
# The extra of pyproject.toml that a command needs beside the tests' own.
EXTRAS = {
    "field": "field",
    "mutants": "mutants",
    "peaks": "hf",
    "peers": "field",
    "predicted": "field",
    "planners": "hf",
}
# The tests that run over both recorders of the replay engine, in C++ and in Python: of
# those of conformance, all that are named after the engine, or with `--all` all.
REPLAY_TESTS = (
    *("tests/engine/replay", "tests/replay", "tests/engine/test_rerun.py"),
    "tests/operators/test_planted_faults.py",
    *sorted(map(str, ROOT.glob("tests/conformance/test_replay*.py"))),
)
# The tests on the emulated device: its own and those that run there again, each part in
# a process, because its own count bytes, of which others would leave some.
DEVICE_TESTS = (
    ("tests/emulated",),
    (
        *("tests/conformance", "tests/behaviours", "tests/faults"),
        *("tests/replay", "tests/engine/replay", "tests/memory", "tests/audit"),
        *("tests/profile", "tests/offload", "tests/test_allowance.py"),
        "tests/test_modes.py",
        *("tests/test_attach.py", "tests/test_attempt.py", "tests/test_outcome.py"),
        *("tests/test_race.py", "tests/test_recorded.py", "tests/test_refusal.py"),
        *(
            str(path.relative_to(ROOT))
            for kind in ("apply", "fit", "planning")
            for path in sorted(ROOT.glob(f"tests/test_{kind}*.py"))
        ),
    ),
)
NO_COMPILER = 3  # What building the device returns where it cannot be built.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    arguments = list(arguments)
    cpu = "--cpu" in arguments[:1]
    if cpu:
        arguments.pop(0)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    commands = {
        f.__name__: f for f in (demo, test, check, bench, gpu, mutants, sentences)
    }
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
    rest = [argument for argument in arguments if argument not in {"--all", "--field"}]
    workers = ["-n", str(min(max(2, usable_cores()), MOST_WORKERS))]
    if "--field" in arguments:
        return field([*workers, *rest])
    # A file's tests share what they make, so each file has one worker.
    options, chosen = [*workers, "--dist", "loadfile"], "not slow"
    again = ("not slow and not distributed", *REPLAY_TESTS)
    if "--all" in arguments:  # Some files take long: all workers share them.
        options, chosen = workers, "not field"
        again = ("not field", *REPLAY_TESTS, "tests/conformance")
    failed = failed_checks()
    if not rest and run_python("-m", "membudget", "native") == 0:
        failed |= over_python([*options, "-m", *again])
    if not rest:
        failed |= on_device([*options, "-m", chosen])
    # These tests are last, so that their closing line is: it says what failed before.
    os.environ["MEMBUDGET_FAILED_CHECKS"] = ", ".join(failed)
    tested = run_python("-m", "pytest", "-q", *options, "-m", chosen, *rest)
    return next(iter(failed.values()), tested)


def over_python(options: Sequence[str]) -> dict[str, int]:
    """Test the replay engine over its recorder in Python; return an exit code not 0."""
    print("The replay engine over its recorder in Python, then all over that in C++:")
    os.environ["MEMBUDGET_NATIVE"] = "0"
    code = run_python("-m", "pytest", "-q", *options)
    del os.environ["MEMBUDGET_NATIVE"]
    return {"pytest over Python": code} if code else {}


def on_device(options: Sequence[str]) -> dict[str, int]:
    """Test on the emulated device, in processes of its own; return what failed."""
    print("On the emulated device, then all on the CPU:")
    code = run_python("-m", "tests.emulated")
    if code == NO_COMPILER and not os.environ.get("CI"):
        os.environ["MEMBUDGET_SKIPPED_CHECKS"] = "the emulated device"
        return {}
    for tests in DEVICE_TESTS:
        device = ["-q", "--device=emu", *tests]
        code = code or run_python("-m", "pytest", *device, *options)
    return {"pytest on the emulated device": code} if code else {}


def field(arguments: Sequence[str]) -> int:
    """Train models of other libraries, and loops drawn at random.

    All tests of one model share what it cost to make.
    """
    install_for("field")
    os.environ["HF_HUB_OFFLINE"] = "1"  # Every weight is random: nothing to download.
    options = ["-q", "-m", "field", "--dist", "loadgroup", "tests/field", "tests/loops"]
    return run_python("-m", "pytest", *options, *arguments)


def check(arguments: Sequence[str]) -> int:
    """Run lint and types."""
    return next(iter(failed_checks(*arguments).values()), 0)


def failed_checks(*mypy_arguments: str) -> dict[str, int]:
    """Run every check, whichever fails; return the exit codes of those that did."""
    commands = {
        "ruff format": ("ruff", "format", "--check", "--quiet", "."),
        "ruff check": ("ruff", "check", "--quiet", "."),
        "mypy": ("mypy", *mypy_arguments),
    }
    codes = {name: run_python("-m", *command) for name, command in commands.items()}
    return {name: code for name, code in codes.items() if code}


def usable_cores() -> int:
    """Return how many cores this process may use, which may be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bench(arguments: Sequence[str]) -> int:
    """Run one benchmark by its name."""
    # The other files there, which have no `main`, are what the benchmarks share.
    names = sorted(
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "\ndef main(" in path.read_text(encoding="utf-8")
    )
    if not arguments or arguments[0] not in names:
        print(f"name a benchmark: {', '.join(names)}")
        return 2
    install_for(arguments[0])
    return run_python(f"benchmarks/{arguments[0]}.py", *arguments[1:])


def gpu(arguments: Sequence[str]) -> int:
    """Run the tests that need a GPU, then measure on it; refuse where there is none."""
    ask = "import sys, torch; sys.exit(not torch.accelerator.is_available())"
    if run_python("-c", ask):
        print("torch knows no accelerator here: docs/gpu.md says what was not run")
        return 2
    tested = run_python("-m", "pytest", "-q", "-m", "cuda", *arguments)
    measured = run_python("benchmarks/gpu.py")
    return tested or measured


def mutants(arguments: Sequence[str]) -> int:
    """Test the tests: `run.py mutants --help` lists the options."""
    install_for("mutants")
    return run_python("-m", "tools.mutants", *arguments)


def sentences(arguments: Sequence[str]) -> int:
    """Print docstring sentences: `run.py sentences --help` lists the options."""
    return run_python("-m", "tools.sentences", *arguments)


def install_for(name: str) -> None:
    """Install the extra of a benchmark or tool, unless its packages are there."""
    if name not in EXTRAS:
        return
    import tomllib  # Here, so that an older Python reaches the line that refuses it.

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = tomllib.loads(text)["project"]["optional-dependencies"][EXTRAS[name]]
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in needed]
    find = f"from importlib.metadata import version as v; list(map(v, {names}))"
    if subprocess.call([venv_python(), "-c", find], stderr=subprocess.DEVNULL):
        print(f"Installing {', '.join(names)} ...")
        command = [venv_python(), "-m", "pip", "install", "-q", *needed]
        subprocess.call([*command, "-c", str(ROOT / "constraints.txt")])


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
        if not cpu:
            warn_of_other_wheels()
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


def warn_of_other_wheels() -> None:
    """Say so if wheels of the pinned torch lie ready, but for other Pythons."""
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheels = [
        wheel.name
        for folder in os.environ.get("PIP_FIND_LINKS", "").split()
        for wheel in Path(folder).glob(f"torch-{pin[1] if pin else ''}[+-]*.whl")
    ]
    if wheels and not any(f"-{python}-" in name for name in wheels):
        print(
            f"Note: {wheels[0]} is for another Python than this, {python}. torch may "
            "come as its CUDA build of several GB; use that Python, or add --cpu."
        )


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
            # uv would take every package that PyTorch's index has from there alone, and
            # it has only old versions of some.
            command += ["--index-strategy", "unsafe-best-match"]
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
