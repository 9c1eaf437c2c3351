"""Pipeline stages that recompute while they wait for the gradient.

On the pipelining engine of torch 2.13, over gloo or NCCL. `fit_pipeline` finds a plan
that fits each rank's budget, `split` makes stages with regions, `PipelineSchedule` runs
them, `simulate_pipeline` predicts time and bytes.
"""

from __future__ import annotations

from membudget.pipeline.event_log import ActionBytes
from membudget.pipeline.fit_pipeline import fit_pipeline
from membudget.pipeline.measured_blocks import measure_blocks
from membudget.pipeline.measured_costs import measured_costs
from membudget.pipeline.orders import SCHEDULES, pipeline_order
from membudget.pipeline.picture import save_timelines
from membudget.pipeline.pipeline_schedule import PipelineSchedule
from membudget.pipeline.recomputing_stage import RecomputingStage
from membudget.pipeline.split import split
from membudget.planner.pipeline_costs import BlockOfPipeline, StageCosts
from membudget.planner.pipeline_order import PipelineAction, PipelineOrder
from membudget.planner.pipeline_plan import PipelinePlan, plan_pipeline
from membudget.planner.pipeline_simulation import (
    PipelineEvent,
    PipelineSimulation,
    bubble,
    simulate_pipeline,
)
from membudget.report.pipeline_text import comparison_text, timeline_text

__all__ = [
    "SCHEDULES",
    "ActionBytes",
    "BlockOfPipeline",
    "PipelineAction",
    "PipelineEvent",
    "PipelineOrder",
    "PipelinePlan",
    "PipelineSchedule",
    "PipelineSimulation",
    "RecomputingStage",
    "StageCosts",
    "bubble",
    "comparison_text",
    "fit_pipeline",
    "measure_blocks",
    "measured_costs",
    "pipeline_order",
    "plan_pipeline",
    "save_timelines",
    "simulate_pipeline",
    "split",
    "timeline_text",
]
