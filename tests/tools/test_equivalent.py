"""The mutants that are listed as equivalent."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("libcst")
pytest.importorskip("mutmut")

from tools.mutants.equivalent import key_of, read_equivalents
from tools.mutants.find import Mutant, sites

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).parent / "equivalent.toml"

ENTRY = """
[[equivalent]]
path = "source.py"
operator = "number"
line = "x = 1"
becomes = "x = 2"
reason = "{reason}"
"""


def listed(folder: Path, reason: str) -> Path:
    path = folder / "equivalent.toml"
    path.write_text(ENTRY.format(reason=reason))
    return path


def test_a_mutant_is_found_by_what_it_reads_wherever_the_line_stands(tmp_path):
    reasons = read_equivalents(listed(tmp_path, "nobody asks"))
    here = Mutant("source.py", 1, "number", range(1, 2), "x = 1\n", "x = 2\n")
    below = Mutant("source.py", 2, "number", range(2, 3), "\nx = 1\n", "\nx = 2\n")
    other = Mutant("source.py", 1, "number", range(1, 2), "x = 1\n", "x = 3\n")
    assert reasons[key_of(here)] == reasons[key_of(below)] == "nobody asks"
    assert key_of(other) not in reasons


def test_an_entry_without_a_reason_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no reason"):
        read_equivalents(listed(tmp_path, " "))


@pytest.mark.slow
def test_every_listed_mutant_still_exists():
    reasons = read_equivalents(LISTED)
    lines = {line for _, _, line, _ in reasons}
    keys = {
        key_of(mutant)
        for path in {path for path, *_ in reasons}
        for site in sites(ROOT, ROOT / path)
        # Planting every fault of a file would take a minute.
        if site.tree.code.splitlines()[site.line - 1].strip() in lines
        for mutant in site.mutants()
    }
    assert reasons.keys() <= keys
