"""One rank of the tests of a pipeline's bytes: three stages under 1F1B and GPipe.

The rank reports its peaks at 8 and at 64 micro-batches, what is predicted for all
ranks from the costs of the first, and its peak under plans for budgets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from membudget import pipeline
from membudget.pipeline import PipelinePlan, PipelineSchedule
from tests.faults.ranks import chosen, report_rank
from tests.pipeline.models import chain, loss_fn, run_step

ROWS, WIDTH, BLOCKS, RANKS = 64, 32, 9, 3
RUNS = {"1F1B": (8, 64), "GPipe": (8, 16)}
BUDGETS = ("40%", "60%", "80%")


def run(name: str | PipelinePlan, micro_batches: int | None = None) -> PipelineSchedule:
    """Run two steps; the first makes what later steps find."""
    stages = pipeline.split(chain(BLOCKS, WIDTH), name, verify=False)
    schedule = PipelineSchedule(
        stages, name, micro_batches=micro_batches, loss_fn=loss_fn, meter=True
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


def measured(names: Iterable[str]) -> dict[str, Any]:
    """Return peaks of this rank, and predictions from costs at eight micro-batches."""
    report: dict[str, Any] = {"measured": {}, "predicted": {}}
    for name in names:
        costs = None
        report["measured"][name], report["predicted"][name] = [], []
        for micro_batches in RUNS[name]:
            schedule = run(name, micro_batches)
            costs = costs or pipeline.measured_costs(schedule)
            found = pipeline.simulate_pipeline(schedule.order, costs)
            here = schedule.stages[0].stage_index
            static_bytes = costs[here].static_bytes
            report["measured"][name].append(above_bytes(schedule))
            report["predicted"][name].append(found.peak_bytes[here] - static_bytes)
    return report


def planned(rank: int, budgets: Iterable[str]) -> dict[str, Any]:
    """Return, for budgets, what a plan for them takes on this rank."""
    x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    report = {}
    for budget in budgets:
        plan = pipeline.fit_pipeline(
            chain(BLOCKS, WIDTH),
            x,
            budget,
            micro_batches=8,
            target=target,
            loss_fn=loss_fn,
        )
        schedule = run(plan)
        module = schedule.stages[0].submod
        static_bytes = sum(p.nbytes for p in module.parameters())
        batch_bytes = 8 * x.nbytes if rank in (0, RANKS - 1) else 0
        report[budget] = {
            "budget": plan.budgets[rank],
            "peak": above_bytes(schedule) + static_bytes + batch_bytes,
            "predicted": plan.simulation.peak_bytes[rank],
            "recomputed": [len(numbers) for numbers in plan.recomputed],
        }
    return report


def body(rank: int) -> dict[str, Any]:
    """Return the report."""
    return {**measured(chosen(RUNS)), "plans": planned(rank, chosen(BUDGETS))}


if __name__ == "__main__":
    report_rank(body)
