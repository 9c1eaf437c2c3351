"""One rank of the tests of a pipeline's bytes: four stages under 1F1B and GPipe.

The rank reports its peaks at 8 and at 64 micro-batches, what is predicted for all
ranks from the costs of the first, and its peak under plans for budgets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from membudget import pipeline
from membudget.pipeline import PipelinePlan, PipelineSchedule
from tests.faults.ranks import report_rank
from tests.pipeline.models import chain, loss_fn, run_step

ROWS, WIDTH, BLOCKS, RANKS = 64, 32, 12, 4
SHARES = (0.3, 0.6)


def run(name: str, micro_batches: int, **options: Any) -> PipelineSchedule:
    """Run two steps; the first makes what later steps find."""
    keys = ("sizes", "recomputed")
    split = {key: options.pop(key) for key in keys if key in options}
    stages = pipeline.split(chain(BLOCKS, WIDTH), name, verify=False, **split)
    schedule = PipelineSchedule(
        stages,
        name,
        micro_batches=micro_batches,
        loss_fn=loss_fn,
        meter=True,
        **options,
    )
    for step in range(2):
        run_step(schedule, step, ROWS, return_outputs=False)
    return schedule


def peak_bytes(schedule: PipelineSchedule) -> int:
    """Return the most live bytes of this rank in the last step."""
    return max(around.peak_bytes for around in schedule.bytes)


def above_bytes(schedule: PipelineSchedule) -> int:
    """Return the most bytes above those live before the step."""
    return peak_bytes(schedule) - schedule.bytes[0].before_bytes


def measured() -> dict[str, Any]:
    """Return peaks of this rank, and predictions from costs at eight micro-batches."""
    report: dict[str, Any] = {"measured": {}, "predicted": {}}
    for name, sizes in (("1F1B", (8, 64)), ("GPipe", (8, 16))):
        costs = None
        for micro_batches in sizes:
            schedule = run(name, micro_batches)
            costs = costs or pipeline.measured_costs(schedule)
            found = pipeline.simulate_pipeline(schedule.order, costs)
            here = schedule.stages[0].stage_index
            static_bytes = costs[here].static_bytes
            title = f"{name} {micro_batches}"
            report["measured"][title] = above_bytes(schedule)
            report["predicted"][title] = found.peak_bytes[here] - static_bytes
    return report


def planned(rank: int) -> list[dict[str, Any]]:
    """Return, for budgets between recomputing all and nothing, what a plan takes."""
    given: list[Any] = [None]
    if rank == 0:
        x = torch.randn(ROWS, WIDTH)
        given = [pipeline.measure_blocks(chain(BLOCKS, WIDTH), x)]
    dist.broadcast_object_list(given)
    order = pipeline.pipeline_order("1F1B", ranks=RANKS, micro_batches=8)
    boundary_bytes = ROWS * WIDTH * 4

    def plan(budget_bytes: int) -> PipelinePlan:
        return pipeline.plan_pipeline(
            order, given[0], budget_bytes, boundary_bytes=boundary_bytes
        )

    free = plan(10**9)
    least = max(free.everywhere.peak_bytes)
    most = max(free.simulation.peak_bytes)
    report = []
    for share in SHARES:
        budget_bytes = int(least + (most - least) * share)
        found = plan(budget_bytes)
        schedule = run(
            "1F1B",
            8,
            sizes=found.sizes,
            recomputed=found.recomputed,
            checkpoint=found.checkpoint,
        )
        module = schedule.stages[0].submod
        static_bytes = sum(p.nbytes for p in module.parameters())
        report.append(
            {
                "budget": budget_bytes,
                "peak": above_bytes(schedule) + static_bytes,
                "predicted": found.simulation.peak_bytes[rank],
                "recomputed": [len(numbers) for numbers in found.recomputed],
            }
        )
    return report


def body(rank: int) -> dict[str, Any]:
    """Return the report."""
    return {**measured(), "plans": planned(rank)}


if __name__ == "__main__":
    report_rank(body)
