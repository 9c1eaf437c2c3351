"""What the type checker says of a mutant counts, as it does in `run.py test`."""

from __future__ import annotations

from pathlib import Path

from tools.mutants.session import first_type_error


def test_a_file_that_mypy_rejects_is_named_with_the_error(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("is_on: bool = None\n")
    (tmp_path / "right.py").write_text("is_on: bool = False\n")

    assert first_type_error(tmp_path, "right.py") == ""
    assert first_type_error(tmp_path, "wrong.py").startswith("wrong.py:1: error: ")
