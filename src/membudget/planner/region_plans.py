"""Express a schedule in terms of a model's modules and operators, as a plan does.

Calls of one module that keep the same share a region, so that the plan of a loop over
one cell stays small, and the engine verifies equal calls once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import Choice
from membudget.planner.plan import RegionPlan, region_plan


def region_plans(
    graph: StepGraph, calls: Sequence[ModuleCall], choices: Sequence[Choice]
) -> tuple[RegionPlan, ...]:
    """Express the choices of several module calls, equal ones of a module as one."""
    of_path: dict[str, list[ModuleCall]] = {}
    for call in graph.calls:
        of_path.setdefault(call.path, []).append(call)
    numbers: dict[RegionPlan, list[int]] = {}
    for call, choice in zip(calls, choices, strict=True):
        alike = of_path[call.path]
        region = region_plan(graph, call.path, choice)
        of_region = numbers.setdefault(replace(region, times=len(alike)), [])
        if len(alike) > 1:
            of_region.append(alike.index(call))
    return tuple(replace(r, numbers=tuple(n)) for r, n in numbers.items())
