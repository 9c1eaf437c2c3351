"""Find schedules that move storages to a host, besides keeping and recomputing them.

The window of a plan is bytes of the device that nothing else has. A wide one hides
copies, a narrow one leaves more to keep. Which is better is tried: the solver by prices
proposes a schedule for each of a few windows, and the fastest of these is improved.

    ├──┤ the host's window, halved and doubled from 3 % to 50 % of the budget
    ├─┤  ├───┤  ├───────┤  ├───────────────┤
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from membudget.planner.moved import Host
from membudget.planner.prices import priced
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.search import improved, moving_all
from membudget.planner.solver import Solver

LEAST_SHARE, MOST_SHARE = 0.03, 0.5
"""Shares of the budget between which windows are tried, beside the host's."""

NARROWEST = 0
"""The window where nothing fits in any other: the device waits for each copy."""

MOST_OPERATORS = 1000
"""Of larger steps, whose cuts take seconds, every second window is tried; so it is
where schedules are wanted quickly."""

_seconds = attrgetter("seconds")

Solvers = tuple[Simulator, list[Solver]]


class Mover:
    """Finds schedules that move storages, with the window that suits a budget."""

    def __init__(self, simulator: Simulator, host: Host):
        """Store the step and the host, whose window is always tried."""
        self._simulator = simulator
        self._host = host
        self._of_window: dict[int, Solvers] = {}

    def schedules(
        self,
        others: Sequence[Schedule],
        budget_bytes: int,
        quickly: bool,
        is_late: Callable[[], bool],
    ) -> list[Schedule]:
        """Return schedules that fit; see `improved`.

        Args:
            others: Schedules that move nothing, from which to begin, too.
            budget_bytes: What the peak may be.
            quickly: Whether annealing is skipped.
            is_late: Whether no annealing begins any more.
        """
        best: tuple[tuple[bool, float, int], list[Schedule]] | None = None
        for window in (*self._windows(budget_bytes, quickly), NARROWEST):
            if window == NARROWEST and best is not None and not best[0][0]:
                break
            found = [
                schedule
                for solver in self._at(window)[1]
                for schedule in solver.schedules(budget_bytes)
            ]
            worth = min((_worth(s, budget_bytes) for s in found), default=None)
            if worth is not None and (best is None or worth < best[0]):
                best = worth, found
        if best is None:
            return []
        window = _window_of(best[1][0])
        simulator = self._at(window)[0]
        starts = [simulator.schedule(s.calls, s.choices) for s in others]
        kinds = [best[1], starts]
        return improved(simulator, kinds, budget_bytes, quickly, is_late)

    def least(self, schedules: Sequence[Schedule]) -> Iterator[Schedule]:
        """Yield schedules with all that they keep moved, in the narrowest window."""
        simulator = self._at(NARROWEST)[0]
        for schedule in schedules:
            yield moving_all(simulator, schedule)

    def _at(self, window_bytes: int) -> Solvers:
        if window_bytes not in self._of_window:
            host = replace(self._host, window_bytes=window_bytes)
            simulator = self._simulator.with_host(host)
            self._of_window[window_bytes] = simulator, priced(simulator)
        return self._of_window[window_bytes]

    def _windows(self, budget_bytes: int, quickly: bool) -> list[int]:
        """Return the windows to try, the host's first, which is taken among equals."""
        least, most = (int(share * budget_bytes) for share in (LEAST_SHARE, MOST_SHARE))
        is_large = len(self._simulator.graph.operators) > MOST_OPERATORS
        factor = 4 if is_large or quickly else 2
        found = [self._host.window_bytes]
        narrower = found[0] // factor
        while narrower > least:
            found.append(narrower)
            narrower //= factor
        wider = found[0] * factor
        while 0 < wider <= most:
            if wider >= least:
                found.append(wider)
            wider *= factor
        return found


def _worth(schedule: Schedule, budget_bytes: int) -> tuple[bool, float, int]:
    """Return what is compared: whether it fits, its time, and the bytes it moves."""
    over = schedule.simulation.share_over(budget_bytes)
    seconds = schedule.seconds + over * schedule.plain_s
    return over > 0, seconds, schedule.simulation.moves.out_bytes


def _window_of(schedule: Schedule) -> int:
    assert schedule.host is not None, "as it is made for a window"
    return schedule.host.window_bytes
