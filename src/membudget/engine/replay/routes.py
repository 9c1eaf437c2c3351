"""Routes: what the operators of calls with one signature read, as far as that is known.

A route says of each operator on a path what it reads, and what autograd saves. It is
drawn up in C++ while a call is recorded, and later calls are compared with it operator
by operator; as long as they agree, no tape is written (Rule 11).

Calls of one signature may go different ways: a layer is dropped, an expert gets no
token. Their routes are the same up to a fork. A call begins on the latest, and goes on
along another where it parts from that; where it parts from all, what comes before is
the beginning of a new one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from membudget.engine.replay.extension import EXTENSION

_MOST_ROUTES = 32  # Each takes about 450 bytes an operator.
_MOST_SURVEYS = 4  # Calls that may be surveyed in vain, for each route that is found.
_MOST_LEFT = 16  # Calls that may leave all routes, less two for each that has arrived.

Path = tuple[Any, ...]


class Known(NamedTuple):
    """A route, the path on which it was found, and whether that differs from a plan."""

    path: Path | None
    route: Any
    differs: bool


class Routes:
    """The routes of all calls with one signature.

    Attributes:
        known: The routes, those that were followed or found last first.
        is_due: Whether calls are surveyed, whatever is known, until that finds another.
    """

    __slots__ = ("_left", "_surveys", "is_due", "known")

    def __init__(self) -> None:
        """Create an object that knows no route yet."""
        self.known: tuple[Known, ...] = ()
        self.is_due = False
        self._surveys = _MOST_SURVEYS
        self._left = 0

    def survey(self) -> Any:
        """Return a new survey, or `None` if there were too many in vain."""
        if not self._surveys:
            self.is_due = False
            return None
        self._surveys -= 1
        return EXTENSION[0].survey()

    def give_back(self) -> None:
        """Allow one survey more, as one could not tell yet."""
        self._surveys = min(self._surveys + 1, _MOST_SURVEYS)

    def note(self, found: Known) -> None:
        """Note a route, in place of one that says the same."""
        if self._left >= _MOST_LEFT:
            return
        others = [k for k in self.known if not EXTENSION[0].same(k.route, found.route)]
        if len(others) == len(self.known):
            self._surveys, self.is_due = _MOST_SURVEYS, False
        self.known = (found, *others[: _MOST_ROUTES - 1])

    def end_trip(self, last: Known, has_arrived: bool, is_surveyed: bool) -> None:
        """Note that a call has followed routes, and whether it did to the end.

        Args:
            last: The route that it has followed in the end.
            has_arrived: Whether it has left none.
            is_surveyed: Whether the rest of a call that has is surveyed.
        """
        if has_arrived:
            self._left = max(0, self._left - 2)
            if self.known and self.known[0] is not last:
                self.known = (last, *(k for k in self.known if k is not last))
            return
        self._left += 1
        self.is_due = not is_surveyed
        if self._left >= _MOST_LEFT:
            self.known, self._surveys, self.is_due = (), 0, False
