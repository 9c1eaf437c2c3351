"""Race plans against the plain step: measured slowdowns, taken in turns.

A round runs the plain step and one step under each plan, so that whatever else the
machine does slows all of them alike; a slowdown is the median of the rounds' ratios. On
a CPU the clock counts the process's CPU time, which other load hardly changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from membudget.engine.controls import verification_postponed
from membudget.planned import PlanRegions, put_on, take_off
from membudget.profile.cost import step_clock
from membudget.progress import stage
from membudget.step import Step, state_kept

LEAST_ROUNDS, MOST_ROUNDS = 3, 15

DISTURBED = 0.12
"""Quartiles that lie further apart, relative to the median, tell of other load."""

DISTURBED_ROUNDS = 7
"""How many rounds there are at least where other load disturbs them.

A plan that was raced for fewer is raced further if its measured and predicted slowdowns
are far apart.
"""

ENOUGH_S = 0.5
"""No further round begins after the least number of rounds and this time."""

CLEARLY = 0.02
"""By how much of a plain step a plan must be faster to be preferred to the first."""

NEARLY = 0.05
"""By how much of a plain step a plan may be predicted slower than the first in a race.

Predictions are seldom further off, and each plan costs `fit` some ten steps.
"""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Measured times of steps under a plan ÷ those of plain steps.

    Attributes:
        median: Median of the rounds' ratios.
        low: Their lower quartile.
        high: Their upper quartile.
        rounds: Number of rounds.
        seconds: Wall time that the whole race took.
        others: Medians of the plans that were raced and not taken.
        forward: Median of what the forward took longer, relative to the plain step;
            `None` where forward and backward are one function of the user's.
        ratios: What the rounds took under the plan, relative to the plain step.
        forwards: What their forwards took longer, likewise.
    """

    median: float
    low: float
    high: float
    rounds: int
    seconds: float
    others: tuple[float, ...] = ()
    forward: float | None = None
    ratios: tuple[float, ...] = ()
    forwards: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Return the slowdown, and how it was measured."""
        return f"{self.median:.3f}  {self.how}"

    @property
    def how(self) -> str:
        """How the slowdown was measured, in words."""
        text = f"measured in {self.rounds} rounds, quartiles {self.low:.3f} and "
        text += f"{self.high:.3f}"
        if _are_disturbed(self.low, self.median, self.high):
            text += ", disturbed by other load"
        if self.others:
            others = ", ".join(f"{other:.3f}" for other in self.others)
            text += f"; other plans {others}"
        return text


def race(
    step: Step,
    plans: Sequence[PlanRegions],
    least: int = LEAST_ROUNDS,
    before: Slowdown | None = None,
    enough_s: float = math.inf,
) -> tuple[int, Slowdown]:
    """Time steps under each of several plans; return the fastest and its slowdown.

    Another plan than the first must be clearly faster, and in nearly every round,
    because times are noisy. The model carries no plan before and afterwards, and its
    state is restored.

    Args:
        step: The step, which has run under each plan before.
        plans: What the model carries under each plan.
        least: The least number of rounds.
        before: Of the only plan, an earlier race, whose rounds count, too.
        enough_s: The same as `ENOUGH_S`, where it is less.
    """
    begin_s = time.perf_counter() - (before.seconds if before else 0.0)
    clock = step_clock()
    ratios = [[*before.ratios] if before else [] for _ in plans]
    forwards = [[*before.forwards] if before else [] for _ in plans]
    kept = state_kept(step, has_values=True)
    with stage("timing steps"), kept, verification_postponed():
        while not _is_enough(ratios[0], least, begin_s + min(enough_s, ENOUGH_S)):
            plain = _timed(step, clock)
            for place, plan in enumerate(plans):
                put_on(plan)
                try:
                    found = _timed(step, clock)
                finally:
                    take_off(step.model)
                ratios[place].append(found.step_s / plain.step_s)
                if found.forward_s is not None and plain.forward_s is not None:
                    longer_s = found.forward_s - plain.forward_s
                    forwards[place].append(longer_s / plain.step_s)
    medians = [median(of_plan) for of_plan in ratios]
    fastest = min(range(len(plans)), key=medians.__getitem__)
    if not _is_clearly_faster(ratios[fastest], ratios[0]):
        fastest = 0
    low, _, high = _quartiles(ratios[fastest])
    others = tuple(m for place, m in enumerate(medians) if place != fastest)
    others = before.others if before else others
    took_s = time.perf_counter() - begin_s
    rounds = len(ratios[0])
    forward = median(forwards[fastest]) if forwards[fastest] else None
    measured = medians[fastest], low, high, rounds, took_s, others, forward
    each = tuple(ratios[fastest]), tuple(forwards[fastest])
    return fastest, Slowdown(*measured, *each)


def _is_clearly_faster(ratios: Sequence[float], first: Sequence[float]) -> bool:
    """Return whether a plan is faster than the first by more than noise explains."""
    pairs = zip(ratios, first, strict=True)
    _, middle, high = _quartiles([ratio - of_first for ratio, of_first in pairs])
    return middle < -CLEARLY and high < 0


def _is_enough(rounds: Sequence[float], least: int, end_s: float) -> bool:
    if len(rounds) < least:
        return False
    if _are_disturbed(*_quartiles(rounds)):
        least = max(least, DISTURBED_ROUNDS)
    is_long = time.perf_counter() > end_s
    return len(rounds) >= (least if is_long else MOST_ROUNDS)


def _are_disturbed(low: float, middle: float, high: float) -> bool:
    """Return whether other load moved the quartiles of some ratios apart."""
    return high - low > DISTURBED * middle


def _quartiles(ratios: Sequence[float]) -> list[float]:
    return quantiles(ratios, n=4, method="inclusive")


@dataclass(frozen=True, slots=True)
class _Timed:
    step_s: float
    forward_s: float | None


def _timed(step: Step, clock: Callable[[], float]) -> _Timed:
    step.prepare()
    between: list[float] = []
    start_s = clock()
    step.run(lambda: between.append(clock()))
    step_s = max(clock() - start_s, 1e-9)
    return _Timed(step_s, between[0] - start_s if between else None)
