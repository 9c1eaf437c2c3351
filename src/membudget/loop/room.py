"""The bytes that a budget leaves for a micro-batch, and what to do if they are too few.

An absolute budget is for all tensors on the device: what is live before the call is
subtracted, and state that the optimizer has yet to make. A share is of what the plain
micro-batch takes above that.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

from torch.optim import Optimizer

from membudget.allowance import Budget, Share, absent_bytes
from membudget.errors import BudgetError, BudgetWarning, ByteHolder
from membudget.loop.awaited import Forward
from membudget.loop.history import History, Left
from membudget.loop.plans import Plans
from membudget.loop.point import Predicted, RecordedSize
from membudget.loop.situation import Situation
from membudget.loop.step_needs import StepNeeds
from membudget.memory.counting import Counted
from membudget.refusal import refused
from membudget.report.holders import REMEDIES

OnExceed = Literal["raise", "warn", "plain"]
"""What to do about a micro-batch whose smallest plan is over budget."""


class Room:
    """What a budget leaves on one device.

    Attributes:
        counted: The live bytes of the device.
        refused: How often a call, or the step of an optimizer, was refused.
    """

    def __init__(self, limit: int | Share, on_exceed: OnExceed, counted: Counted):
        """Store the budget, in bytes or as a share."""
        self.counted = counted
        self._limit = limit
        self._on_exceed = on_exceed
        self.refused = 0

    def left(
        self,
        plans: Plans,
        situation: Situation,
        awaited: Sequence[Forward],
        most_awaited: int,
        optimizer: Optimizer | None,
    ) -> Left:
        """Return what is left for a micro-batch that is about to run."""
        held = sum(forward.held_bytes for forward in awaited)
        absent = 0
        if isinstance(self._limit, Share):
            plain = sum(forward.plain_held_bytes for forward in awaited)
            whole = plans.share_bytes(situation, self._limit)
            limit_bytes = whole + int(plain * self._limit.part) - held
        else:
            static = plans.reference(situation).profile.graph.static
            limit_bytes = self._limit - self.counted.live_bytes()
            absent = absent_bytes(static, optimizer, self.counted.device)
            limit_bytes -= absent
            limit_bytes -= 0 if self.counted.is_exact else held
        parts = max(1, most_awaited - len(awaited))
        return Left(limit_bytes // parts, limit_bytes, parts, absent)

    def without_plan(self) -> Budget | None:
        """Return the budget of a call without a plan; `None` if that is a share."""
        if isinstance(self._limit, Share):
            return None
        live_bytes = self.counted.live_bytes()
        return Budget(self._limit - live_bytes, live_bytes)

    def for_micro_batch(self, history: History) -> Budget:
        """Return the budget of the micro-batch that was planned last."""
        limit_bytes, before_bytes = history.limit_bytes, self.counted.live_bytes()
        if not isinstance(self._limit, Share):
            before_bytes = self._limit - limit_bytes
        return Budget(limit_bytes, before_bytes)

    def exceeded(
        self, point: RecordedSize, history: History, smallest: Predicted
    ) -> Predicted:
        """Refuse a micro-batch, or take the smallest plan or none, as was asked.

        Raises:
            BudgetError: If nothing else was asked for.
        """
        found = point.simulated(smallest.schedule)
        least_bytes = history.expected_bytes(smallest)
        # No name of its own: a traceback through this frame would hold the error.
        self.refuse(
            refused(
                point.profile,
                self.for_micro_batch(history),
                found,
                least_bytes,
                beside=_beside(least_bytes - found.peak_bytes, history.summed_bytes),
            ),
            f"for a micro-batch of {history.text}, ",
        )
        if self._on_exceed == "plain":
            history.predicted = point.plain
            return point.plain
        return smallest

    def check_step(self, optimizer: Optimizer, needs: StepNeeds) -> None:
        """Refuse the step of an optimizer that needs more than is left.

        Raises:
            BudgetError: If nothing else was asked for.
        """
        budget = self.without_plan()
        if budget is None:
            return  # A share does not bound what lives beside the micro-batch.
        need_bytes = needs.bytes_of(optimizer)
        if need_bytes > budget.step_bytes:
            self.refuse(_step_refused(optimizer, need_bytes, budget))

    def refuse(self, error: BudgetError, about: str = "") -> None:
        """Raise an error, or warn with its text, as was asked.

        Args:
            error: The error.
            about: What is refused, in front of the text.

        Raises:
            BudgetError: If nothing else was asked for.
        """
        error.args = (f"{about}{error}",)
        if self._on_exceed == "raise":
            self.refused += 1
            try:
                raise error
            finally:
                del error  # Its traceback holds this frame.
        warnings.warn(str(error), BudgetWarning, stacklevel=2)


def _beside(beside_bytes: int, summed_bytes: int) -> tuple[ByteHolder, ...]:
    """Return what holds what a micro-batch needs beside its schedule's tensors."""
    summed_bytes = min(summed_bytes, beside_bytes)
    return (
        ByteHolder(
            "gradients",
            "gradients of other forwards of the same backward pass",
            summed_bytes,
            REMEDIES["gradients"],
        ),
        ByteHolder(
            "regions",
            "random states, verification, cached casts, and what was measured beyond "
            "predictions",
            beside_bytes - summed_bytes,
        ),
    )


def _step_refused(optimizer: Optimizer, need_bytes: int, budget: Budget) -> BudgetError:
    name = type(optimizer).__name__
    error = budget.too_small_for(f"the next step of {name}", need_bytes)
    error.holders = (
        ByteHolder("other", "all that is in use before it", budget.before_bytes),
        ByteHolder(
            "optimizer step",
            "state that is made in the step, and its temporaries",
            need_bytes,
            REMEDIES["optimizer step"],
        ),
    )
    return error
