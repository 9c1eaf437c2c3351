"""The mutants that no test can tell from the original, each with the reason.

They are known by what they read, not by line numbers, so an edit elsewhere in the file
leaves them listed, and an edit of the line itself asks for a new look.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools.mutants.find import Mutant

Key = tuple[str, str, str, str]


def read_equivalents(path: Path) -> dict[Key, str]:
    """Return the reasons that a file lists.

    Raises:
        ValueError: An entry gives no reason.
    """
    listed = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    reasons = {}
    for entry in listed:
        if not entry["reason"].strip():
            raise ValueError(f"{path}: {entry['path']}: {entry['line']} has no reason")
        key = (entry["path"], entry["operator"], entry["line"], entry["becomes"])
        reasons[key] = entry["reason"]
    return reasons


def key_of(mutant: Mutant) -> Key:
    """Return what a mutant is known by: its file, operator and first changed line."""
    diff = mutant.diff()
    old = next((line[1:].strip() for line in diff if line.startswith("-")), "")
    new = next((line[1:].strip() for line in diff if line.startswith("+")), "")
    return mutant.path, mutant.operator, old, new
