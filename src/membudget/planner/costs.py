"""Seconds as planners need them: checked, averaged, and with the engine's overhead.

A replay region records each operator of its forward, serves each saved tensor, and runs
operators again from Python. While the engine's code stays in the processor's cache,
that takes about 12 µs an operator. A kernel that moves more bytes than the cache holds
evicts that code, and the next operator takes ten times as long. The figures are those
of one AMD EPYC core under Python 3.11, fitted to whole steps of the models in
`benchmarks/planners.py`. On a device the host's time mostly hides behind the kernels,
so none is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from membudget.errors import OptionError
from membudget.graph import ModuleCall, Operator, StepGraph
from membudget.planner.choice import Block


@dataclass(frozen=True)
class Overheads:
    """The engine's time for each operator that a region records or runs again.

    Attributes:
        warm_s: After a kernel that leaves the cache warm.
        cold_s: After a kernel that evicts it.
        cache_bytes: The size of the cache.
    """

    warm_s: float
    cold_s: float
    cache_bytes: int

    def of(self, operator: Operator) -> float:
        """Return the overhead of recording an operator, or of running it again."""
        moved_bytes = operator.read_bytes + operator.written_bytes
        return self.cold_s if moved_bytes > self.cache_bytes else self.warm_s

    def recording_s(self, graph: StepGraph, block: Block) -> float:
        """Return the overhead of recording a block in every step."""
        return self.again_s(graph, range(block.start, block.end))

    def again_s(self, graph: StepGraph, recomputed: Iterable[int]) -> float:
        """Return the overhead of running operators again."""
        return sum(self.of(graph.operators[index]) for index in recomputed)

    def added_to_forward(self, graph: StepGraph) -> StepGraph:
        """Return the step with the overhead added to each forward operator.

        On that graph a recomputed operator costs its own time and the engine's, which
        is what a solver has to weigh. The plain step becomes slower by a constant that
        is the same for all schedules.
        """
        until = graph.backward_start
        forward = [
            replace(o, seconds=o.seconds + self.of(o)) for o in graph.operators[:until]
        ]
        return replace(graph, operators=(*forward, *graph.operators[until:]))


NO_OVERHEADS = Overheads(0.0, 0.0, 0)
CPU_OVERHEADS = Overheads(warm_s=12e-6, cold_s=120e-6, cache_bytes=1 << 19)


def check_seconds(graph: StepGraph) -> None:
    """Reject operator times that are not finite, or negative.

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
    """Average the times of corresponding operators over equal blocks.

    Blocks that run the same operators on the same shapes take the same time; measured
    differences between them are noise.
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
