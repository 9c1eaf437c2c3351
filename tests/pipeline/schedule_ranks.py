"""One rank of the tests of schedules: each schedule, in several ways.

For each way the rank reports whether losses, gradients and the random stream of every
step are those of the same schedule without checkpointing, how often each region was
recomputed for a micro-batch, and the kinds of its actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from membudget import pipeline
from tests.faults.ranks import chosen, report_rank
from tests.pipeline.models import chain, loss_fn, run_step

STEPS = 1
MICRO_BATCHES = 4
BLOCKS = 4

# In this order: a run of a share of them, by `tests.shares`, takes both engines.
WAYS: dict[str, dict[str, Any]] = {
    "rerun ahead": {"engine": "rerun"},
    "rerun lazily": {"engine": "rerun", "ahead": False},
    "all but the last": {"checkpoint": "except_last"},
    "replay ahead": {"engine": "replay"},
    "replay lazily": {"engine": "replay", "ahead": False},
}


def trained(
    name: str, **way: Any
) -> tuple[list[Tensor], list[int], pipeline.PipelineSchedule]:
    """Train under a schedule.

    Returns:
        What each step leaves, how often each block of this rank was recomputed in the
        last step, and the schedule.
    """
    engine = way.pop("engine", "auto")
    stages = pipeline.split(chain(BLOCKS), name, engine=engine)
    schedule = pipeline.PipelineSchedule(
        stages, name, micro_batches=MICRO_BATCHES, loss_fn=loss_fn, **way
    )
    left = [t for step in range(STEPS) for t in run_step(schedule, step)]
    # In its first step, torch also infers shapes from a step of one micro-batch.
    before = recomputes(schedule)
    left += run_step(schedule, STEPS)
    after = recomputes(schedule)
    return left, [b - a for a, b in zip(before, after, strict=True)], schedule


def recomputes(schedule: pipeline.PipelineSchedule) -> list[int]:
    """Return how often each block of this rank was recomputed so far."""
    return [
        region.recomputes
        for stage in schedule.stages
        if stage.applied is not None
        for region in stage.applied.status().regions
    ]


def compared(name: str, ways: Iterable[str]) -> dict[str, Any]:
    """Return what some ways of a schedule do beside no checkpointing."""
    plain, _, _ = trained(name, checkpoint="never")
    report: dict[str, Any] = {}
    for title in ways:
        found, times, schedule = trained(name, **WAYS[title])
        report[title] = {
            "equal": len(found) == len(plain) and all(map(torch.equal, found, plain)),
            "recomputes": times,
            "kinds": [event.action.kind for event in schedule.events],
            "gathered": len(schedule.gathered_events()),
            "costs": len(pipeline.measured_costs(schedule)),
        }
    return report


def body(rank: int) -> dict[str, Any]:
    """Return the report of each schedule."""
    assert dist.get_rank() == rank
    return {name: compared(name, chosen(WAYS)) for name in pipeline.SCHEDULES}


if __name__ == "__main__":
    report_rank(body)
