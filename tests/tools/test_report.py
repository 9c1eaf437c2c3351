"""What is printed about mutants."""

from __future__ import annotations

import pytest

pytest.importorskip("libcst")
pytest.importorskip("mutmut")
pytest.importorskip("coverage")

from tools.mutants.equivalent import key_of
from tools.mutants.find import Mutant
from tools.mutants.report import Report
from tools.mutants.verdict import Verdict

MUTANT = Mutant("src/membudget/a.py", 1, "number", range(1, 2), "x = 1\n", "x = 2\n")


def test_a_survivor_is_shown_with_its_diff():
    report = Report({}, seed=7)
    text = report.add(Verdict(MUTANT, None, tests=5, seconds=2.0))
    assert text.splitlines() == [
        "survived    a.py:1 number 2.0 s",
        "            5 tests run these lines",
        "            -x = 1",
        "            +x = 2",
    ]
    assert report.missed == 1


def test_a_caught_mutant_is_shown_with_the_test_that_fails():
    report = Report({}, seed=7)
    text = report.add(Verdict(MUTANT, "tests/test_a.py::test_x", tests=5, seconds=2.0))
    assert text.splitlines()[1].split() == ["by", "tests/test_a.py::test_x"]
    assert report.missed == 0


def test_a_listed_survivor_is_shown_with_its_reason_and_is_not_missed():
    report = Report({key_of(MUTANT): "x is never read"}, seed=7)
    text = report.add(Verdict(MUTANT, None, tests=5, seconds=2.0))
    assert text.startswith("equivalent")
    assert "x is never read" in text
    assert report.missed == 0


def test_a_listed_mutant_that_a_test_does_catch_is_named():
    report = Report({key_of(MUTANT): "x is never read"}, seed=7)
    text = report.add(Verdict(MUTANT, "tests/test_a.py::test_x", tests=5, seconds=2.0))
    assert "yet listed as equivalent: x is never read" in text


def test_the_last_line_has_the_rate_of_all_that_were_drawn():
    report = Report({}, seed=7)
    report.add(Verdict(MUTANT, None, tests=5, seconds=2.0))
    for _ in range(3):
        report.add(Verdict(MUTANT, "tests/test_a.py::test_x", tests=5, seconds=2.0))
    assert report.summary() == (
        "3 of 4 mutants caught (75.0 %), 0 equivalent, 1 survived; 8 CPU s, seed 7"
    )
