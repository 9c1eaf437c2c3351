"""`fit`: make a model's training step fit in a memory budget.

record the plain step  ──>  choose a schedule  ──>  apply its plan  ──>  verify, measure
                            ^                                               │
                            ├─ lower the target by the excess <─ too large ─┤
                            ├─ leave out the regions at fault <─ not equal ─┤
                                                                            v
                                                                    a `Fitted` model
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch.nn import Module

from membudget.allocation import is_out_of_memory, map_blocks_if_limited
from membudget.allowance import Budget, absent_bytes, check_budget, free_budget
from membudget.deadline import Deadline
from membudget.errors import OptionError
from membudget.fittable import check_fittable, check_on_ranks, check_trains
from membudget.fitted import DOES_NOT_FIT, MAPS_BLOCKS, Fitted
from membudget.host import Offloading, asked_host
from membudget.modes import AUTO, check_mode
from membudget.one_plan import fit_on_ranks
from membudget.planned import without_plan
from membudget.profile import Cache, Device, Profile, profile_step
from membudget.profile.optimizer_step import OptimizerLike
from membudget.ranks import Ranks
from membudget.recorded import Measure, StaleProfileError, fit_recorded
from membudget.step import ABSENT, LossFunction, Step, step_of


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
    measure: Measure | None = None,
    cache: str | Path | None = None,
    seconds: float | None = None,
    host: int | str | None = None,
    offload: Offloading = "auto",
) -> Fitted:
    """Apply the fastest plan found under which a training step fits the budget.

    Gradients, buffers and random streams stay bitwise equal to those of the plain step,
    and the training loop needs no change. `fit` profiles the plain step (see `profile`)
    and measures it; if it does not fit, two steps run under each plan that is tried:
    the first compares fingerprints of recomputed and dropped values, the second
    measures memory and is compared with the plain step. If they differ, `fit` plans
    again without the regions at fault. If random numbers decide what a step runs (as
    with dropped layers), all of these steps run the variant that needs most memory. The
    model's state is restored afterwards.

    A model that is wrapped in DistributedDataParallel, sharded by `fully_shard`, or
    tensor parallel is fitted by all ranks of the default process group together, each
    with its batch: the plan is made once, of the most bytes and the slowest seconds of
    all, and fits on each. Its steps are not timed, no region is left out, and `cache`
    is not used. Wrap the model first.

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
            gradients plus 40 % of the rest. On an accelerator, it bounds what the
            process reserves, which is what runs out, and `None` takes what is free,
            less 5 %.
        loss_fn: Computes the loss from `(output, batch)`, or for a pair from `(output,
            targets)`. By default, the loss is what the model's `training_step` returns
            (Lightning), or found in the output; see `profile`.
        modules: The module that is trained, if `model` is a step function.
        mode: `"auto"` searches for the fastest plan. All other modes are fixed rules:
            `"none"` has no regions, `"full"` keeps nothing inside blocks, `"selective"`
            keeps the outputs of matrix products, convolutions and attention,
            `"attention"` those of attention kernels alone, `"every_2"` keeps nothing in
            every second block, `"every_3"` in every third.
        optimizer: Optimizer, or its class, whose state counts toward the budget.
        fake: Whether to profile on fake tensors; times are then estimated. A plain step
            that runs out of memory is profiled so in any case.
        device: Device for which to estimate operator times; see `profile`.
        measure: Which plans to time, in turns with plain steps: `"one"` times the plan
            predicted to be the fastest; `"best"` also times plans that use other
            engines, and takes the fastest; `"none"` times nothing. The default is
            `"best"` if the plain step takes less than a second, else `"one"`. Nothing
            is timed if the plain step does not fit.
        cache: Folder in which profiles are kept; see `profile`. The step is profiled
            anew if it turns out that the cached profile is of another one.
        seconds: Seconds after which no annealing begins, no plan with other engines is
            tried and no step is timed; the report says what was skipped. One plan that
            fits is made and verified in any case. `None` means no limit.
        host: Bytes of the host's memory that a plan may move tensors to, such as
            `"64GiB"`. Each tensor is then kept, recomputed or moved, whichever makes
            the step the fastest, with the link between device and host as it was
            measured. `None` moves nothing.
        offload: `False` moves nothing, whatever `host` is.

    Returns:
        The fitted model, with its report.

    Raises:
        BudgetError: If no plan fits; the message states the smallest feasible budget.
        OptionError: If the budget is neither a size nor a share, the mode is unknown,
            `cache` is not a folder, `seconds` is negative, `host` is not a positive
            size or is given for a model on the CPU, the model has regions that `fit`
            did not attach or parameters on several devices, it is wrapped in
            FullyShardedDataParallel, or its ranks run different operators.
        OutOfMemoryError: If a step, or planning it, finds less memory than the budget
            allows.
        RecomputeMismatchError: If recomputed values differ even with more outputs kept,
            and the plain step does not fit; or if the bits differ on any rank.
        RankError: If another rank failed, with its reason.

    Warns:
        UnrepeatableWarning: If an output is kept because its recompute differed, or a
            module gets no region because the step went wrong under it; `status()`
            names both.

    Example:
        >>> import torch
        >>> layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)]
        >>> model = torch.nn.Sequential(*layers)
        >>> fitted = fit(model, torch.zeros(32, 64), "100%", fake=True)
        >>> fitted.plan.regions
        ()
        >>> fitted.remove()
    """
    deadline = Deadline(seconds)
    check_mode(mode)
    if measure not in (None, *get_args(Measure)):
        raise OptionError(
            f"measure must be 'best', 'one', 'none' or None; got {measure!r}"
        )
    if budget is not None:
        check_budget(budget)
    kept = None if cache is None else Cache.at(cache)
    step = step_of(model, batch, loss_fn, modules)
    notes = (MAPS_BLOCKS,) if map_blocks_if_limited() else ()
    with without_plan(step.model):
        check_fittable(step)
        ranks = Ranks.of(step.model, step.device)
        given = asked_host(host, offload, step.device, device)
        if budget is None:  # Before profiling, which allocates memory itself.
            budget = free_budget(step.model)
            budget = budget if ranks is None else -ranks.most([-budget])[0]
        if ranks is not None:
            check_on_ranks(step.model, fake, given is not None)
            return fit_on_ranks(step, ranks, budget, mode, optimizer, device, deadline)
        while True:
            plain = _profiled(step, optimizer, fake, device, kept)
            check_trains(plain.graph)
            plain = replace(plain, notes=plain.notes + notes)
            absent = absent_bytes(plain.graph.static, optimizer, step.device)
            limit = Budget.of(budget, plain, absent)
            with suppress(StaleProfileError):
                return fit_recorded(step, plain, limit, mode, measure, deadline, given)
            assert kept is not None  # Only a profile of the cache can be stale.
            kept = replace(kept, reads=False)


def _profiled(
    step: Step,
    optimizer: OptimizerLike,
    fake: bool,
    device: str | Device | None,
    cache: Cache | None,
) -> Profile:
    """Profile a step, on fake tensors if asked to or if it runs out of memory."""
    if not fake:
        try:
            return profile_step(step, optimizer, fake, device, cache)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    found = profile_step(step, optimizer, True, device, cache)
    return found if fake else replace(found, notes=(*found.notes, DOES_NOT_FIT))
