"""The orders of pipeline schedules, with what is recomputed and sent when."""

from __future__ import annotations

from collections.abc import Sequence

from membudget._torch_pipelining import (
    OF_TORCH,
    computations,
    rank_of_stages,
    with_transfers,
)
from membudget.errors import OptionError
from membudget.planner.pipeline_order import (
    CheckpointMode,
    PipelineAction,
    PipelineOrder,
    checked_modes,
    gpipe,
    one_forward_one_backward,
    recomputing_ahead,
)

_OF_OURS = {"GPipe": gpipe, "1F1B": one_forward_one_backward}

SCHEDULES = (*_OF_OURS, *OF_TORCH)
"""Names of schedules."""


def pipeline_order(
    schedule: str,
    *,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int = 1,
    checkpoint: CheckpointMode | Sequence[CheckpointMode] = "always",
    ahead: bool = True,
) -> PipelineOrder:
    """Return what every rank of a pipeline does in one step.

    Args:
        schedule: `"GPipe"`, `"1F1B"`, `"Interleaved1F1B"`, `"InterleavedZeroBubble"`,
            `"ZBVZeroBubble"` or `"DualPipeV"`.
        ranks: Number of ranks.
        micro_batches: Number of micro-batches of a step.
        stages_per_rank: Number of stages of each rank; 1 for GPipe and 1F1B, 2 for
            the schedules that are named after a V.
        checkpoint: Of which micro-batches the stages drop their activations: of all
            (`"always"`), of all but the last (`"except_last"`), or of none
            (`"never"`); one for all stages, or one for each.
        ahead: Whether stages recompute while they wait for a gradient. Otherwise the
            backward pass recomputes.

    Raises:
        OptionError: The schedule is unknown, or does not exist for these numbers.

    Example:
        >>> order = pipeline_order("1F1B", ranks=4, micro_batches=8)
        >>> [order.most_in_flight(stage) for stage in range(4)]
        [4, 3, 2, 1]
        >>> print(*[action.kind for action in order.ranks[2][-6:-2]])
        receive_backward recompute backward send_backward
    """
    _check_numbers(schedule, ranks, micro_batches, stages_per_rank)
    stages = ranks * stages_per_rank
    rank_of = rank_of_stages(schedule, ranks, stages)
    if schedule in _OF_OURS:
        made = _OF_OURS[schedule](stages, micro_batches)
        computed = {rank: [(*a,) for a in actions] for rank, actions in made.items()}
    else:
        computed = computations(schedule, ranks, stages_per_rank, micro_batches)
    actions = with_transfers(computed, rank_of, micro_batches)
    order = PipelineOrder(
        schedule,
        tuple(tuple(PipelineAction(*named) for named in rank) for rank in actions),
        micro_batches,
        checked_modes(checkpoint, stages),
    )
    return recomputing_ahead(order) if ahead else order


def check_schedule(schedule: str) -> None:
    """Raise `OptionError` if there is no schedule of this name."""
    if schedule not in SCHEDULES:
        names = ", ".join(map(repr, SCHEDULES))
        raise OptionError(f"schedule is one of {names}; got {schedule!r}")


def _check_numbers(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int
) -> None:
    check_schedule(schedule)
    for name, number in (
        ("ranks", ranks),
        ("micro_batches", micro_batches),
        ("stages_per_rank", stages_per_rank),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptionError(f"{name} is a whole number from 1; got {number!r}")
    if schedule in _OF_OURS and stages_per_rank != 1:
        raise OptionError(
            f"{schedule} has one stage per rank, not {stages_per_rank}: take "
            f"'Interleaved1F1B' for several"
        )
