"""Which tests of a file run for a mutant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("coverage")
pytest.importorskip("libcst")
pytest.importorskip("mutmut")

from tools.mutants.covering import Batch
from tools.mutants.verdict import Chosen, Trial


def test_new_tests_run_before_the_chosen_ones_and_the_others_do_not():
    batch = Batch("test_a.py", ("slow", "quick"), frozenset({"unrelated"}), 1.0)
    items: Any = [
        SimpleNamespace(nodeid=name)
        for name in ("quick", "unrelated", "slow", "of a table that has changed")
    ]

    Chosen(batch).pytest_collection_modifyitems(items)

    assert [item.nodeid for item in items] == [
        *("of a table that has changed", "slow", "quick"),
    ]


def test_a_child_that_could_not_run_tests_says_nothing_about_its_mutant(tmp_path):
    mutant: Any = SimpleNamespace(path="src/a.py", line=3)
    trial = Trial(mutant, [], tmp_path / "note")

    assert trial.verdict(0, 1.0).caught_by is None
    assert trial.verdict(-9, 1.0).caught_by == "signal 9"
    with pytest.raises(RuntimeError, match=r"src/a\.py:3: no test could run"):
        trial.verdict(255, 1.0)
