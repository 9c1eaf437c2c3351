"""The seconds that a user gives `fit`, after which it does only what it must."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from membudget.errors import OptionError
from membudget.profile.cost import step_clock


class Deadline:
    """A number of seconds from now, and what was skipped because they had passed.

    What a correct result needs is done in any case.

    Attributes:
        skipped: What was skipped, in words, each once.

    Example:
        >>> deadline = Deadline(0)
        >>> deadline.forbids("annealing"), deadline.skipped
        (True, ['annealing'])
        >>> Deadline(None).forbids("annealing")
        False
    """

    def __init__(
        self, seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count the seconds; `None` means that they never pass.

        Raises:
            OptionError: If `seconds` is negative or no number.
        """
        seconds = math.inf if seconds is None else seconds
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not seconds >= 0:
            raise OptionError(
                f"seconds must be a number that is not negative; got {seconds!r}"
            )
        self._clock = clock
        self._end_s = clock() + seconds
        self._steps_clock = step_clock()
        self._begin_s = self._steps_clock()
        self.skipped: list[str] = []

    @property
    def spent_s(self) -> float:
        """Seconds since the deadline was made, by the clock of steps."""
        return self._steps_clock() - self._begin_s

    def forbids(self, what: str) -> bool:
        """Return whether the seconds have passed, so that something is skipped."""
        has_passed = self._clock() >= self._end_s
        if has_passed and what not in self.skipped:
            self.skipped.append(what)
        return has_passed
