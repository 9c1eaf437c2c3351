"""`fit`: make a step of a model fit into a number of bytes.

Profile the step, plan, put the plan on the model, run one step and measure; if that
took more than was given, plan again with what was learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.nn import Module

from membudget.apply import Applied, Status, apply
from membudget.audit import AuditReport, audit
from membudget.audit.step import LossFunction
from membudget.errors import BudgetError
from membudget.fit_text import region_table
from membudget.memory import peak
from membudget.plan_text import PLAIN_FITS, head
from membudget.planner.choose import Chosen, Planner
from membudget.planner.plan import Plan
from membudget.planning import make_plan, planner_of, step_budget
from membudget.profile import Device, Profile, profile
from membudget.profile.optimizer import OptimizerLike
from membudget.profile.run import state_kept
from membudget.profile.step import Step

MOST_PLANS = 4
"""The first plan, and three that know better."""


@dataclass(frozen=True)
class Measured:
    """What one plan was measured to take.

    Attributes:
        plan: The plan.
        chosen: The plan as the planner sees it.
        peak_bytes: The measured peak of what the step allocates.
    """

    plan: Plan
    chosen: Chosen
    peak_bytes: int


class Fitted:
    """A model that fits. As a context manager it takes the plan off at the end.

    Attributes:
        plan: What is on the model.
        profile: The plain step.
        tries: Every plan that was measured, the last one is on the model.
    """

    def __init__(
        self,
        model: Module,
        step: Step,
        profile: Profile,
        tries: list[Measured],
        applied: Applied,
    ):
        """Hold the parts; `fit` makes these objects."""
        self._model = model
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

    def audit(self) -> AuditReport:
        """Compare a step under the plan with the plain one, bit for bit."""
        step = self._step
        if not self.plan.regions:  # A step that repeats itself is all there is.
            return audit(plain=step.run, budgeted=step.run, modules=step.model)
        return audit(step.model, step.batch, step.loss_fn)

    def report(self) -> str:
        """Return predicted beside measured, and what each region keeps."""
        lines = [head(self.plan, self.peak_bytes)]
        if self.tries[1:]:
            more = ", ".join(f"{measured.peak_bytes:,}" for measured in self.tries[:-1])
            lines.append(f"plan {len(self.tries)}; those before it took {more} bytes")
        chosen = self.tries[-1].chosen
        regions = region_table(self.profile.graph, chosen) if chosen.regions else ""
        return "\n".join([*lines, "", regions or PLAIN_FITS])

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
    budget: int | str,
    loss_fn: LossFunction | None = None,
    *,
    optimizer: OptimizerLike = None,
    fake: bool = False,
    device: str | Device | None = None,
) -> Fitted:
    """Put the fastest plan on a model whose step fits into a budget.

    Gradients, buffers and random streams of the model's steps stay what they were, bit
    for bit; training code stays as it is.

    Args:
        model: Any module.
        batch: A batch of the size that will be trained on; see `profile`.
        budget: Bytes in all, as a number or `"8GiB"`: with what is there before the
            step (parameters, buffers, optimizer state, the batch). `"40%"` means that
            share of the plain step's peak above what is there before.
        loss_fn: Makes the loss of `(output, batch)`; see `profile`.
        optimizer: Whose state counts as being there.
        fake: Whether to profile on fake tensors, for a model whose plain step does not
            fit; seconds are then estimated.
        device: Whose seconds to estimate; see `profile`.

    Returns:
        The fitted model, with its report.

    Raises:
        BudgetError: If no plan fits; it says the least budget that one fits into.
        OptionError: If the budget is no number of bytes.

    Example:
        >>> import torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())]
        >>> model = torch.nn.Sequential(*(blocks * 1), torch.nn.Linear(64, 1))
        >>> fitted = fit(model, torch.zeros(32, 64), "100%", fake=True)
        >>> fitted.plan.regions
        ()
        >>> fitted.remove()
    """
    step = Step(model, batch, loss_fn)
    found = profile(
        model, batch, loss_fn, optimizer=optimizer, fake=fake, device=device
    )
    allowed = step_budget(found, budget)
    before = found.graph.static.total
    planner = planner_of(found)
    tries: list[Measured] = []
    inner = allowed
    while True:
        chosen = _chosen(planner, inner, allowed, before)
        plan = make_plan(found, planner.graph, chosen, model, allowed)
        applied = apply(model, plan) if plan.regions else Applied({}, {})
        try:
            tries.append(Measured(plan, chosen, _measured_peak(step)))
        except BaseException:
            applied.remove()
            raise
        over = tries[-1].peak_bytes - allowed
        if over <= 0:
            return Fitted(model, step, found, tries, applied)
        applied.remove()
        if len(tries) == MOST_PLANS:
            raise BudgetError(
                f"{MOST_PLANS} plans took more than the {allowed:,} bytes that the "
                f"step may take; the last one took {tries[-1].peak_bytes:,}",
                asked_bytes=allowed,
                least_bytes=tries[-1].peak_bytes,
            )
        inner -= over


def _chosen(planner: Planner, inner: int, allowed: int, before: int) -> Chosen:
    """Choose for what is left of a budget; an error speaks of the whole of it."""
    try:
        return planner.choose(inner)
    except BudgetError as error:
        least = max(error.least_bytes, allowed + 1)
        found = f"the least that one fits into is {least:,}"
        if inner < allowed:
            found = "plans for it were measured to take more, and none fits into less"
        raise BudgetError(
            f"no plan fits into {allowed:,} bytes above the {before:,} that are there "
            f"before the step ({allowed + before:,} in all); {found}"
            + (f" ({least + before:,} in all)" if inner >= allowed else ""),
            asked_bytes=allowed,
            least_bytes=least,
        ) from error


def _measured_peak(step: Step) -> int:
    with state_kept(step, has_values=True):
        # The first step verifies what is replayed, which takes more.
        step.run()
        step.prepare()
        return peak(step.run).peak_bytes
