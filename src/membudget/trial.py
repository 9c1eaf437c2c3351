"""Steps of a fitted model beside plain ones: what they take, and how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from membudget.engine.controls import disable_checkpointing
from membudget.errors import OptionError
from membudget.fitted import Fitted
from membudget.memory import peak
from membudget.profile.cost import synchronised_clock
from membudget.profile.profiling import state_kept
from membudget.step import Step


@dataclass(frozen=True, slots=True)
class Trial:
    """What some steps were measured to take.

    Attributes:
        peak_bytes: The most that a step under the plan allocated.
        planned_seconds: Of each step under the plan.
        plain_seconds: Of each plain step; empty if none was run.
    """

    peak_bytes: int
    planned_seconds: tuple[float, ...]
    plain_seconds: tuple[float, ...]

    @property
    def slowdown(self) -> float | None:
        """The median step under the plan, of the median plain step."""
        if not self.plain_seconds:
            return None
        return median(self.planned_seconds) / median(self.plain_seconds)


def try_steps(fitted: Fitted, step: Step, count: int, plain: bool = True) -> Trial:
    """Run steps under the plan, each followed by a plain one, and measure them.

    A step is forward, loss and backward, from gradients that are `None`. State is put
    back at the end. The peak is that of `fit` or that of one more step, whichever is
    more.

    Args:
        fitted: Its plan is on the model.
        step: The step of the model.
        count: How many steps.
        plain: Whether plain steps can run, too.

    Raises:
        OptionError: If there are no steps to run.
    """
    if count < 1:
        raise OptionError(f"at least 1 step must run; got {count}")
    planned_seconds, plain_seconds = [], []
    with state_kept(step, has_values=True):
        for number in range(count + 1):
            planned = _seconds(step.run, step)
            unplanned = _seconds(lambda: _run_plain(step), step) if plain else None
            if number == 0:
                continue  # Whatever runs for the first time takes longer.
            planned_seconds.append(planned)
            if unplanned is not None:
                plain_seconds.append(unplanned)
        most = peak(step.run).peak_bytes
        step.prepare()
    return Trial(
        max(most, fitted.peak_bytes), tuple(planned_seconds), tuple(plain_seconds)
    )


def _run_plain(step: Step) -> None:
    with disable_checkpointing():
        step.run()


def _seconds(run: Callable[[], object], step: Step) -> float:
    """Return what a step takes; the gradients are gone after it."""
    clock = synchronised_clock()
    start = clock()
    run()
    taken = clock() - start
    step.prepare()
    return taken
