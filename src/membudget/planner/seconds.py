"""The seconds of operators, as planners need them."""

from __future__ import annotations

import math
from dataclasses import replace

from membudget.errors import OptionError
from membudget.graph import ModuleCall, StepGraph


def check_seconds(graph: StepGraph) -> None:
    """Refuse times that are none.

    Raises:
        OptionError: If an operator takes NaN, infinite or negative seconds.
    """
    for index, operator in enumerate(graph.operators):
        if not 0 <= operator.seconds < math.inf:
            raise OptionError(
                f"operator {index} ({operator.name}) takes {operator.seconds} seconds; "
                "a planner needs finite times that are not negative"
            )


def smoothed(graph: StepGraph) -> StepGraph:
    """Return the graph with equal times for the operators of equal blocks.

    Blocks that run the same operators on the same shapes take the same time, and what a
    stopwatch says of one of them is noise.
    """
    groups: dict[tuple[object, ...], list[ModuleCall]] = {}
    for call in graph.calls:
        inside = graph.operators[call.start : call.end]
        key = tuple((o.name, o.read_bytes, o.written_bytes, o.flops) for o in inside)
        if key:
            groups.setdefault(key, []).append(call)
    operators = list(graph.operators)
    for alike in sorted(groups.values(), key=lambda of: of[0].end - of[0].start):
        for offset in range(alike[0].end - alike[0].start):
            indices = [call.start + offset for call in alike]
            mean = sum(operators[i].seconds for i in indices) / len(indices)
            for index in indices:
                operators[index] = replace(operators[index], seconds=mean)
    return replace(graph, operators=tuple(operators))
