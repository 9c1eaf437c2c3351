"""Numbers and words in lists and dicts that a recompute must not move on (Rule 6).

A recompute runs the function's Python again, and nothing brings a counter in a dict
back. In a call that is verified this is found: what was bound before is noted,
and what the recompute bound anew is put back and said. What it appended is let be: a
log, a list of losses that was summed already.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))


class Counters:
    """The plain values in containers that a function reaches."""

    __slots__ = ("_noted",)

    def __init__(self, containers: Iterable[Any]):
        """Note what is bound now."""
        noted = ((held, _values(held)) for held in containers)
        self._noted = [(held, values) for held, values in noted if values]

    def put_back(self) -> Any:
        """Bind again what was bound; return the first container that needed it."""
        found = None
        for held, values in self._noted:
            now = _values(held)
            for key, value in values.items():
                if key in now and repr(now[key]) != repr(value):
                    held[key] = value
                    found = found if found is not None else held
        return found


def _values(held: Any) -> dict[Any, Any]:
    if isinstance(held, dict):
        items: Iterable[tuple[Any, Any]] = list(held.items())
    elif isinstance(held, list):
        items = enumerate(held)
    else:
        return {}
    return {key: value for key, value in items if type(value) in _PLAIN}
