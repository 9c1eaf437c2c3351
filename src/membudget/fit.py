"""`fit`: make a step of a model fit into a number of bytes.

Profile the step, plan, put the plan on the model, run one step and measure; if that
took more than was given, plan again with what was learnt.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from types import TracebackType
from typing import Any

from torch.nn import Module

from membudget.apply import Applied, Status
from membudget.audit import AuditReport, audit
from membudget.carrier import has_region
from membudget.errors import OptionError
from membudget.free import budget_in_all, free_bytes
from membudget.modes import AUTO, check_mode
from membudget.planner.plan import Plan
from membudget.planning import check_budget, limit_of
from membudget.profile import Device, Profile, profile
from membudget.profile.optimizer import OptimizerLike
from membudget.report.plan_text import PLAIN_FITS, head, region_table
from membudget.step import LossFunction, Step, check_arguments
from membudget.tries import Measured, Task, try_mode, try_plans


class Fitted:
    """A model that fits. As a context manager it takes the plan off at the end.

    Attributes:
        plan: What is on the model.
        mode: How it was found.
        profile: The plain step.
        tries: Every plan that was measured, the last one is on the model.
    """

    def __init__(
        self,
        mode: str,
        step: Step,
        profile: Profile,
        tries: list[Measured],
        applied: Applied,
    ):
        """Hold the parts; `fit` makes these objects."""
        self.mode = mode
        self._step = step
        self.profile = profile
        self.tries = tuple(tries)
        self._applied = applied

    @property
    def plan(self) -> Plan:
        """What is on the model."""
        return self.tries[-1].plan

    @property
    def peak_bytes(self) -> int:
        """The measured peak of what a step allocates."""
        return self.tries[-1].peak_bytes

    def status(self) -> Status:
        """Return what each region did so far."""
        return self._applied.status()

    def audit(self, batch: Any = None) -> AuditReport:
        """Compare a step under the plan with the plain one, bit for bit.

        Args:
            batch: Another batch than the one that was fitted.
        """
        step = self._step
        if batch is not None:
            step = Step(step.model, batch, step.loss_fn)
        if not self.plan.regions:  # A step that repeats itself is all there is.
            return audit(plain=step.run, budgeted=step.run, modules=step.model)
        return audit(step.model, step.batch, step.loss_fn)

    def report(self) -> str:
        """Return predicted beside measured, and what each region keeps."""
        *before, last = self.tries
        lines = [head(self.plan, self.peak_bytes)]
        if self.mode != AUTO:
            lines.append(f"mode      {self.mode:>12}  a rule; nothing was planned")
        if before:
            more = ", ".join(f"{measured.peak_bytes:,}" for measured in before)
            lines.append(
                f"plans     {len(self.tries):12}  those before it took {more} bytes"
            )
        other = [r.name for r in self.status().regions if r.differences]
        if other:
            lines.append(
                f"differs   {len(other):12}  regions ran other operators than planned, "
                f"and keep less: {other[0] or 'the model'!r} first"
            )
        regions = PLAIN_FITS
        if self.plan.regions:
            regions = region_table(self.profile.graph, last.chosen)
        return "\n".join([*lines, "", regions])

    __str__ = report

    def remove(self) -> None:
        """Take the plan off: the model is what it was."""
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
        """Take the plan off."""
        self.remove()


def fit(
    model: Module,
    batch: Any,
    budget: int | str | None = None,
    loss_fn: LossFunction | None = None,
    *,
    mode: str = AUTO,
    exact_s: float = 0.0,
    optimizer: OptimizerLike = None,
    fake: bool = False,
    device: str | Device | None = None,
) -> Fitted:
    """Put the fastest plan on a model whose step fits into a budget.

    Gradients, buffers and random streams of the model's steps stay what they were, bit
    for bit; training code stays as it is. Two steps are run under the plan, of which
    nothing is left. In the first, fingerprints of all that is made again are compared
    with those of what was dropped.

    Args:
        model: Any module.
        batch: A batch of the size that will be trained on; see `profile`.
        budget: Bytes in all, as a number or `"8GiB"`: with what is there before the
            step (parameters, buffers, optimizer state, the batch). `"40%"` means that
            share of the plain step's peak above what is there before. `None` means
            what is free now on the model's CUDA device, less 5 % of it.
        loss_fn: Makes the loss of `(output, batch)`; see `profile`.
        mode: `"auto"` plans. The others take the budget for a limit alone: `"none"`
            has no regions, `"full"` keeps nothing in any block, `"selective"` keeps
            the outputs of matrix products, convolutions and attention, and `"every_2"`
            keeps nothing in every second block, `"every_3"` in every third.
        exact_s: How long, in seconds, to search all schedules for a faster plan: worth
            it for a model that is no chain of like blocks (a U-Net, a ResNet). Needs
            SciPy: `pip install membudget[exact]`.
        optimizer: Whose state counts as being there.
        fake: Whether to profile on fake tensors, for a model whose plain step does not
            fit; seconds are then estimated.
        device: Whose seconds to estimate; see `profile`.

    Returns:
        The fitted model, with its report.

    Raises:
        BudgetError: If no plan fits; it says the least budget that one fits into.
        OptionError: If the budget is no number of bytes, there is no such mode, or the
            model carries regions already.
        RecomputeMismatchError: If what is made again differs, whatever is kept for it.
        MissingExtraError: If SciPy is wanted for `exact_s` and not installed.

    Warns:
        PinnedWarning: If something did not come back bit for bit, and is kept for it.
        SearchWarning: If the search of `exact_s` gave no answer.

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
    usable = free_bytes(model) if budget is None else 0
    step = Step(model, batch, loss_fn)
    found = profile(
        model, batch, loss_fn, optimizer=optimizer, fake=fake, device=device
    )
    if budget is None:
        budget = budget_in_all(found.graph.static, optimizer, usable)
    task = Task(step, found, limit_of(found, budget), exact_s)
    tries, applied = try_plans(task) if mode == AUTO else try_mode(task, mode)
    return Fitted(mode, step, found, tries, applied)


def _check_step(model: Any, batch: Any) -> None:
    """Refuse a model and a batch of which no step can be fitted.

    Raises:
        OptionError: If the model is none, carries regions, or is called with nothing.
    """
    check_arguments(model)
    carrying = [name for name, module in model.named_modules() if has_region(module)]
    if carrying:
        raise OptionError(
            f"{type(model).__name__} carries {len(carrying)} regions already, the "
            f"first on {carrying[0] or 'itself'!r}, and the plain step is what a plan "
            "is made from: remove() them first"
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
