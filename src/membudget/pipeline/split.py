"""Split a chain of blocks into the stages of a pipeline."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Sequential

from membudget._torch_pipelining import V_SHAPED, rank_of_stages
from membudget.apply import apply
from membudget.errors import OptionError
from membudget.pipeline.orders import check_schedule
from membudget.pipeline.recomputing_stage import RecomputingStage
from membudget.planner.pipeline_cuts import equal_sizes
from membudget.planner.pipeline_plan import PipelinePlan


def split(
    blocks: Iterable[Module],
    schedule: str | PipelinePlan = "1F1B",
    *,
    stages_per_rank: int | None = None,
    sizes: Sequence[int] | None = None,
    recomputed: Sequence[Iterable[int]] | None = None,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> list[RecomputingStage]:
    """Return this rank's stages of a chain of blocks, with regions on the blocks.

    Each stage's module is a `Sequential` of its blocks, under their numbers in the
    whole chain, so that its state dict is a part of the chain's. Only this rank's
    blocks are moved to the device.

    Args:
        blocks: The model as a chain: a `Sequential`, a `ModuleList`, or any modules of
            which each takes the output of the one before.
        schedule: Name of the schedule, which says where the stages lie; or a plan of
            `fit_pipeline`, which also says the number of stages and, by default,
            `sizes` and `recomputed`.
        stages_per_rank: Number of stages of each rank; 1 by default, and 2 for
            interleaved schedules and those that are named after a V.
        sizes: Number of blocks of each stage; by default as equal as possible.
        recomputed: For each stage, the numbers of its blocks that get a region, counted
            from the stage's first; by default all of them.
        device: Where this rank's stages run.
        group: The ranks of the pipeline; by default all.
        **options: Options of the regions; see `membudget.checkpoint`.

    Raises:
        OptionError: The sizes do not add up to the blocks, or a number is out of range.

    Example:
        >>> [len(part) for part in parts_of(range(7), [2, 2, 3])]
        [2, 2, 3]
    """
    if isinstance(schedule, PipelinePlan):
        sizes = schedule.sizes if sizes is None else sizes
        recomputed = schedule.recomputed if recomputed is None else recomputed
        stages_per_rank = schedule.order.stages // len(schedule.order.ranks)
        schedule = schedule.order.name
    check_schedule(schedule)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if stages_per_rank is None:
        stages_per_rank = 2 if "Interleaved" in schedule or schedule in V_SHAPED else 1
    stages = ranks * stages_per_rank
    chain = [*blocks]
    parts = parts_of(chain, equal_sizes(len(chain), stages) if sizes is None else sizes)
    if len(parts) != stages:
        raise OptionError(
            f"sizes names {len(parts)} stages, and {ranks} ranks of {stages_per_rank} "
            f"have {stages}"
        )
    chosen = _checked_blocks(parts, recomputed)
    rank_of, first, made = rank_of_stages(schedule, ranks, stages), 0, []
    for stage, part in enumerate(parts):
        if rank_of[stage] == rank:
            named = {str(first + i): block for i, block in enumerate(part)}
            module = Sequential(OrderedDict(named)).to(device)
            place = torch.device(device)
            made.append(RecomputingStage(module, stage, stages, place, group=group))
            if chosen[stage]:
                regions = [str(first + i) for i in chosen[stage]]
                made[-1].applied = apply(module, names=regions, **options)
        first += len(part)
    return made


def parts_of(chain: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    """Cut a chain into parts of these sizes.

    Raises:
        OptionError: A part is empty, or the sizes do not add up to the chain.
    """
    if any(size < 1 for size in sizes) or sum(sizes) != len(chain):
        raise OptionError(
            f"sizes are whole numbers from 1 that add up to the {len(chain)} blocks; "
            f"got {list(sizes)}, together {sum(sizes)}"
        )
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [chain[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _checked_blocks(
    parts: Sequence[Sequence[Module]], recomputed: Sequence[Iterable[int]] | None
) -> list[list[int]]:
    if recomputed is None:
        return [[*range(len(part))] for part in parts]
    chosen = [sorted(set(numbers)) for numbers in recomputed]
    if len(chosen) != len(parts):
        raise OptionError(
            f"recomputed names {len(chosen)} stages, and the pipeline has {len(parts)}"
        )
    for stage, (part, numbers) in enumerate(zip(parts, chosen, strict=True)):
        if numbers and not 0 <= numbers[0] <= numbers[-1] < len(part):
            raise OptionError(
                f"recomputed names the blocks {numbers} of stage {stage}, which has "
                f"{len(part)}, numbered from 0"
            )
    return chosen
