"""Records as columns, so that a file stores each field name only once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_COLUMNS = {"must_keep": "is_pinned"}
"""Fields whose column has another name in files of version 1."""


def to_table(records: tuple[Any, ...], kind: type) -> dict[str, Any]:
    """Return records of one dataclass as columns, by field name."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        _COLUMNS.get(name, name): [getattr(record, name) for record in records]
        for name in names
    }


def from_table(table: Mapping[str, Any], kind: Any) -> tuple[Any, ...]:
    """Return the records whose columns `to_table` returned."""
    names = [field.name for field in dataclasses.fields(kind)]
    columns = [map(_tuples, table[_COLUMNS.get(name, name)]) for name in names]
    return tuple(kind(*row) for row in zip(*columns, strict=True))


def _tuples(cell: Any) -> Any:
    return tuple(cell) if isinstance(cell, list) else cell  # JSON has no tuples.
