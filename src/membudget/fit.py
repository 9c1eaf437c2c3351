"""`fit`: make a model's training step fit in a memory budget.

record the plain step  ──>  choose a schedule  ──>  apply its plan  ──>  verify, measure
                            ^                                               │
                            └──────── lower the target by the excess <──────┤
                                                                            v
                                                                    a `Fitted` model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import TracebackType
from typing import Any

from torch.nn import Module

from membudget.allocation import is_out_of_memory
from membudget.apply import Applied, Status, without_plan
from membudget.attach import has_region
from membudget.audit import AuditReport, audit
from membudget.budget import Budget, budget_in_all, check_budget, free_bytes
from membudget.errors import OptionError
from membudget.modes import AUTO, check_mode
from membudget.outcome import check_against_plain
from membudget.planner.plan import Plan
from membudget.planning import Attempt, make_plan, next_schedule, try_plan, unseen_bytes
from membudget.profile import Device, Profile, profile_step
from membudget.profile.workspace import OptimizerLike
from membudget.report.plan_text import PLAIN_FITS, head, region_table
from membudget.sharding import sharding_of
from membudget.step import ABSENT, CallableStep, LossFunction, Step, step_of


class Fitted:
    """A model whose step fits its budget; as a context manager, undoes `fit` on exit.

    Attributes:
        plan: The plan applied to the model.
        mode: The `mode` that was passed to `fit`, such as `"auto"`.
        profile: Profile of the plain step, without regions.
        attempts: Every plan that was measured; the last one is applied.
    """

    def __init__(
        self,
        mode: str,
        step: Step,
        profile: Profile,
        attempts: Sequence[Attempt],
        applied: Applied,
    ):
        """Store the results of fitting; called by `fit`."""
        self.mode = mode
        self._step = step
        self.profile = profile
        self.attempts = tuple(attempts)
        self._applied = applied

    @property
    def plan(self) -> Plan:
        """The plan applied to the model."""
        return self.attempts[-1].plan

    @property
    def peak_bytes(self) -> int:
        """Measured peak bytes that a step allocates."""
        return self.attempts[-1].peak_bytes

    def status(self) -> Status:
        """Return the counters of every region."""
        return self._applied.status()

    def audit(self, batch: Any = None) -> AuditReport:
        """Compare a step under the plan with the plain step bitwise, on any batch."""
        step = self._step
        if batch is not None:
            step = Step(step.model, batch, step.loss_fn)
        is_own = isinstance(step, CallableStep)
        if is_own or not self.plan.regions:  # Without regions both runs are plain.
            return audit(plain=step.run, budgeted=step.run, modules=step.model)
        return audit(step.model, step.batch, step.loss_fn)

    def report(self) -> str:
        """Return predicted and measured values, and what each region keeps, as text."""
        *before, last = self.attempts
        lines = [head(self.plan, self.peak_bytes, self.profile.peak_bytes)]
        if self.mode != AUTO:
            lines.append(f"mode      {self.mode:>12}  a rule, without planning")
        if DOES_NOT_FIT in self.profile.notes:
            lines.append(f"profile   {'fake':>12}  {DOES_NOT_FIT}")
        if before:
            more = ", ".join(f"{attempt.peak_bytes:,}" for attempt in before)
            lines.append(
                f"plans     {len(self.attempts):12}  the earlier ones took {more} bytes"
            )
        other = [r.name for r in self.status().regions if r.differences]
        if other:
            lines.append(
                f"differs   {len(other):12}  regions ran other operators than planned, "
                f"and keep less: {other[0] or 'the model'!r} first"
            )
        regions = PLAIN_FITS
        if self.plan.regions:
            regions = region_table(self.profile.graph, last.schedule)
        return "\n".join([*lines, "", regions])

    __str__ = report

    def remove(self) -> None:
        """Remove the plan and restore the original model."""
        self._applied.remove()

    def __enter__(self) -> Fitted:
        """Return the fitted model itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the plan from the model."""
        self.remove()


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
) -> Fitted:
    """Apply the fastest plan found under which a training step fits the budget.

    Gradients, buffers and random streams stay bitwise equal to those of the plain step,
    and the training loop needs no change. `fit` runs two steps under each plan that it
    tries, and restores the model's state afterwards: the first step compares
    fingerprints of recomputed and dropped values, the second measures memory.

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

    Returns:
        The fitted model, with its report.

    Raises:
        BudgetError: If no plan fits; the message states the smallest feasible budget.
        OptionError: If the budget is neither bytes nor a share, the mode is unknown,
            the model already has regions that `fit` did not attach, or its parameters
            are sharded over processes (DTensor, FSDP).
        RecomputeMismatchError: If recomputed values differ even with more outputs kept,
            or loss, gradients or buffers differ from those of the plain step.

    Warns:
        UnrepeatableWarning: If an output is kept because its recompute differed.

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
    if budget is not None:
        check_budget(budget)
    step = step_of(model, batch, loss_fn, modules)
    with without_plan(step.model):
        _check_step(step)
        # Read before profiling, which allocates memory itself.
        usable = free_bytes(step.model) if budget is None else 0
        plain = _profiled(step, optimizer, fake, device)
        if budget is None:
            budget = budget_in_all(plain.graph.static, optimizer, usable)
        return fit_recorded(step, plain, Budget.of(budget, plain), mode)


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
    step: Step, plain: Profile, budget: Budget, mode: str = AUTO
) -> Fitted:
    """Fit an already profiled step: plan, apply and measure until a plan fits.

    Raises:
        BudgetError: If no plan fits, by prediction or by measurement.
    """
    attempts: list[Attempt] = []
    unseen = unseen_bytes(step, plain)
    while True:
        schedule = next_schedule(plain, budget, mode, attempts, unseen)
        plan = make_plan(plain, schedule, step.model, budget.step_bytes, unseen)
        found, applied = try_plan(step, plan, schedule, len(attempts) + 1)
        attempts.append(found)
        if found.peak_bytes <= budget.step_bytes:
            _check_fitted(step, plain, plan, applied)
            return Fitted(mode, step, plain, attempts, applied)
        applied.remove()  # Over budget: the next schedule aims lower, or raises.


def _check_fitted(step: Step, plain: Profile, plan: Plan, applied: Applied) -> None:
    """Compare a fitted step with the plain one, unless that one may not fit."""
    if plain.tensors == "fake" or not plan.regions:
        return
    try:
        check_against_plain(step)
    except BaseException:
        applied.remove()
        raise


DOES_NOT_FIT = (
    "the plain step ran out of memory, so it was recorded on fake tensors: the seconds "
    "are estimated"
)


def _check_step(step: Step) -> None:
    """Reject a model with regions or shards, or a batch that lacks arguments."""
    model, batch = step.model, step.batch
    sharding = sharding_of(model)
    if sharding is not None:
        raise OptionError(
            f"{type(model).__name__} is sharded: {sharding}. Each rank would plan from "
            "its own times, and ranks whose steps differ wait for each other forever. "
            "Give every rank the same rule, as in apply(model, blocks=Block); "
            "profile(model, batch) tells a rank's bytes"
        )
    carrying = [name for name, module in model.named_modules() if has_region(module)]
    if carrying:
        raise OptionError(
            f"{type(model).__name__} carries {len(carrying)} regions already, the "
            f"first on {carrying[0] or 'itself'!r}, and plans are made from the plain "
            "step: remove() them first"
        )
    if isinstance(batch, Mapping | tuple) and not batch:
        try:
            signature(model.forward).bind()
        except TypeError as error:
            raise OptionError(
                f"the batch is an empty {type(batch).__name__}, so "
                f"{type(model).__name__} would be called with nothing ({error}): give "
                "what it is called with"
            ) from error
