"""Express a schedule in terms of a model's modules and operators, as a plan does.

Calls of one module that keep the same share a region, so that the plan of a loop over
one cell stays small, and the engine verifies equal calls once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import (
    RERUN,
    Block,
    Choice,
    is_output,
    kept_from,
    retained_in,
    saved_in,
)
from membudget.planner.plan import KeptOutput, RegionPlan, StagePlan
from membudget.planner.slices import useful_kept


def region_plans(
    graph: StepGraph,
    calls: Sequence[ModuleCall],
    choices: Sequence[Choice],
    absent: Collection[int] = (),
) -> tuple[RegionPlan, ...]:
    """Express the choices of several module calls, equal ones of a module as one.

    Args:
        graph: The recorded step.
        calls: The module calls.
        choices: Their choices.
        absent: Op indices of operators that were recorded, but do not run.
    """
    of_path: dict[str, list[ModuleCall]] = {}
    for call in graph.calls:
        of_path.setdefault(call.path, []).append(call)
    numbers: dict[RegionPlan, list[int]] = {}
    for call, choice in zip(calls, choices, strict=True):
        alike = of_path[call.path]
        region = region_plan(graph, call.path, choice, absent)
        of_region = numbers.setdefault(replace(region, times=len(alike)), [])
        if len(alike) > 1:
            of_region.append(alike.index(call))
    return tuple(replace(r, numbers=tuple(n)) for r, n in numbers.items())


def region_plan(
    graph: StepGraph, path: str, choice: Choice, absent: Collection[int] = ()
) -> RegionPlan:
    """Express a block's choice in terms of the operators of one module's call.

    A kept storage is identified by the block's last operator that writes to it before
    autograd saves some of it. The region also retains what is written to it later, such
    as the other parts of a split.
    """
    present = [i for i in range(choice.start, choice.end) if i not in absent]
    writers, count = _writers(graph, choice, present), len(present)

    def outputs(storages: Iterable[int]) -> tuple[KeptOutput, ...]:
        found = [writers[s] for s in storages if s in writers]
        return tuple(sorted(found, key=lambda kept: (kept.number, kept.output)))

    if choice.engine == RERUN:
        return RegionPlan(path, count, (), engine=RERUN)
    kept = outputs(useful_kept(graph, choice))
    offloaded = outputs(choice.offloaded)
    before = [bisect_left(present, stage.start) for stage in choice.stages]
    stages = tuple(
        StagePlan(
            after,
            _saved_outputs(graph, present[after - 1]) if after else 0,
            outputs(retained),
        )
        for retained, after in zip(retained_in(graph, choice), before, strict=True)
    )
    sequence: tuple[str, ...] = ()
    if kept or stages:
        sequence = tuple(graph.operators[index].name for index in present)
    return RegionPlan(path, count, kept, stages, sequence=sequence, offloaded=offloaded)


def _saved_outputs(graph: StepGraph, index: int) -> int:
    """Return how many of its outputs an operator saves."""
    saved = (graph.saved[i] for i in saved_in(graph, Block(index, index + 1)))
    return sum(is_output(graph, s) for s in saved)


def _writers(
    graph: StepGraph, block: Block, present: Sequence[int]
) -> dict[int, KeptOutput]:
    """Return each storage's last writer before it is saved, of those that run."""
    found: dict[int, KeptOutput] = {}
    kept_anyway: set[int] = set()
    for number, index in enumerate(present, start=1):
        operator = graph.operators[index]
        if operator.is_view:
            continue
        for value in (graph.values[output] for output in operator.outputs):
            if kept_from(graph, block, value.storage) <= index:
                continue
            # The engine keeps outputs of `must_keep` operators without being told, and
            # what other operators write to them later.
            if operator.must_keep:
                kept_anyway.add(value.storage)
            kept = KeptOutput(number, value.output, operator.name)
            found[value.storage] = kept
    return {s: kept for s, kept in found.items() if s not in kept_anyway}
