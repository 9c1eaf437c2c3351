"""Know which tests run which lines, and how long each takes.

Measured once for each file of tests and kept in `.mutants/`, under a hash of everything
that it depends on: all of `src`, the helpers among the tests, and that file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

from tools.mutants.find import Mutant
from tools.mutants.recorder import Recorder
from tools.mutants.session import run_pytest


@dataclass(frozen=True)
class Batch:
    """Tests of one file that run some lines, fastest first.

    Attributes:
        path: The file of tests, relative to the repository.
        tests: Their node ids.
        others: The node ids of the other tests of the file. What it has beside both is
            new, because tests are made of a table that has changed: all of it runs.
        seconds: CPU seconds that collecting the file and running these tests took.
    """

    path: str
    tests: tuple[str, ...]
    others: frozenset[str]
    seconds: float


class Measured:
    """What one file of tests runs."""

    def __init__(self, path: str, data: Path) -> None:
        """Read what `Recorder` wrote."""
        noted = json.loads(data.with_suffix(".json").read_text(encoding="utf-8"))
        self.path = path
        self.collect_s: float = noted["collect_s"]
        self.seconds: dict[str, float] = noted["seconds"]
        self.others: list[str] = noted["others"]
        self._data = CoverageData(basename=str(data))
        self._data.read()
        self._lines = functools.cache(self._data.contexts_by_lineno)

    def tests(self, mutant: Mutant) -> set[str]:
        """Return the tests that passed and run a line where a mutant differs."""
        by_line = self._lines(mutant.path)
        found = {test for line in mutant.lines for test in by_line.get(line, ())}
        return found & self.seconds.keys()


def batches(
    mutant: Mutant, measured: Sequence[Measured], most_s: float = math.inf
) -> list[Batch]:
    """Return the tests that can notice a mutant, those of the fastest file first.

    Args:
        mutant: The mutant.
        measured: What each file of tests runs.
        most_s: Leave out the slowest tests, so that the rest take so many CPU seconds.
    """
    found = [(f.seconds[test], test, f) for f in measured for test in f.tests(mutant)]
    chosen: dict[Measured, list[tuple[float, str]]] = {}
    for seconds, test, file in sorted(found, key=lambda one: one[:2]):
        most_s -= seconds
        if most_s >= 0:
            chosen.setdefault(file, []).append((seconds, test))
    made = [
        Batch(
            file.path,
            tuple(test for _, test in tests),
            frozenset(file.others).union(file.seconds) - {test for _, test in tests},
            file.collect_s + sum(seconds for seconds, _ in tests),
        )
        for file, tests in chosen.items()
    ]
    return sorted(made, key=lambda batch: batch.seconds)


def files_of_tests(root: Path, sources: Sequence[Path]) -> list[Path]:
    """Return the files of tests that are there to notice faults in some source files.

    `tests/` mirrors `src/`: what mirrors another part of the package (`tests/planner/`,
    `tests/test_cli_plan.py`) tests that part, through whichever others; what mirrors
    none, such as `tests/behaviours/`, tests all. And doctests are tests of their file.
    """
    package = root / "src/membudget"
    parts = {path.stem for path in package.iterdir() if not path.stem.startswith("__")}
    parts.add("tools")  # They lie beside the package, and have tests, too.
    wanted = {part_of(path.relative_to(package).parts[0], parts) for path in sources}
    tests = matching(root / "tests", "test_*.py")
    chosen = [
        path
        for path in tests
        if part_of(path.relative_to(root / "tests").parts[0], parts) in {None, *wanted}
    ]
    return chosen + [path for path in sources if ">>> " in path.read_text("utf-8")]


def part_of(name: str, parts: Collection[str]) -> str | None:
    """Return the part of the package that a file or folder is or mirrors, if any."""
    stem = name.removesuffix(".py").removeprefix("test_")
    found = [part for part in parts if stem == part or stem.startswith(f"{part}_")]
    return max(found, key=len, default=None)


def matching(place: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match a pattern, or the file itself."""
    return [place] if place.is_file() else sorted(place.rglob(pattern))


def places(root: Path, cache: Path, files: Sequence[Path]) -> dict[str, Path]:
    """Return for each file of tests where its measurement lies, or will."""
    shared = hashlib.sha256()
    for path in [*matching(root / "src", "*.py"), *matching(root / "tests", "*.py")]:
        if not path.name.startswith("test_"):
            shared.update(path.as_posix().removeprefix(root.as_posix()).encode())
            shared.update(path.read_bytes())
    found = {}
    for path in files:
        digest = shared.copy()
        name = path.relative_to(root).as_posix()
        digest.update(name.encode() + path.read_bytes())
        found[name] = cache / f"{digest.hexdigest()[:32]}.coverage"
    return found


@dataclass(frozen=True)
class Measurement:
    """The job that runs one file of tests under coverage."""

    name: str
    source: str
    data: Path
    # Coverage slows tests down; the limit is for those that never end.
    limit_s: float = 3600.0

    def prepare(self, tree: Path) -> None:
        """Remove what an interrupted run left."""
        self.data.unlink(missing_ok=True)

    def work(self) -> int:
        """Run the tests; the exit code tells nothing, as some may fail."""
        return run_pytest([self.name], [Recorder(Path(self.source), self.data)])

    def clean(self, tree: Path) -> None:
        """Leave the copy: nothing changed."""
