"""Express a schedule in terms of a model's modules and operators, as a plan does.

Calls of one module that keep the same share a region, so that the plan of a loop over
one cell stays small, and the engine verifies equal calls once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import RERUN, Block, Choice, kept_from, saved_in
from membudget.planner.plan import KeptOutput, RegionPlan, StagePlan
from membudget.planner.slices import useful_kept


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


def region_plan(graph: StepGraph, path: str, choice: Choice) -> RegionPlan:
    """Express a block's choice in terms of the operators of one module's call.

    A kept storage is identified by the block's last operator that writes to it before
    autograd saves some of it. The region also retains what is written to it later, such
    as the other parts of a split.
    """
    writers, count = _writers(graph, choice)

    def outputs(storages: Iterable[int]) -> tuple[KeptOutput, ...]:
        found = [writers[s] for s in storages if s in writers]
        return tuple(sorted(found, key=lambda kept: (kept.number, kept.output)))

    if choice.engine == RERUN:
        return RegionPlan(path, count, (), engine=RERUN)
    kept = outputs(useful_kept(graph, choice))
    offloaded = outputs(choice.offloaded)
    stages = tuple(
        StagePlan(
            stage.start - choice.start,
            _saved_outputs(graph, stage.start - 1) if stage.start > choice.start else 0,
            outputs(stage.retained),
        )
        for stage in choice.stages
    )
    sequence: tuple[str, ...] = ()
    if kept or stages:
        operators = graph.operators[choice.start : choice.end]
        sequence = tuple(operator.name for operator in operators)
    return RegionPlan(path, count, kept, stages, sequence=sequence, offloaded=offloaded)


def _saved_outputs(graph: StepGraph, index: int) -> int:
    """Return how many of its outputs an operator saves."""
    saved = (graph.saved[i] for i in saved_in(graph, Block(index, index + 1)))
    return sum(graph.values[s.value].operator == index for s in saved)


def _writers(graph: StepGraph, block: Block) -> tuple[dict[int, KeptOutput], int]:
    """Return each storage's last writer before it is saved, and the operator count."""
    found: dict[int, KeptOutput] = {}
    kept_anyway: set[int] = set()
    operators = graph.operators[block.start : block.end]
    for number, operator in enumerate(operators, start=1):
        if operator.is_view:
            continue
        for value in (graph.values[index] for index in operator.outputs):
            if kept_from(graph, block, value.storage) < block.start + number:
                continue
            # The engine keeps outputs of `must_keep` operators without being told, and
            # what other operators write to them later.
            if operator.must_keep or not graph.storages[value.storage].bytes:
                kept_anyway.add(value.storage)
            kept = KeptOutput(number, value.output, operator.name)
            found[value.storage] = kept
    told = {s: kept for s, kept in found.items() if s not in kept_anyway}
    return told, len(operators)
