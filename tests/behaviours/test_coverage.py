"""Tests bear the numbers of `docs/lists`: behaviours, faults of others, findings.

`test_b07_...` is of behaviour 7, `test_row09_...` of fault 9, `test_row_a03_...` of
finding A3. The tests are read, not imported, so that this holds whatever is installed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "docs/lists"

EXCEPTED = {
    27: "an output that always requires a gradient is better not had",
    55: "no planner here orders recomputations by the binomial schedule",
}


def listed(name: str, pattern: str) -> set[str]:
    """Return the numbers that a list of `docs/lists` gives its entries."""
    text = (LISTS / name).read_text(encoding="utf-8")
    return {match.lower() for match in re.findall(pattern, text, re.MULTILINE)}


def cited(pattern: str) -> set[str]:
    """Return the numbers that names of tests bear."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= set(re.findall(pattern, node.name))
    return {re.sub(r"^([ab]?)0+", r"\1", number) for number in found}


BEHAVIOURS = listed("behaviours.md", r"^(\d+)\. ")


def test_every_behaviour_has_a_test_or_a_reason_to_have_none() -> None:
    assert BEHAVIOURS - cited(r"^test_b(\d+)_") == set(map(str, EXCEPTED))


def test_no_test_names_a_behaviour_that_is_not_listed() -> None:
    assert cited(r"^test_b(\d+)_") <= BEHAVIOURS


def test_no_test_names_a_fault_that_is_not_listed() -> None:
    assert cited(r"^test_row(\d+)_") <= listed("faults.md", r"^\| (\d+) \|")


def test_every_finding_has_a_test_and_every_test_a_finding() -> None:
    # A14 is an exception that the docs name, not a fault.
    findings = listed("findings.md", r"^\| ([AB]\d+) \|")
    assert cited(r"^test_row_([ab]\d+)_") == findings - {"a14"}
