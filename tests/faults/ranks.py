"""Run a script in several processes that form a gloo group, and read what each reports.

One process imports what the script imports, and forks a process for each rank: import
takes most of a small test's time. The processes meet through a file, so no port is
needed, and each writes its report as JSON, so that a test asserts on plain values.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

WORLD_SIZE = 2
ROOT = Path(__file__).parents[2]
_DEADLINE_S = 900  # Met by a deadlock alone, however busy the machine is.


class RunWanted(Protocol):
    """Runs what the tests of a file need of a script beside it, on every rank."""

    def __call__(self, script: str, world_size: int = WORLD_SIZE) -> list[Any]:
        """Return each rank's report."""


def run_ranks(
    script: Path,
    folder: Path,
    world_size: int = WORLD_SIZE,
    only: Sequence[str] = (),
) -> list[Any]:
    """Run `script` on every rank.

    Args:
        script: A file whose main block calls `report_rank`.
        folder: An empty folder for the meeting point and the reports.
        world_size: Number of processes.
        only: The cases to run, where the script asks `chosen`; all of them without it.

    Returns:
        Each rank's report.
    """
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    process = subprocess.Popen(
        [sys.executable, __file__, str(script), str(folder), str(world_size), *only],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_DEADLINE_S)
    finally:
        with suppress(ProcessLookupError):  # The ranks are of its group.
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return [
        json.loads((folder / f"report-{rank}.json").read_text())
        for rank in range(world_size)
    ]


def _fork_ranks(script: Path, folder: str, world_size: str, *only: str) -> int:
    """Run `script` in a child for each rank; return how many of them failed.

    Before the fork nothing has run but imports: no thread is lost by it.
    """
    importlib.import_module(".".join(script.relative_to(ROOT).with_suffix("").parts))
    gc.freeze()  # A collection in a rank would copy every page of what is shared.
    given = (folder, world_size, *only)
    ranks = [_fork(script, str(rank), *given) for rank in range(int(world_size))]
    return sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks)


def _fork(script: Path, *arguments: str) -> int:
    child = os.fork()
    if child:
        return child
    failed = 1
    try:
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        failed = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed)


def chosen(names: Iterable[str]) -> list[str]:
    """Return which of its cases a script is to run."""
    only = sys.argv[4:]
    return [name for name in names if not only or name in only]


def report_rank(body: Callable[[int], Any]) -> None:
    """Join the group, run `body` with the rank, and write what it returns.

    The rank, the folder and the number of ranks are the script's arguments.
    """
    rank, folder = _joined(_DEADLINE_S / 2)
    try:
        _write(rank, folder, body(rank))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    _leave()


def report_end(body: Callable[[int, Path], Any]) -> None:
    """Join the group, run `body` with the rank and the folder, and leave the others.

    They hear that this process has ended, and nothing else.
    """
    rank, folder = _joined(_DEADLINE_S / 3)
    _write(rank, folder, body(rank, folder))
    _leave()


def told(error: BaseException) -> dict[str, Any]:
    """Return what a rank reports of an error."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return {"kind": type(error).__name__, "text": text}


def _joined(timeout_s: float) -> tuple[int, Path]:
    rank, folder, world_size = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting-point'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return rank, folder


def _write(rank: int, folder: Path, report: Any) -> None:
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


def _leave() -> None:
    # Past the interpreter's teardown, which races with gloo's threads: about one run in
    # twelve aborts there ("terminate called without an active exception"), also where
    # only torch's own checkpoint ran. The report is written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_fork_ranks(Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]))
