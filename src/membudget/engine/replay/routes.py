"""Routes: what the operators of calls with one signature read, as far as that is known.

A route says of each operator on a path what it reads, and what autograd saves. It is
drawn up in C++ while a call is recorded, and later calls are compared with it operator
by operator; as long as they agree, no tape is written (Rule 11).
"""

from __future__ import annotations

from typing import Any

from membudget.engine.replay.extension import EXTENSION

_MOST_SURVEYS = 4  # Calls that may be surveyed for a route.
_MOST_LEFT = 3  # Calls in a row that leave a route, until it is given up.

Path = tuple[Any, ...]


class Routes:
    """The route of all calls with one signature, once it is known."""

    __slots__ = ("_left", "_path", "_route", "_surveys")

    def __init__(self) -> None:
        """Create an object that knows no route yet."""
        self._route: Any = None
        self._path: Path | None = None
        self._surveys = _MOST_SURVEYS
        self._left = 0

    def trip(self, path: Path | None, replayer: Any) -> Any:
        """Return a new trip of a call on a path; `None` if no route is known."""
        is_known = self._route is not None and self._path is path
        return EXTENSION[0].trip(self._route, replayer) if is_known else None

    def survey(self) -> Any:
        """Return a new survey, or `None` if there is a route, or were too many."""
        if self._route is not None or not self._surveys:
            return None
        self._surveys -= 1
        return EXTENSION[0].survey()

    def note(self, path: Path | None, route: Any) -> None:
        """Note the route of a path, or `None` if a survey found none."""
        self._path, self._route = path, route

    def end_trip(self, has_arrived: bool) -> None:
        """Note whether a call has followed the route to its end."""
        self._left = 0 if has_arrived else self._left + 1
        if self._left == _MOST_LEFT:
            self._route, self._left = None, 0
