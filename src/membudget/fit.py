"""`fit`: make a training step of a model fit into a number of bytes.

record the plain step ──> choose a schedule ──> apply its plan ──> verify, measure
^                                       │
└── ask for less, by what was over <────┤
v
a `Fitted` model
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch.nn import Module

from membudget.attach import has_region
from membudget.attempt import Attempt, try_plan
from membudget.budget import Budget, budget_in_all, check_budget, free_bytes
from membudget.errors import OptionError
from membudget.fitted import Fitted
from membudget.modes import AUTO, check_mode
from membudget.planning import make_plan, next_schedule
from membudget.profile import Device, Profile, profile
from membudget.profile.optimizer import OptimizerLike
from membudget.step import LossFunction, Step, check_arguments


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

    Args:
        step: The step, to verify and measure under each plan.
        plain: It, recorded without regions.
        budget: What it may allocate.
        mode: As for `fit`.

    Raises:
        BudgetError: If no plan fits, or none of several was measured to fit.
    """
    attempts: list[Attempt] = []
    while True:
        schedule = next_schedule(plain, budget, mode, attempts)
        plan = make_plan(plain, schedule, step.model, budget.step_bytes)
        found, applied = try_plan(step, plan, schedule)
        attempts.append(found)
        if found.peak_bytes <= budget.step_bytes:
            return Fitted(mode, step, plain, attempts, applied)
        applied.remove()


def _check_step(model: Any, batch: Any) -> None:
    """Reject a model and a batch of which no step can be fitted.

    Raises:
        OptionError: If the model is none, carries regions, or is called with nothing.
    """
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
