"""Run jobs in forked processes, each in a copy of the repository.

Importing torch takes seconds and most mutants fall in less, so this process imports it
once and a child begins from there. This process never imports membudget, computes
nothing and starts no thread: a fork would not survive any of them.

Limits are on CPU time, so the load of the machine decides no verdict. A job that waits
for ever takes none; it is ended when it has taken next to none for `IDLE_S`, which a
job that wants to run has not on any machine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

# What tests import that takes long and does not depend on membudget.
PRELOADED = (
    *("torch", "torch._dynamo", "torch.nn.utils.parametrize", "torch.utils.checkpoint"),
    *("torch.func", "torch.profiler", "numpy", "pytest", "rich.table"),
)
IDLE_S = 60.0
IDLE_CPU_S = 0.6
LOOK_S = 2.0
MOST_BYTES = 12 << 30
TICK_S = 0.02
RAISED = 255
"""The exit code of a child whose job raised."""


class Job(Protocol):
    """What one child does."""

    @property
    def limit_s(self) -> float:
        """The most CPU seconds it may take."""

    def prepare(self, tree: Path) -> None:
        """Change a copy of the repository for the child, in this process."""

    def work(self) -> int:
        """Return an exit code from 0 to 255; called in the child, in the copy."""

    def clean(self, tree: Path) -> None:
        """Take back what `prepare` changed, in this process."""


J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class Ended(Generic[J]):
    """How a job ended: the exit code, negative for a signal, and its CPU seconds."""

    job: J
    code: int
    seconds: float


def preload() -> None:
    """Import what every child needs."""
    for name in PRELOADED:
        importlib.import_module(name)


def run_jobs(jobs: Sequence[J], trees: Sequence[Path]) -> Iterator[Ended[J]]:
    """Run jobs, as many at a time as there are copies; yield each as it ends."""
    waiting, free = list(reversed(jobs)), list(trees)
    running: dict[int, tuple[J, Path, Patience]] = {}
    try:
        while waiting or running:
            while waiting and free:
                job, tree = waiting.pop(), free.pop()
                running[start(job, tree)] = (job, tree, Patience())
            for pid in list(running):
                job, tree, patience = running[pid]
                if (ended := look_at(pid, job, patience)) is not None:
                    del running[pid]
                    job.clean(tree)
                    free.append(tree)
                    yield ended
            time.sleep(TICK_S)
    finally:
        for pid in running:
            end_group(pid)


class Patience:
    """Knows for how long a job has taken next to no CPU time."""

    def __init__(self) -> None:
        """Begin when the job does."""
        self._looked = self._since = time.monotonic()
        self._seconds = 0.0

    def is_over(self, pid: int) -> bool:
        """Return whether a job only waits; looks now and then."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        seconds = seconds_of_group(pid)
        if seconds - self._seconds > IDLE_CPU_S:
            self._since, self._seconds = now, seconds
        return now - self._since > IDLE_S


def seconds_of_group(pid: int) -> float:
    """Return the CPU seconds of a child and of the processes that it started."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may hold anything: state, parent, group, ...
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # It has ended.
            continue
        if int(fields[2]) == pid:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def start(job: Job, tree: Path) -> int:
    """Fork a child for a job and return its process id."""
    job.prepare(tree)
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = RAISED
    try:
        become_child(tree, job.limit_s)
        code = job.work()
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def become_child(tree: Path, limit_s: float) -> None:
    """Move this process into a copy: folder, imports, output and limits."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(tree / "log.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    here = {os.getcwd(), ""}
    os.chdir(tree)
    sys.path[:] = [str(tree / "src"), *(path for path in sys.path if path not in here)]
    os.environ["PYTHONPATH"] = str(tree / "src")
    seconds = int(limit_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def look_at(pid: int, job: J, patience: Patience) -> Ended[J] | None:
    """Return how a child ended, or None while it runs."""
    done, status, usage = os.wait4(pid, os.WNOHANG)
    if not done and patience.is_over(pid):
        end_group(pid)
        done, status, usage = os.wait4(pid, 0)
    if not done:
        return None
    end_group(pid)  # what it started and left behind
    code = os.waitstatus_to_exitcode(status)
    return Ended(job, code, usage.ru_utime + usage.ru_stime)


def end_group(pid: int) -> None:
    """End a child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
