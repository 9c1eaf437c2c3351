"""A fitted model: its plan, what was measured, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from membudget.apply import Applied, Status
from membudget.attempt import Attempt
from membudget.audit import AuditReport, audit
from membudget.modes import AUTO
from membudget.planner.plan import Plan
from membudget.profile import Profile
from membudget.report.plan_text import PLAIN_FITS, head, region_table
from membudget.step import Step


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
        """Compare a step under the plan with the plain one, bit for bit.

        Args:
            batch: Another batch than the one that was fitted.
        """
        step = self._step
        if batch is not None:
            step = Step(step.model, batch, step.loss_fn)
        if not self.plan.regions:  # Whether the step repeats itself is all to ask.
            return audit(plain=step.run, budgeted=step.run, modules=step.model)
        return audit(step.model, step.batch, step.loss_fn)

    def report(self) -> str:
        """Return predicted beside measured, and what each region keeps."""
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
