"""The ways that each architecture is trained in, and all that is seen of each."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import membudget as mb
from membudget.draws import drawing
from membudget.errors import BudgetError
from membudget.fitted import Fitted
from membudget.planner.schedule import Simulator
from membudget.planning import make_plan
from membudget.selection import default_names
from tests.drawn import drawn_schedule
from tests.field.subject import FIRST, RUNS, Subject, differences

ENGINES = ("rerun", "replay")
PERCENTS = {"fit 60%": 60, "fit 30%": 30}
WAYS = (*ENGINES, *PERCENTS)
DRAWN_STEPS = 8
"""Steps with other random numbers each, if these decide what runs."""
DRAWN = "drawn"  # A plan that no solver has chosen.


class Examined:
    """What was seen of one architecture in one way: results, or exceptions.

    Attributes:
        results: By the name of a check.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.results: dict[str, Any] = {}

    def note(self, check: str, function: Callable[[], Any]) -> None:
        """Call a function; keep what it returns or raises."""
        try:
            self.results[check] = function()
        except Exception as error:
            self.results[check] = error

    def __getitem__(self, check: str) -> Any:
        """Return a result, or raise what came in its place.

        A model on which nothing could be applied fails every check with that.
        """
        found = self.results.get(check, self.results["applied"])
        if isinstance(found, Exception):
            raise found
        return found


def examine(subject: Subject, way: str) -> Examined:
    """Train in one way; compare each step with the plain one; measure the peak."""
    examined = Examined()
    # Plain steps run first: some models set attributes when they are first called.
    plain, _ = subject.plain, subject.plain_peak_bytes
    structure = subject.structure()
    subject.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        examined.note("applied", lambda: _put(subject, way, examined))
        applied = examined.results["applied"]
        if isinstance(applied, Exception):
            subject.reset()
            return examined
        try:
            _measure(subject, applied, examined)
            for run in RUNS:
                examined.note(run, partial(_compared, subject, run))
                if run == FIRST and not examined.results.get("draws"):
                    examined.results["status"] = applied.status()
        finally:
            applied.remove()
        examined.note("structure", lambda: subject.structure() == structure)
        examined.note(
            "removed", lambda: differences(plain[FIRST], subject.outcome(FIRST))
        )
    return examined


def _measure(subject: Subject, applied: Any, examined: Examined) -> None:
    """Meter the step that was planned, and others that chance would choose."""
    draws = examined.results.get("draws", "")
    planned = partial(subject.peak_bytes, draws)
    examined.note("peak", planned)
    # Another draw may take another path, and so may another batch.
    examined.results["status"] = applied.status()
    seeds = range(DRAWN_STEPS) if draws else ()
    drawn = [partial(subject.peak_bytes, seed=seed) for seed in seeds]
    examined.note("drawn peaks", lambda: [peak() for peak in drawn])


def _compared(subject: Subject, run: str) -> list[str]:
    try:
        return differences(subject.plain[run], subject.outcome(run))
    finally:
        subject.reset()


def _put(subject: Subject, way: str, examined: Examined) -> Any:
    if way == DRAWN:
        return _apply_drawn(subject, examined)
    if way in ENGINES:
        names = default_names(subject.model)
        return mb.apply(subject.model, names=names, engine=way)
    return fit_or_least(subject, PERCENTS[way], examined)


def fit_or_least(subject: Subject, percent: float, examined: Examined) -> Fitted:
    """Fit a step into a share of what is above its gradients, or into the least.

    The least is the number of bytes that the error tells its reader.
    """
    plain, gradients = subject.plain_peak_bytes, subject.gradient_bytes
    budget_bytes = gradients + percent / 100 * (plain - gradients)
    try:
        return _fit(subject, f"{100 * budget_bytes / plain:.9f}%", examined)
    except BudgetError as error:
        examined.results["refused"] = error
        found = re.search(r"Smallest feasible budget: ([\d,]+) bytes", str(error))
        if found is None:
            raise
    return _fit(subject, int(found[1].replace(",", "")), examined)


def _fit(subject: Subject, budget: int | str, examined: Examined) -> Fitted:
    """Fit a step, and note the CPU seconds that it took."""
    step = subject.steps[FIRST]
    subject.reset()
    start_s = time.process_time()
    try:
        fitted = mb.fit(step.model, step.batch, budget, step.loss_fn)
        examined.results["predicted"] = fitted.plan.peak_bytes
        examined.results["draws"] = fitted.profile.draws
        return fitted
    finally:
        examined.results["seconds of fit"] = time.process_time() - start_s


def _apply_drawn(subject: Subject, examined: Examined) -> mb.Applied:
    """Draw a plan by the name of the architecture, and run the steps that verify it."""
    step = subject.steps[FIRST]
    subject.reset()
    profile = mb.profile(step.model, step.batch, loss_fn=step.loss_fn)
    schedule = drawn_schedule(Simulator(profile.graph), Random(subject.name))
    examined.results["predicted"] = schedule.peak_bytes
    examined.results["draws"] = profile.draws
    applied = mb.apply(step.model, make_plan(profile, schedule, step.model, 0))
    for _ in range(2):
        subject.reset()
        with drawing(profile.draws):
            step.run()
    return applied
