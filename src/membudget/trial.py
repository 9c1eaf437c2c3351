"""Measured steps of a fitted model, planned and plain in turns."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from membudget.engine.controls import disable_checkpointing
from membudget.errors import OptionError
from membudget.fitted import Fitted
from membudget.memory import peak_on
from membudget.profile.cost import step_clock
from membudget.step import Step, state_kept


@dataclass(frozen=True, slots=True)
class Trial:
    """Measured time and memory of a fitted model's steps.

    Attributes:
        peak_bytes: Peak bytes that a step under the plan allocates.
        planned_seconds: Time of each step under the plan.
        plain_seconds: Time of each plain step; empty if none ran.
    """

    peak_bytes: int
    planned_seconds: tuple[float, ...]
    plain_seconds: tuple[float, ...]

    @property
    def slowdown(self) -> float | None:
        """Median planned time ÷ median plain time; `None` if no plain step ran."""
        if not self.plain_seconds:
            return None
        return median(self.planned_seconds) / median(self.plain_seconds)


def try_steps(fitted: Fitted, step: Step, count: int, plain: bool = True) -> Trial:
    """Time planned steps, alternating with plain steps by default; measure the peak.

    Each step runs forward, loss and backward pass, starting with all gradients `None`.
    The model's state is restored at the end. The reported peak is the larger of the
    peaks of the last step and of the step that `fit` measured.

    Raises:
        OptionError: If `count` is less than 1.
    """
    if count < 1:
        raise OptionError(f"at least 1 step must run; got {count}")
    planned_seconds, plain_seconds = [], []
    with state_kept(step, has_values=True):
        for number in range(count + 1):
            planned = _seconds(step)
            if number:  # The first round warms up and is not counted.
                planned_seconds.append(planned)
            if plain:
                with disable_checkpointing():
                    unplanned = _seconds(step)
                if number:
                    plain_seconds.append(unplanned)
        most = peak_on(step.device, step.run).bounded_bytes
        step.prepare()
    return Trial(
        max(most, fitted.peak_bytes), tuple(planned_seconds), tuple(plain_seconds)
    )


def _seconds(step: Step) -> float:
    """Return the time of one step, then drop the gradients."""
    clock = step_clock()
    start = clock()
    step.run()
    taken = clock() - start
    step.prepare()
    return taken
