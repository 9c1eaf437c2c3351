"""What the engine's own Python costs, beside the operators that it runs again.

A replay region records each operator of its forward and serves each saved tensor. That
is some 12 microseconds an operator where the code stays in the processor's cache. A
kernel that moves more than the cache holds leaves it cold, and the same code then takes
ten times as long. The figures are those of one AMD EPYC core under Python 3.11,
from whole steps of the models in `benchmarks/planners.py`; on a device the host's time
is mostly hidden behind the kernels, and none is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from membudget.graph import StepGraph
from membudget.planner.regions import Region


@dataclass(frozen=True)
class Overheads:
    """Seconds for each operator that a region records.

    Attributes:
        warm_s: After a kernel that leaves the cache as it is.
        cold_s: After a kernel that moves more than it holds.
        cache_bytes: What it holds.
    """

    warm_s: float
    cold_s: float
    cache_bytes: int

    def seconds(self, graph: StepGraph, region: Region) -> float:
        """Return what a region costs in every step, whatever it drops."""
        total = 0.0
        for operator in graph.operators[region.start : region.end]:
            moved_bytes = operator.read_bytes + operator.written_bytes
            is_cold = moved_bytes > self.cache_bytes
            total += self.cold_s if is_cold else self.warm_s
        return total


NO_OVERHEADS = Overheads(0.0, 0.0, 0)
CPU_OVERHEADS = Overheads(warm_s=12e-6, cold_s=120e-6, cache_bytes=1 << 19)
