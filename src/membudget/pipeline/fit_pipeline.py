"""Fit the stages of a pipeline into a memory budget, from its blocks to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from membudget.allowance import check_budget, share_of
from membudget.errors import OptionError
from membudget.pipeline.measured_blocks import measure_blocks
from membudget.pipeline.orders import pipeline_order
from membudget.planner.pipeline_costs import BlockOfPipeline
from membudget.planner.pipeline_order import PipelineOrder
from membudget.planner.pipeline_plan import PipelinePlan, fullest_rank, plan_pipeline
from membudget.profile.optimizer_step import OptimizerLike
from membudget.ranks import Ranks
from membudget.text import parse_bytes

_LOSS_BYTES = 8
"""Most bytes of a micro-batch's loss, which the last rank keeps to the step's end."""


def fit_pipeline(
    blocks: Iterable[Module],
    micro_batch: Tensor,
    budget: int | str | Sequence[int | str],
    *,
    micro_batches: int,
    schedule: str = "1F1B",
    ranks: int | None = None,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: OptimizerLike = None,
    latency_s: float = 0.0,
    group: dist.ProcessGroup | None = None,
) -> PipelinePlan:
    """Return the fastest plan found under which every rank of a pipeline fits.

    A plan says which stage gets which blocks, and which of these it recomputes. Give it
    to `split` and to `PipelineSchedule`; nothing is applied before. Call this on every
    rank: rank 0 runs each block by itself, a few times, and all ranks get its plan.
    Parameters, gradients, buffers and random streams are then what they were.

    Args:
        blocks: The model as a chain: a `Sequential`, a `ModuleList`, or any modules of
            which each takes the output of the one before, one tensor. Each may be on
            the host: it is on the device of `micro_batch` while it is measured.
        micro_batch: What the first stage takes of one micro-batch.
        budget: Most live bytes of a rank in a step, as a number or `"8GiB"`: one for
            all ranks, or one for each. They count the rank's parameters, gradients and
            optimizer state, activations, temporaries and transfers, and the whole batch
            on the first and the last rank. `"40%"` is what the fullest rank of balanced
            stages that keep all holds before the step, and 40 % of its peak above that.
        micro_batches: Number of micro-batches of a step.
        schedule: Name of the schedule, with one stage per rank: `"1F1B"`, `"GPipe"`.
        ranks: Number of ranks, to plan for a pipeline that is not running: this process
            then measures for itself. By default the ranks of the group.
        target: What `loss_fn` takes beside the output, of one micro-batch.
        loss_fn: The loss of the last stage, as `PipelineSchedule` takes it.
        optimizer: The optimizer, or its class, whose state counts.
        latency_s: Seconds that a tensor travels from one rank to another.
        group: The ranks of the pipeline; by default all.

    Raises:
        OptionError: The schedule does not exist for these ranks, has several stages on
            one, or there are fewer blocks than ranks; a budget is no size, or there are
            not as many as ranks; no processes are there and `ranks` is missing.
        BudgetError: No partition fits, with the least budget that one fits.
        RankError: Rank 0 failed in measuring.

    Example:
        >>> import torch
        >>> blocks = [torch.nn.Linear(64, 64) for _ in range(4)]
        >>> plan = fit_pipeline(
        ...     blocks, torch.zeros(8, 64), "1GiB", ranks=2, micro_batches=4
        ... )
        >>> plan.recomputed
        ((), ())
    """
    budgets = [budget] if isinstance(budget, int | str) else [*budget]
    for one in budgets:
        check_budget(one)
    order = pipeline_order(
        schedule, ranks=_count(ranks, group), micro_batches=micro_batches
    )
    make = partial(_planned, [*blocks], micro_batch, order, budgets, latency_s)
    given = {"target": target, "loss_fn": loss_fn, "optimizer": optimizer}
    if ranks is not None:
        return make(**given)
    return Ranks(micro_batch.device, group).shared(partial(make, **given))


def _count(ranks: int | None, group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks to plan for."""
    if ranks is not None:
        return ranks
    if not dist.is_initialized():
        raise OptionError(
            "torch.distributed is not initialised, so the number of ranks is unknown: "
            "call torch.distributed.init_process_group() first, or pass ranks=, the "
            "number of ranks to plan for"
        )
    return dist.get_world_size(group)


def _planned(
    chain: Sequence[Module],
    micro_batch: Tensor,
    order: PipelineOrder,
    budgets: Sequence[int | str],
    latency_s: float,
    **options: Any,
) -> PipelinePlan:
    measured = measure_blocks(chain, micro_batch, **options)
    times = order.micro_batches
    batch_bytes = [0] * len(measured)
    batch_bytes[0] += times * micro_batch.nbytes
    if isinstance(target := options["target"], Tensor):
        batch_bytes[-1] += times * target.nbytes
    batch_bytes[-1] += times * _LOSS_BYTES
    blocks = [
        replace(block, static_bytes=block.static_bytes + more)
        for block, more in zip(measured, batch_bytes, strict=True)
    ]
    in_bytes = [_bytes_of(budget, order, blocks) for budget in budgets]
    return plan_pipeline(order, blocks, in_bytes, latency_s=latency_s)


def _bytes_of(
    budget: int | str, order: PipelineOrder, blocks: Sequence[BlockOfPipeline]
) -> int:
    """Return a budget in bytes; a share is of the fullest rank of balanced stages."""
    share = share_of(budget)
    if share is None:
        return parse_bytes(budget)
    if share.is_of_activations:
        raise OptionError(
            f"the budget of a pipeline is bytes or a share of a rank's peak, such as "
            f"'8GiB' or '40%'; got {budget!r}"
        )
    before_bytes, peak_bytes = fullest_rank(order, blocks)
    return before_bytes + int(share.part * (peak_bytes - before_bytes))
