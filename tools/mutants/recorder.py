"""A pytest plugin that notes which lines each test runs and how long it takes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest


class Recorder:
    """Runs under pytest and writes what it noted beside the coverage data.

    Attributes:
        seconds: CPU seconds of each test that passed, by its node id.
        others: The node ids of the other tests.
    """

    def __init__(self, source: Path, data: Path) -> None:
        """Watch the files under a folder; write coverage data to a file."""
        self.seconds: dict[str, float] = {}
        self.others: set[str] = set()
        self._started = time.process_time()
        self._collect_s = 0.0
        self._data = data
        # Relative, as each copy of the repository lies elsewhere.
        self._coverage: Any = coverage.Coverage(
            data_file=str(data), config_file=False, source=[str(source)]
        )
        self._coverage.set_option("run:relative_files", True)
        # The other cores of coverage know no contexts.
        self._coverage.set_option("run:core", "ctrace")
        # Some files of tests run nothing that is watched; where warnings are errors,
        # that would be one.
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])

    def pytest_collection_finish(self) -> None:
        """Note what importing and collecting took, and start to watch."""
        self._collect_s = time.process_time() - self._started
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note the lines of a test, its fixtures' too, under the test's name."""
        self._coverage.switch_context(item.nodeid)
        started = time.process_time()
        self.seconds[item.nodeid] = 0.0
        result = yield
        if item.nodeid in self.seconds:
            self.seconds[item.nodeid] = time.process_time() - started
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Forget a test that does not pass: it would notice any fault."""
        if not report.passed:
            self.seconds.pop(report.nodeid, None)
            self.others.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write everything."""
        self._coverage.stop()
        self._coverage.save()
        noted = {
            "collect_s": self._collect_s,
            "seconds": self.seconds,
            "others": sorted(self.others),
        }
        partial = self._data.with_suffix(".partial")
        partial.write_text(json.dumps(noted), encoding="utf-8")
        # Last, and at once: a measurement without it did not end.
        partial.replace(self._data.with_suffix(".json"))
