"""What fails today, and why: each entry is expected to fail, and must, or it goes."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

# A pattern of a test's id, which is `CHECK[ARCHITECTURE-WAY]`, and the reason.
KNOWN: dict[str, str] = {}


def known_reasons(identity: str) -> Iterator[str]:
    """Yield why a test is expected to fail, by each entry that matches it."""
    for pattern, reason in KNOWN.items():
        if fnmatchcase(identity, pattern.replace("[", "[[]")):
            yield reason
