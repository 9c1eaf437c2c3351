"""Hold a training loop to a number of bytes, whatever is in it.

`root` is what the model carries while the budget is open: `situation` tells its calls
apart, `room` says what is left for one, `plans` chooses a plan, `regions` puts it on
the model, `meter` measures what the call takes, `awaited` knows whose backward pass is
still to come, `casts` what autocast caches, and `step_needs` what the optimizer will
take. `micro_batch` records a call without memory, `point` predicts it under a plan, and
`kind` predicts calls of other sizes from a few points; `evaluation` foresees calls
without gradients, and `twice` gradients that keep their graph. `undo` and `report`
serve `step` and `status`; `learned` and `plan_file` hand what is known to the next run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from membudget._torch_accelerator import main_device
from membudget.allowance import check_budget, share_of
from membudget.errors import BudgetWarning, OptionError
from membudget.fittable import check_apart, check_model, check_not_compiled
from membudget.loop.closure import followed
from membudget.loop.plan_file import PlanFile
from membudget.loop.regions import OUTSIDE, explain
from membudget.loop.report import LoopStatus
from membudget.loop.room import OnExceed, Room
from membudget.loop.root import Root
from membudget.loop.undo import run_until_done
from membudget.memory.counting import Counted
from membudget.planner.plan import Plan
from membudget.profile.optimizer_step import unwrapped
from membudget.step import check_arguments
from membudget.text import parse_bytes

R = TypeVar("R")


class Budgeted:
    """A training loop under a budget, from `start()` to `stop()`.

    As a context manager, it is started on entry, and stopped on exit.
    """

    def __init__(self, asked: int | str, roots: Sequence[Root], file: PlanFile):
        """Store what each model carries; called by `budget`."""
        self._asked = asked
        self._roots = tuple(roots)
        self._file = file
        self._hooks: list[Any] = []
        self._retries = 0

    def start(self) -> Budgeted:
        """Put the budget on the models; nothing runs.

        Raises:
            OptionError: If a model carries regions or another budget, is compiled, is
                part of another one, or is trained by several processes together.
        """
        if self._hooks:
            return self
        check_apart([root.model for root in self._roots])
        for root in self._roots:
            check_model(root.model)
            check_not_compiled(root.model)
        self._file.begin()
        try:
            for root in self._roots:
                root.meter.peers = [peer.meter for peer in self._roots]
                root.attach()
        except BaseException:
            self.stop()
            raise
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def stop(self) -> None:
        """Remove everything from the models; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for root in self._roots:
            root.detach()
        for root in self._roots:
            root.meter.peers = ()  # They refer to each other.

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
        result, retries = run_until_done(function, self._roots)
        self._retries += retries
        return result

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
        found = tuple(s for root in self._roots for s in root.situations())
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
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [
            root
            for root in self._roots
            if any(id(parameter) in held for parameter in root.model.parameters())
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
        self.stop()


def budget(
    model: Module | Sequence[Module],
    budget: int | str,
    *,
    optimizer: Optimizer | None = None,
    on_exceed: OnExceed = "raise",
    verify: float = 0.01,
    plan: Plan | str | Path | None = None,
) -> Budgeted:
    """Hold the training loop in the context to a number of bytes, unchanged.

    Each call of the model that a backward pass may follow is planned before it runs: it
    is recorded on fake tensors, and the fastest plan that fits what is left is put on
    the model. What the loop needs beside the model (its loss, the optimizer's step) is
    measured as it runs. Calls that run the same code on other sizes share what was
    recorded. Gradients, buffers and random streams are bitwise those of the plain loop.

    Args:
        model: The module whose forward the loop calls, or several, as for a GAN.
        budget: Total bytes, as a number or `"20GiB"`, that live tensors may take on the
            model's device, whoever holds them. `"40%"` means 40 % of what the plain
            micro-batch takes above that, `"40% of activations"` its gradients plus
            40 % of the rest.
        optimizer: The optimizer, whose state and temporaries then count from the first
            micro-batch on. By default, it is noticed when it first steps.
        on_exceed: What to do about a micro-batch whose smallest plan is over budget:
            `"raise"` a `BudgetError` before its forward begins, `"warn"` and run it
            under the smallest plan, or warn and run it `"plain"`. Likewise about a call
            without gradients, which has no plan.
        verify: Share of micro-batches in which recomputed tensors are compared with the
            dropped ones, by fingerprints. Besides these, the first one of each kind is
            verified, and of its further sizes the 2nd, 4th, 8th, ...
        plan: What `save()` wrote in an earlier run. Situations that are in it have
            their plan from the first micro-batch on, and are not recorded again.

    Returns:
        A context manager, with `start()`, `stop()`, `step()`, `status()`, `report()`,
        `save()`.

    Raises:
        OptionError: If the budget is neither bytes nor a share, `on_exceed` is unknown,
            or `verify` is no share.
        PlanError: If the plan was saved for other parameters, another device or another
            torch, or is not whole.

    Warns:
        BudgetWarning: If a micro-batch took more than was left for it, or the model
            cannot be recorded on fake tensors; each block is then recomputed. Also if
            the plan was saved under other conditions, such as other code of the model.

    Not counted: memory outside torch's allocator; on the CPU without a C++ compiler,
    tensors that nothing in Python refers to, and no micro-batch is measured.

    Example:
        >>> import membudget as mb, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with mb.budget(model, "1GiB", optimizer=optimizer) as fitted:
        ...     for _ in range(3):
        ...         model(torch.randn(8, 64)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> [(s.tensors, s.uses) for s in fitted.status().situations]
        [('8x64', 3)]
    """
    check_budget(budget)
    if on_exceed not in ("raise", "warn", "plain"):
        raise OptionError(
            f"on_exceed must be 'raise', 'warn' or 'plain'; got {on_exceed!r}"
        )
    if not 0 < verify <= 1:
        raise OptionError(f"verify must be a share above 0, at most 1; got {verify!r}")
    limit = share_of(budget) or parse_bytes(budget)
    models = [*model] if isinstance(model, Sequence) else [model]
    for one in models:
        check_arguments(one)
    rooms = (Room(limit, on_exceed, Counted(_device_of(one))) for one in models)
    pairs = zip(models, rooms, strict=True)
    steps = unwrapped(optimizer)
    roots = [Root(one, room, steps, float(verify)) for one, room in pairs]
    return Budgeted(budget, roots, PlanFile(roots, plan))


def _device_of(model: Module) -> torch.device:
    return main_device((*model.parameters(), *model.buffers()))
