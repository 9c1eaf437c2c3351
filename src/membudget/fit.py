"""`fit`: make a model's training step fit in a memory budget.

record the plain step  ──>  choose a schedule  ──>  apply its plan  ──>  verify, measure
                            ^                                               │
                            ├─ lower the target by the excess <─ too large ─┤
                            ├─ leave out the regions at fault <─ not equal ─┤
                                                                            v
                                                                    a `Fitted` model
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch.nn import Module

from membudget.allocation import (
    is_out_of_memory,
    map_blocks_if_limited,
    without_shortage,
)
from membudget.apply import Applied
from membudget.attempt import Attempt, RegionsAtFaultError, try_plan
from membudget.budget import Budget, budget_in_all, check_budget, free_bytes
from membudget.errors import (
    BudgetError,
    OptionError,
    RecomputeMismatchError,
    UnrepeatableWarning,
)
from membudget.fittable import check_fittable
from membudget.fitted import DOES_NOT_FIT, MAPS_BLOCKS, NOT_COMPARED, Fitted
from membudget.modes import AUTO, check_mode
from membudget.outcome import Metered, plain_run
from membudget.planned import put_on, take_off, without_plan
from membudget.planner.schedule import Schedule
from membudget.planning import (
    make_plan,
    next_schedules,
    unseen_bytes,
    without_calls,
)
from membudget.profile import Device, Profile, profile_step
from membudget.profile.workspace import OptimizerLike
from membudget.race import Slowdown, race
from membudget.refusal import explaining_shortage
from membudget.step import ABSENT, LossFunction, Step, step_of

Measure = Literal["best", "one", "none"]

QUICK_S = 1.0
"""A plain step of fewer seconds is quick enough to time several plans."""


def fit(
    model: Module | Callable[[], Any],
    batch: Any = ABSENT,
    budget: int | str | None = None,
    loss_fn: LossFunction | None = None,
    *,
    modules: Module | None = None,
    mode: str = AUTO,
    optimizer: OptimizerLike = None,
    fake: bool = False,
    device: str | Device | None = None,
    measure: Measure | None = None,
) -> Fitted:
    """Apply the fastest plan found under which a training step fits the budget.

    Gradients, buffers and random streams stay bitwise equal to those of the plain step,
    and the training loop needs no change. `fit` runs two plain steps, and two under
    each plan that it tries, and restores the model's state afterwards: the first of two
    compares fingerprints of recomputed and dropped values, the second measures memory
    and is compared with the plain step. Where they differ, a plan without the regions
    at fault is made.

    Args:
        model: Any module; the plan's regions are attached in place, and replace those
            of an earlier `fit`. Or a step: a function without arguments that runs
            forward and backward, which requires `modules` and no `batch`.
        batch: A batch of the size used in training, or a `DataLoader`, whose first
            batch is taken. A tuple is passed as positional arguments, a mapping as
            keyword arguments. A pair `(inputs, targets)` is recognised if `loss_fn` is
            a module or of `torch.nn.functional`, or if the model takes one argument.
        budget: Total bytes, as a number or `"8GiB"`, including the memory in use before
            the step (parameters, buffers, optimizer state, the batch). `"40%"` means
            40 % of the plain step's peak above that, `"40% of activations"` its
            gradients plus 40 % of the rest. `None` means the free CUDA memory less 5 %.
        loss_fn: Computes the loss from `(output, batch)`, or for a pair from `(output,
            targets)`. By default, the loss is what the model's `training_step` returns
            (Lightning), or found in the output; see `profile`.
        modules: The module that is trained, if `model` is a step function.
        mode: `"auto"` searches for the fastest plan. All other modes are fixed rules:
            `"none"` has no regions, `"full"` keeps nothing inside blocks, `"selective"`
            keeps the outputs of matrix products, convolutions and attention,
            `"every_2"` keeps nothing in every second block, `"every_3"` in every third.
        optimizer: Optimizer, or its class, whose state counts toward the budget.
        fake: Whether to profile on fake tensors; times are then estimated. A plain step
            that runs out of memory is profiled so in any case.
        device: Device for which to estimate operator times; see `profile`.
        measure: Whose steps are timed in turns with plain ones: `"one"` means those of
            the plan that is predicted to be the fastest, `"best"` also those of plans
            with other engines, of which the fastest is taken, `"none"` means nobody's.
            By default `"best"` if the plain step takes less than a second, else
            `"one"`. Nothing is timed if the plain step does not fit.

    Returns:
        The fitted model, with its report.

    Raises:
        BudgetError: If no plan fits; the message states the smallest feasible budget.
        OptionError: If the budget is neither bytes nor a share, the mode is unknown,
            the model already has regions that `fit` did not attach, or it is trained by
            several processes together (DTensor, FSDP, DistributedDataParallel).
        OutOfMemoryError: If a step, or planning it, finds less memory than the budget
            allows.
        RecomputeMismatchError: If recomputed values differ even with more outputs kept,
            and the plain step does not fit, so that fewer regions may not, either.

    Warns:
        UnrepeatableWarning: If an output is kept because its recompute differed, or a
            module gets no region because the step went wrong under it; `status()`
            names both.

    Example:
        >>> import torch
        >>> layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)]
        >>> model = torch.nn.Sequential(*layers)
        >>> fitted = fit(model, torch.zeros(32, 64), "100%", fake=True)
        >>> fitted.plan.regions
        ()
        >>> fitted.remove()
    """
    check_mode(mode)
    if measure not in (None, *get_args(Measure)):
        raise OptionError(
            f"measure must be 'best', 'one', 'none' or None; got {measure!r}"
        )
    if budget is not None:
        check_budget(budget)
    step = step_of(model, batch, loss_fn, modules)
    notes = (MAPS_BLOCKS,) if map_blocks_if_limited() else ()
    with without_plan(step.model):
        check_fittable(step)
        # Read before profiling, which allocates memory itself.
        usable = free_bytes(step.model) if budget is None else 0
        plain = _profiled(step, optimizer, fake, device)
        plain = replace(plain, notes=plain.notes + notes)
        if budget is None:
            budget = budget_in_all(plain.graph.static, optimizer, usable)
        return fit_recorded(step, plain, Budget.of(budget, plain), mode, measure)


def _profiled(
    step: Step, optimizer: OptimizerLike, fake: bool, device: str | Device | None
) -> Profile:
    """Profile a step, on fake tensors if asked to or if it runs out of memory."""
    if not fake:
        try:
            return profile_step(step, optimizer, fake, device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    found = profile_step(step, optimizer, True, device)
    return found if fake else replace(found, notes=(*found.notes, DOES_NOT_FIT))


def fit_recorded(
    step: Step,
    profile: Profile,
    budget: Budget,
    mode: str = AUTO,
    measure: Measure | None = None,
) -> Fitted:
    """Fit an already profiled step; see `fit` for what is raised and warned of."""
    plain = _measured(step, profile)
    if plain is None and profile.tensors == "real":
        profile = replace(profile, notes=(*profile.notes, NOT_COMPARED))
    left_out: dict[str, str] = {}
    while True:
        plannable = without_calls(profile, left_out)
        try:
            found = _first_that_fits(step, plannable, plain, budget, mode)
        except RegionsAtFaultError as error:
            left_out |= error.reasons
            warnings.warn(str(error), UnrepeatableWarning, stacklevel=3)
        except BudgetError as error:
            if left_out:
                error.add_note(str(RegionsAtFaultError(left_out)))
            raise
        else:
            break
    if measure is None:
        measure = "best" if profile.graph.seconds < QUICK_S else "one"
    slowdown = None
    if plain is not None and found.attempts[-1].plan.regions and measure != "none":
        others = found.others if measure == "best" else []
        slowdown = _raced(step, plannable, plain, budget, found, others)
    found.applied.left_out = left_out
    return Fitted(mode, step, profile, found.attempts, found.applied, slowdown)


@dataclass
class _Fitting:
    """Plans that were tried, the last of which fits, and is applied.

    Attributes:
        attempts: Every plan, with its measured peak.
        applied: The regions of the last.
        others: Schedules with other engines that are predicted to fit, too.
    """

    attempts: list[Attempt]
    applied: Applied
    others: Sequence[Schedule]


def _raced(
    step: Step,
    profile: Profile,
    plain: Metered,
    budget: Budget,
    found: _Fitting,
    others: Sequence[Schedule],
) -> Slowdown | None:
    """Race the plan that was found against others that fit; apply the fastest.

    The first is applied, and nothing returned, if a plain step runs out of memory.
    """
    entries = [(found.attempts.pop(), found.applied, take_off(step.model))]
    for schedule in others:
        unseen = unseen_bytes(profile, plain)
        plan = make_plan(profile, schedule, step.model, budget.step_bytes, unseen)
        wrong = suppress(RecomputeMismatchError)
        with warnings.catch_warnings(), wrong, without_shortage():
            warnings.simplefilter("ignore", UnrepeatableWarning)
            attempt, applied = try_plan(step, plan, schedule, plain, len(entries) + 1)
            regions = take_off(step.model)
            if attempt.peak_bytes <= budget.step_bytes:
                entries.append((attempt, applied, regions))
    place, slowdown = 0, None
    with without_shortage():
        place, slowdown = race(step, [regions for _, _, regions in entries])
    attempt, found.applied, regions = entries[place]
    found.attempts.append(attempt)
    put_on(regions)
    return slowdown


def _measured(step: Step, profile: Profile) -> Metered | None:
    """Meter the plain step; `None` if that, or recording it, runs out of memory."""
    found = None
    if profile.tensors == "real":
        with without_shortage():  # Measuring takes a little more than recording.
            found = plain_run(step)
    return found


def _first_that_fits(
    step: Step, profile: Profile, plain: Metered | None, budget: Budget, mode: str
) -> _Fitting:
    """Try plans until one is within the budget.

    Raises:
        BudgetError: If no plan fits, by prediction or by measurement.
        OutOfMemoryError: If a step finds less memory than the budget allows it.
        RegionsAtFaultError: If the step goes wrong under some regions of a plan.
    """
    attempts: list[Attempt] = []
    unseen = unseen_bytes(profile, plain)
    while True:
        planning = "while planning a step that takes", profile.peak_bytes
        with explaining_shortage(budget, *planning):
            schedule, *others = next_schedules(profile, budget, mode, attempts, unseen)
            plan = make_plan(profile, schedule, step.model, budget.step_bytes, unseen)
        with explaining_shortage(budget, "in a step whose plan takes", plan.peak_bytes):
            found, applied = try_plan(step, plan, schedule, plain, len(attempts) + 1)
        attempts.append(found)
        if found.peak_bytes <= budget.step_bytes:
            return _Fitting(attempts, applied, others)
        applied.remove()  # Over budget: the next schedule aims lower, or raises.
