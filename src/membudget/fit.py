"""`fit`: make a model's training step fit in a memory budget.

record the plain step  ──>  choose a schedule  ──>  apply its plan  ──>  verify, measure
                            ^                                               │
                            └──────── lower the target by the excess <──────┤
                                                                            v
                                                                    a `Fitted` model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from statistics import median
from types import TracebackType
from typing import Any

from torch.nn import Module

from membudget.apply import Applied, Status
from membudget.attach import has_region
from membudget.audit import AuditReport, audit
from membudget.budget import Budget, budget_in_all, check_budget, free_bytes
from membudget.engine.controls import disable_checkpointing
from membudget.errors import OptionError
from membudget.memory import peak
from membudget.modes import AUTO, check_mode
from membudget.planner.plan import Plan
from membudget.planning import Attempt, make_plan, next_schedule, try_plan
from membudget.profile import Device, Profile, profile
from membudget.profile.cost import synchronised_clock
from membudget.profile.profiling import state_kept
from membudget.profile.workspace import OptimizerLike
from membudget.report.plan_text import PLAIN_FITS, head, region_table
from membudget.step import LossFunction, Step, check_arguments


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
        if not self.plan.regions:  # Only check that the plain step is deterministic.
            return audit(plain=step.run, budgeted=step.run, modules=step.model)
        return audit(step.model, step.batch, step.loss_fn)

    def report(self) -> str:
        """Return predicted and measured values, and what each region keeps, as text."""
        *before, last = self.attempts
        lines = [head(self.plan, self.peak_bytes)]
        if self.mode != AUTO:
            lines.append(f"mode      {self.mode:>12}  a rule, without planning")
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
    model: Module,
    batch: Any,
    budget: int | str | None = None,
    loss_fn: LossFunction | None = None,
    *,
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
        model: Any module; the plan's regions are attached in place.
        batch: A batch of the size used in training; see `profile`.
        budget: Total bytes, as a number or `"8GiB"`, including the memory in use before
            the step (parameters, buffers, optimizer state, the batch). `"40%"` means
            40 % of the plain step's peak above that, `"40% of activations"` its
            gradients plus 40 % of the rest. `None` means the free CUDA memory less 5 %.
        loss_fn: Computes the loss from `(output, batch)`; see `profile`.
        mode: `"auto"` searches for the fastest plan. All other modes are fixed rules:
            `"none"` has no regions, `"full"` keeps nothing inside blocks, `"selective"`
            keeps the outputs of matrix products, convolutions and attention,
            `"every_2"` keeps nothing in every second block, `"every_3"` in every third.
        optimizer: Optimizer, or its class, whose state counts toward the budget.
        fake: Whether to profile on fake tensors, for a model whose plain step does not
            fit; times are then estimated.
        device: Device for which to estimate operator times; see `profile`.

    Returns:
        The fitted model, with its report.

    Raises:
        BudgetError: If no plan fits; the message states the smallest feasible budget.
        OptionError: If the budget is neither bytes nor a share, the mode is unknown, or
            the model already has regions.
        RecomputeMismatchError: If a recompute differs even with more outputs kept.

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
    _check_step(model, batch)
    if budget is not None:
        check_budget(budget)
    # Read before profiling, which allocates memory itself.
    usable = free_bytes(model) if budget is None else 0
    plain = profile(
        model, batch, loss_fn, optimizer=optimizer, fake=fake, device=device
    )
    if budget is None:
        budget = budget_in_all(plain.graph.static, optimizer, usable)
    step = Step(model, batch, loss_fn)
    return fit_recorded(step, plain, Budget.of(budget, plain), mode)


def fit_recorded(
    step: Step, plain: Profile, budget: Budget, mode: str = AUTO
) -> Fitted:
    """Fit an already profiled step: plan, apply and measure until a plan fits.

    Raises:
        BudgetError: If no plan fits, by prediction or by measurement.
    """
    attempts: list[Attempt] = []
    while True:
        schedule = next_schedule(plain, budget, mode, attempts)
        plan = make_plan(plain, schedule, step.model, budget.step_bytes)
        found, applied = try_plan(step, plan, schedule, len(attempts) + 1)
        attempts.append(found)
        if found.peak_bytes <= budget.step_bytes:
            return Fitted(mode, step, plain, attempts, applied)
        applied.remove()  # Over budget: the next schedule aims lower, or raises.


def _check_step(model: Any, batch: Any) -> None:
    """Reject a non-module, a model with regions, or a batch that lacks arguments."""
    check_arguments(model)
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
        most = peak(step.run).peak_bytes
        step.prepare()
    return Trial(
        max(most, fitted.peak_bytes), tuple(planned_seconds), tuple(plain_seconds)
    )


def _seconds(step: Step) -> float:
    """Return the time of one step, then drop the gradients."""
    clock = synchronised_clock()
    start = clock()
    step.run()
    taken = clock() - start
    step.prepare()
    return taken
