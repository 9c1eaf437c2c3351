"""Read records from the plain data of a file, or say what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from membudget.errors import PlanError

_MOST = 1 << 63


def record_of(data: Any, kind: Any, where: str) -> Any:
    """Convert plain data to a record, a tuple of records, a number or a string.

    Args:
        data: What JSON has.
        kind: The dataclass or the type of a field that it must be.
        where: Its name, for errors.

    Raises:
        PlanError: If a field is missing or has the wrong type.
    """
    if is_dataclass(kind):
        make: Any = kind
        fields = _fields(make).items()
        return make(*(field_of(data, name, of, where) for name, of in fields))
    if get_origin(kind) is tuple:
        if not isinstance(data, list | tuple):
            raise PlanError(f"{where} must be list; it is {_shown(data)}")
        of = get_args(kind)[0]
        return tuple(record_of(x, of, f"{where}[{i}]") for i, x in enumerate(data))
    if get_origin(kind) is Literal:
        if data not in get_args(kind):
            known = " or ".join(map(repr, get_args(kind)))
            raise PlanError(f"{where} must be {known}; it is {_shown(data)}")
        return data
    if type(data) is int and kind in (int, float) and abs(data) >= _MOST:
        raise PlanError(f"{where} must be less than 2**63; it has more digits")
    if kind is float and type(data) is int:
        return float(data)
    if type(data) is not kind:
        raise PlanError(f"{where} must be {kind.__name__}; it is {_shown(data)}")
    if kind is float and not math.isfinite(data):
        raise PlanError(f"{where} must be a finite number; it is {data!r}")
    return data


def field_of(data: Any, name: str, kind: Any, where: str) -> Any:
    """Convert one field of plain data; see `record_of`.

    Raises:
        PlanError: If it is missing or has the wrong type.
    """
    if not isinstance(data, Mapping):
        raise PlanError(f"{where} must be an object; it is a {type(data).__name__}")
    if name not in data:
        raise PlanError(f"{where}.{name} is missing: the plan is not whole")
    return record_of(data[name], kind, f"{where}.{name}")


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _shown(data: Any) -> str:
    try:
        return f"{data!r:.40}"
    except (RecursionError, ValueError):  # Nested too deeply, or too many digits.
        return f"a huge {type(data).__name__}"
