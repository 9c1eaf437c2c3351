"""A training loop under a budget: begin, end, and what a user asks in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakMethod, finalize

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from membudget.errors import BudgetWarning, OptionError
from membudget.fittable import check_apart, check_model, check_not_compiled
from membudget.loop.closure import followed
from membudget.loop.host_room import notes_on
from membudget.loop.plan_file import PlanFile
from membudget.loop.regions import OUTSIDE, explain
from membudget.loop.report import LoopStatus, SituationStatus
from membudget.loop.root import Root
from membudget.loop.undo import run_until_done
from membudget.planner.plan import Plan
from membudget.profile.optimizer_step import held_by
from membudget.ranks import forget_reason, note_reason

R = TypeVar("R")


class Budgeted:
    """A training loop under a budget, from `start()` to `stop()`.

    As a context manager, it is started on entry, and stopped on exit. One that was not
    stopped, because an error ended the loop, goes with its models.
    """

    def __init__(
        self,
        asked: int | str,
        roots: Sequence[Root],
        file: PlanFile,
        ranks: int = 1,
    ):
        """Store what each model carries; called by `budget`.

        Args:
            asked: The budget, as it was given.
            roots: What each model carries.
            file: What an earlier run learned.
            ranks: How many processes train the models together.
        """
        self._asked = asked
        self._roots = tuple(roots)
        for root in roots:
            root.sets.ranks = ranks
        self._file = file
        self._hooks: list[Callable[[], Any]] = []
        self._retries = 0

    def start(self) -> Budgeted:
        """Put the budget on the models; nothing runs.

        Raises:
            OptionError: If a model carries regions or another budget, is compiled, is
                part of another one, or its regions would wait for other processes.
        """
        if self._hooks:
            return self
        check_apart([root.model for root in self._roots])
        for root in self._roots:
            check_model(root.model)
            check_not_compiled(root.model)
        if self._ranks > 1:
            forget_reason()
        self._file.begin()
        try:
            for root in self._roots:
                root.meter.peers = [peer.meter for peer in self._roots]
                root.attach(self)
        except BaseException:
            self.stop()
            raise
        # Weakly: torch holds these hooks for good, and they would hold the models.
        before, after = map(_weakly, (self._before_step, self._after_step))
        handles = (
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        )
        self._hooks = [finalize(self, handle.remove) for handle in handles]
        return self

    def stop(self) -> None:
        """Remove everything from the models; idempotent."""
        for remove in self._hooks:
            remove()
        self._hooks = []
        with (
            ExitStack() as stack
        ):  # If one raises, the others are detached all the same.
            for root in reversed(self._roots):
                stack.callback(root.detach)

    def step(self, function: Callable[[], R]) -> R:
        """Run forward and backward of a micro-batch, again if memory runs out.

        If an allocation fails, gradients, buffers and random streams become what they
        were, the plan is tightened, and the function runs again; likewise if a tensor
        was recomputed with other bits, which is kept from then on. For that, the
        gradients and buffers that there are before are copied to the host.

        Args:
            function: Calls the model and runs the backward pass, and changes nothing
                else; it returns the loss, for example.

        Returns:
            What the function returns.

        Raises:
            OptionError: If several ranks train the model, of which this one alone would
                communicate again.
            torch.OutOfMemoryError: If the smallest plan finds no memory twice.
            RecomputeMismatchError: If recomputed tensors differ in every attempt.

        Example:
            >>> import membudget as mb, torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
            >>> def loss():
            ...     loss = model(torch.ones(2, 8)).sum()
            ...     loss.backward()
            ...     return loss.detach()
            >>> with mb.budget(model, "1GiB") as fitted:
            ...     fitted.step(loss).shape
            torch.Size([])
        """
        if self._ranks > 1:
            raise OptionError(
                f"{self._ranks} ranks train the model together. step() would repeat a "
                "micro-batch on one of them alone, and its collectives would wait for "
                "the others forever: call the model in the loop instead"
            )
        result, retries = run_until_done(function, self._roots)
        self._retries += retries
        return result

    @property
    def _ranks(self) -> int:
        return max(root.sets.ranks for root in self._roots)

    @property
    def plan(self) -> Plan:
        """What was learned so far, as `budget(..., plan=...)` takes it.

        It has the recorded micro-batches and the plan of each situation.
        `membudget.apply` takes it, too, for the situation that came most often.

        Raises:
            OptionError: If no micro-batch was planned, or the model cannot be
                described.
        """
        return self._file.made()

    def save(self, path: str | Path) -> None:
        """Write `plan` to a file, which is replaced once the new one is complete.

        Raises:
            OptionError: If there is no plan, or the file cannot be written.
        """
        self.plan.to_json(path)

    def status(self) -> LoopStatus:
        """Return what the budget did so far, printable as a table."""
        regions: dict[str, tuple[int, int]] = {}
        for root in self._roots:
            regions |= root.sets.counted()
        notes = tuple(note for root in self._roots for note in root.notes())
        notes += notes_on({root.host for root in self._roots})
        found = tuple(
            SituationStatus.of(type(root.model).__name__, history)
            for root in self._roots
            for history in root.plans.histories.values()
        )
        return LoopStatus(str(self._asked), found, regions, self._retries, notes)

    def report(self) -> str:
        """Return the status as text."""
        return str(self.status())

    __str__ = report

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        def begin() -> None:
            for root in self._roots_of(optimizer):
                root.begin_step(optimizer)

        begin()
        return followed(args, kwargs, begin)  # A closure runs micro-batches.

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for root in self._roots_of(optimizer):
            root.end_measurement()
            if not root.has_run:
                root.has_run = True  # To warn once.
                name = type(root.model).__name__
                warnings.warn(
                    f"an optimizer stepped, but the forward of {name} was never "
                    "called, so the budget holds nothing: give budget() the module "
                    "that the loop calls",
                    BudgetWarning,
                    stacklevel=2,
                )

    def _roots_of(self, optimizer: Optimizer) -> list[Root]:
        held = held_by(optimizer)
        return [
            root
            for root in self._roots
            if not held.isdisjoint(map(id, root.model.parameters()))
        ]

    def __enter__(self) -> Budgeted:
        """Start."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; say what plans keep if memory ran out."""
        if error is not None:
            explain(error, (root.sets for root in self._roots), OUTSIDE)
            if self._ranks > 1:
                note_reason(error)
        self.stop()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method as long as its object lives."""
    found = WeakMethod(method)

    def called(*args: Any) -> Any:
        alive = found()
        return None if alive is None else alive(*args)

    return called
