"""What the engine's own Python costs, beside the operators that it runs again.

A replay region records each operator of its forward, serves each saved tensor, and runs
operators again from Python. Each is some 12 microseconds an operator where the code
stays in the processor's cache. A kernel that moves more than the cache holds leaves it
cold, and the same code then takes ten times as long. The figures are those of one AMD
EPYC core under Python 3.11, from whole steps of the models in `benchmarks/planners.py`;
on a device the host's time is mostly hidden behind the kernels, and none is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from membudget.graph import Operator, StepGraph
from membudget.planner.regions import Region


@dataclass(frozen=True)
class Overheads:
    """Seconds for each operator that a region records, and for each that runs again.

    Attributes:
        warm_s: After a kernel that leaves the cache as it is.
        cold_s: After a kernel that moves more than it holds.
        cache_bytes: What it holds.
    """

    warm_s: float
    cold_s: float
    cache_bytes: int

    def of(self, operator: Operator) -> float:
        """Return what one operator costs, recorded or run again."""
        moved_bytes = operator.read_bytes + operator.written_bytes
        return self.cold_s if moved_bytes > self.cache_bytes else self.warm_s

    def seconds(self, graph: StepGraph, region: Region) -> float:
        """Return what a region costs in every step, whatever it drops."""
        return self.again(graph, range(region.start, region.end))

    def again(self, graph: StepGraph, recomputed: Iterable[int]) -> float:
        """Return what operators that run again cost beside their own seconds."""
        return sum(self.of(graph.operators[index]) for index in recomputed)

    def added(self, graph: StepGraph) -> StepGraph:
        """Return the step with the seconds that its forward takes at most.

        All plans of it come out slower by the same, what its operators cost recorded;
        and by what those cost that run again.
        """
        until = graph.backward_start
        forward = [
            replace(o, seconds=o.seconds + self.of(o)) for o in graph.operators[:until]
        ]
        return replace(graph, operators=(*forward, *graph.operators[until:]))


NO_OVERHEADS = Overheads(0.0, 0.0, 0)
CPU_OVERHEADS = Overheads(warm_s=12e-6, cold_s=120e-6, cache_bytes=1 << 19)
