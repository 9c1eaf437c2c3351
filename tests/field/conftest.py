"""Tests of one architecture share a process; known failures are marked as such.

At the end stand how many peaks were compared, and how far predictions were off.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from tests.field.known import known_reasons
from tests.field.registry import CASES

MEDIAN_ERROR_IS_WITHIN = 0.001


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests by architecture, and mark those that are known to fail."""
    for item in items:
        if not isinstance(item, pytest.Function) or "field" not in item.keywords:
            continue
        callspec = getattr(item, "callspec", None)
        if case := callspec and callspec.params.get("architecture"):
            item.add_marker(pytest.mark.xdist_group(case.name))
        for reason in known_reasons(item.name):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _errors(reporter: pytest.TerminalReporter) -> Iterator[float]:
    for report in (r for reports in reporter.stats.values() for r in reports):
        for name, value in getattr(report, "user_properties", ()):
            if name == "error of the predicted peak" and report.when == "call":
                yield value


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where predicted peaks are off by too much in the median."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    errors = list(_errors(reporter)) if reporter else []
    is_whole = len(errors) >= len(CASES)  # A median of some says nothing of all.
    if is_whole and statistics.median(errors) > MEDIAN_ERROR_IS_WITHIN:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how far the predicted peaks were off."""
    if errors := list(_errors(terminalreporter)):
        terminalreporter.line(
            f"field: {len(errors)} predicted peaks, off by "
            f"{statistics.median(errors):.4%} in the median (at most "
            f"{MEDIAN_ERROR_IS_WITHIN:.1%}), {max(errors):.2%} at worst"
        )
