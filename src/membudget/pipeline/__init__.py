"""Pipeline stages that recompute while they wait for the gradient.

On the pipelining engine of torch 2.13, over gloo or NCCL. `split` makes stages with
regions, `PipelineSchedule` runs them, `simulate_pipeline` predicts time and bytes.
"""

from __future__ import annotations

from membudget.pipeline.event_log import ActionBytes
from membudget.pipeline.measured_costs import measured_costs
from membudget.pipeline.orders import SCHEDULES, pipeline_order
from membudget.pipeline.pipeline_schedule import PipelineSchedule
from membudget.pipeline.recomputing_stage import RecomputingStage
from membudget.pipeline.split import split
from membudget.planner.pipeline_costs import StageCosts
from membudget.planner.pipeline_order import PipelineAction, PipelineOrder
from membudget.planner.pipeline_simulation import (
    PipelineEvent,
    PipelineSimulation,
    bubble,
    simulate_pipeline,
)

__all__ = [
    "SCHEDULES",
    "ActionBytes",
    "PipelineAction",
    "PipelineEvent",
    "PipelineOrder",
    "PipelineSchedule",
    "PipelineSimulation",
    "RecomputingStage",
    "StageCosts",
    "bubble",
    "measured_costs",
    "pipeline_order",
    "simulate_pipeline",
    "split",
]
