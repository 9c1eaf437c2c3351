"""Run the tests that can notice a mutant, until one does, and then the type checker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.mutants.children import RAISED
from tools.mutants.covering import Batch
from tools.mutants.find import Mutant
from tools.mutants.session import first_type_error, run_pytest
from tools.mutants.trees import write

# Covering tests took `seconds` under coverage; what takes this many times as long, and
# then some for the imports, never ends.
GENEROUS = 4
IMPORTS_S = 20.0
# The first time in a copy; later ones look at what has changed.
TYPES_S = 180.0


@dataclass(frozen=True)
class Verdict:
    """What the tests say of one mutant.

    Attributes:
        mutant: The mutant.
        caught_by: The test that failed, what mypy said, or why there is neither; None
            if nothing failed.
        tests: How many tests can notice it.
        seconds: CPU seconds it took.
    """

    mutant: Mutant
    caught_by: str | None
    tests: int
    seconds: float


class Chosen:
    """A pytest plugin that runs new tests, and then some others in their order."""

    def __init__(self, batch: Batch) -> None:
        """Choose the tests of a batch."""
        self._others = batch.others
        self._order = {name: number for number, name in enumerate(batch.tests)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        items[:] = [item for item in items if item.nodeid not in self._others]
        items.sort(key=lambda item: self._order.get(item.nodeid, -1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the test that fails."""
        if report.failed:
            self.failed = report.nodeid


@dataclass(frozen=True)
class Trial:
    """The job that tries one mutant.

    Attributes:
        mutant: The mutant.
        batches: The tests that can notice it.
        note: Where the child writes which test failed.
    """

    mutant: Mutant
    batches: Sequence[Batch]
    note: Path

    @property
    def limit_s(self) -> float:
        """The most CPU seconds it may take."""
        return GENEROUS * sum(b.seconds for b in self.batches) + IMPORTS_S + TYPES_S

    def prepare(self, tree: Path) -> None:
        """Plant the fault."""
        write(tree, self.mutant.path, self.mutant.after)

    def work(self) -> int:
        """Run the tests, then mypy; note what fails first, and return 1 if any does."""
        for batch in self.batches:
            chosen = Chosen(batch)
            if run_pytest([batch.path, "-x", "--tb=short"], [chosen]):
                failed = chosen.failed or f"collecting {batch.path}"
                self.note.write_text(failed, encoding="utf-8")
                return 1
        if error := first_type_error(Path.cwd(), "src/membudget"):
            self.note.write_text(f"mypy: {error}", encoding="utf-8")
            return 1
        return 0

    def clean(self, tree: Path) -> None:
        """Take the fault out again."""
        write(tree, self.mutant.path, self.mutant.before)

    def verdict(self, code: int, seconds: float) -> Verdict:
        """Read how the child ended.

        Raises:
            RuntimeError: If the child could not run the tests, which says nothing about
                the mutant.
        """
        if code == RAISED:
            raise RuntimeError(
                f"{self.mutant.path}:{self.mutant.line}: no test could run; is the "
                "environment still there?"
            )
        tests = sum(len(batch.tests) for batch in self.batches)
        caught_by = None
        if code:
            noted = self.note.exists()
            caught_by = self.note.read_text("utf-8") if noted else died(code)
        return Verdict(self.mutant, caught_by, tests, seconds)


def died(code: int) -> str:
    """Say how a child ended that could not note which test failed."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
