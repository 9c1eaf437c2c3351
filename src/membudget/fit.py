"""`fit`: make a training step of a model fit into a number of bytes.

record the plain step ──> choose a schedule ──> apply its plan ──> verify, measure
                          ^                                               │
                          └───────── ask for less, by what was over <─────┤
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
from membudget.planning import Attempt, make_plan, next_schedule, try_plan, unseen_bytes
from membudget.profile import Device, Profile, profile
from membudget.profile.cost import synchronised_clock
from membudget.profile.profiling import state_kept
from membudget.profile.workspace import OptimizerLike
from membudget.report.plan_text import PLAIN_FITS, head, region_table
from membudget.step import LossFunction, Step, check_arguments


class Fitted:
    """A model whose step fits. As a context manager it removes the plan at the end.

    Attributes:
        plan: What is on the model.
        mode: How the plan was found: see `fit`.
        profile: The plain step, recorded.
        attempts: Every plan that was measured; the last one is on the model.
    """

    def __init__(
        self,
        mode: str,
        step: Step,
        profile: Profile,
        attempts: Sequence[Attempt],
        applied: Applied,
    ):
        """Hold the parts; `fit` makes these objects."""
        self.mode = mode
        self._step = step
        self.profile = profile
        self.attempts = tuple(attempts)
        self._applied = applied

    @property
    def plan(self) -> Plan:
        """The plan on the model."""
        return self.attempts[-1].plan

    @property
    def peak_bytes(self) -> int:
        """The measured peak of what a step allocates."""
        return self.attempts[-1].peak_bytes

    def status(self) -> Status:
        """Return what each region did so far."""
        return self._applied.status()

    def audit(self, batch: Any = None) -> AuditReport:
        """Compare a step under the plan, on any batch, with the plain one bitwise."""
        step = self._step
        if batch is not None:
            step = Step(step.model, batch, step.loss_fn)
        if not self.plan.regions:  # Whether the step repeats itself is all to ask.
            return audit(plain=step.run, budgeted=step.run, modules=step.model)
        return audit(step.model, step.batch, step.loss_fn)

    def report(self) -> str:
        """Return predicted beside measured, and what each region keeps."""
        *before, last = self.attempts
        lines = [head(self.plan, self.peak_bytes, self.profile.peak_bytes)]
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
        """Remove the plan: the model is what it was."""
        self._applied.remove()

    def __enter__(self) -> Fitted:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the plan."""
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
    """Apply the fastest plan under which a model's step fits into a budget.

    Gradients, buffers and random streams of the model's steps stay what they were, bit
    for bit, and the training loop stays as it is. Two steps run under each plan that is
    tried, and leave no trace: the first compares fingerprints of every recomputed value
    with those of the dropped one, the second is measured.

    Args:
        model: Any module.
        batch: A batch of the size to train on; see `profile`.
        budget: Bytes in all, as a number or `"8GiB"`, including what is in use before
            the step (parameters, buffers, optimizer state, the batch). `"40%"` means
            that share of the plain step's peak above what is in use before it. `None`
            means what is free now on the model's CUDA device, less 5 %.
        loss_fn: Makes the loss of `(output, batch)`; see `profile`.
        mode: `"auto"` plans. The other modes are rules, which the budget only limits:
            `"none"` has no regions, `"full"` keeps nothing inside blocks, `"selective"`
            keeps the outputs of matrix products, convolutions and attention,
            `"every_2"` keeps nothing in every second block, `"every_3"` in every third.
        optimizer: Whose state counts as in use.
        fake: Whether to profile on fake tensors, for a model whose plain step does not
            fit; times are then estimated.
        device: Whose times to estimate; see `profile`.

    Returns:
        The fitted model, with its report.

    Raises:
        BudgetError: If no plan fits; it names the smallest feasible budget.
        OptionError: If the budget is neither bytes nor a share, the mode is unknown, or
            the model carries regions already.
        RecomputeMismatchError: If a recomputed value differs, whatever is kept for it.

    Warns:
        UnrepeatableWarning: If some value is kept because its recompute differed.

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
    usable = free_bytes(model) if budget is None else 0  # Before the profile runs.
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
    """Fit a step that is recorded already: choose, apply, verify and measure, again.

    Raises:
        BudgetError: If no plan fits, or none of several was measured to fit.
    """
    attempts: list[Attempt] = []
    unseen = unseen_bytes(step, plain)
    while True:
        schedule = next_schedule(plain, budget, mode, attempts, unseen)
        plan = make_plan(plain, schedule, step.model, budget.step_bytes, unseen)
        found, applied = try_plan(step, plan, schedule)
        attempts.append(found)
        if found.peak_bytes <= budget.step_bytes:
            return Fitted(mode, step, plain, attempts, applied)
        applied.remove()


def _check_step(model: Any, batch: Any) -> None:
    """Reject what is not a module, has regions already, or lacks arguments."""
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
    """Measured steps of a fitted model.

    Attributes:
        peak_bytes: Peak of what a step under the plan allocates.
        planned_seconds: Time of each step under the plan.
        plain_seconds: Time of each plain step; empty if none ran.
    """

    peak_bytes: int
    planned_seconds: tuple[float, ...]
    plain_seconds: tuple[float, ...]

    @property
    def slowdown(self) -> float | None:
        """Median time under the plan ÷ median plain time, if plain steps ran."""
        if not self.plain_seconds:
            return None
        return median(self.planned_seconds) / median(self.plain_seconds)


def try_steps(fitted: Fitted, step: Step, count: int, plain: bool = True) -> Trial:
    """Measure steps under the plan, each followed by a plain one.

    A step is forward, loss and backward pass, starting with gradients `None`. State is
    restored at the end. The peak is the larger of `fit`'s and that of one more step.

    Raises:
        OptionError: If `count` is less than 1.
    """
    if count < 1:
        raise OptionError(f"at least 1 step must run; got {count}")
    planned_seconds, plain_seconds = [], []
    with state_kept(step, has_values=True):
        for number in range(count + 1):
            planned = _seconds(step)
            if number:  # The first run of anything takes longer.
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
    """Return the time of a step; its gradients are dropped afterwards."""
    clock = synchronised_clock()
    start = clock()
    step.run()
    taken = clock() - start
    step.prepare()
    return taken
