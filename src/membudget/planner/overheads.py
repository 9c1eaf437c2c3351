"""What the engines take beside the operators: the prices of regions.

A region is priced by what it does: it records operators and saved tensors in the
forward, and asks for saved tensors and runs operators again in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import RERUN, Block, Choice, saved_in

RERUN_FORWARD = 0.5
"""The share of a rerun region's overhead that the forward takes."""


@dataclass(frozen=True)
class Overheads:
    """The engines' own time, in the forward and in the backward.

    A replay region records each forward operator but views, whose cost is lost among
    the others, and each saved tensor. A kernel that moves more bytes than the cache
    holds evicts the engine's code, so that what follows it takes longer. The recorder
    in Python takes longest for a write to a part of a storage, as by recurrent cells to
    their gates, and to memory from before the step, as by BatchNorm to its running
    statistics, because it keeps apart which content each tensor has. In the backward,
    each saved tensor is asked for, and an operator that runs again takes a share of its
    time in the forward, and a little more: it does without autograd and Python, in
    memory that is still in the cache.

    A rerun region records no operator. It notes the state that its modules reach,
    restores it, and gives each saved tensor a handle.

    The overheads are fitted to the times of forward and backward passes of the half of
    the field suite that may be tuned on, plain and under regions, on one core under
    Python 3.11. What runs in Python was fitted on an AMD EPYC, where torch launches an
    operator in `FITTED_LAUNCH_S`; elsewhere, it is in proportion. Replays in C++ do not
    follow that: on another EPYC, launches take 1.8 times as long, and recording 1.4
    times; on an Intel Xeon, both take 1.25 times as long. So one set of overheads that
    lies between those two machines serves all; `again_share` is 0.79 on the Xeon and
    0.93 on the second EPYC. A step that is timed shows by what factor recording, or
    rerunning, is off for it (`membudget.terms`).
    On an accelerator, kernels mostly hide the host's time, so no overhead is counted.
    """

    cache_bytes: int = 0
    replays_in_python: bool = True
    # Of a replay region, in the forward.
    record_region_s: float = 0.0
    record_s: float = 0.0  # Of an operator after whose kernel the cache is warm.
    record_cold_s: float = 0.0
    record_saved_s: float = 0.0  # Of each saved tensor.
    record_write_s: float = 0.0  # More, of a write to a part, or to older memory.
    # And in the backward.
    replay_region_s: float = 0.0
    replay_saved_s: float = 0.0  # Of each saved tensor.
    again_s: float = 0.0  # Of each operator that runs again, beside
    again_share: float = 1.0  # this share of its time in the forward.
    # Of a rerun region, in both.
    rerun_region_s: float = 0.0
    rerun_module_s: float = 0.0  # Of each module call in it.
    rerun_nested_s: float = 0.0  # If the region's module calls others.
    rerun_saved_s: float = 0.0  # Of each saved tensor.

    def on_a_processor(self, launch_s: float) -> Overheads:
        """Return the overheads where torch launches an operator in `launch_s`."""
        names = [f.name for f in fields(self) if f.name.endswith("_s")]
        if not self.replays_in_python:
            names = [name for name in names if name.startswith("rerun_")]
        factor = launch_s / FITTED_LAUNCH_S
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def _record_of_s(self, graph: StepGraph, index: int) -> float:
        """Return the overhead of recording an operator."""
        operator = graph.operators[index]
        if operator.is_view:
            return 0.0
        is_cold = operator.read_bytes + operator.written_bytes > self.cache_bytes
        seconds = self.record_cold_s if is_cold else self.record_s
        return seconds + self.record_write_s * writes_apart(graph, index)

    def forward_of_s(self, graph: StepGraph, choice: Choice) -> float:
        """Return how much of a region's overhead the forward takes."""
        if choice.engine == RERUN:
            return RERUN_FORWARD * self.region_of_s(graph, choice)
        recorded = range(choice.start, choice.end)
        recorded_s = sum(self._record_of_s(graph, index) for index in recorded)
        saved_s = self.record_saved_s * len(saved_in(graph, choice))
        return self.record_region_s + recorded_s + saved_s

    def region_of_s(self, graph: StepGraph, choice: Choice) -> float:
        """Return the overhead of a region, apart from that of what it replays."""
        if choice.engine != RERUN:
            asked_s = self.replay_saved_s * len(saved_in(graph, choice))
            return self.forward_of_s(graph, choice) + self.replay_region_s + asked_s
        inside = sum(is_inside(call, choice) for call in graph.calls)
        nested_s = self.rerun_nested_s if inside > 1 else 0.0
        region_s = self.rerun_region_s + self.rerun_module_s * inside + nested_s
        return region_s + self.rerun_saved_s * len(saved_in(graph, choice))

    def with_replayed_forward(self, graph: StepGraph) -> StepGraph:
        """Return the step with what a replay of it takes for each forward operator.

        That is the cost that solvers must compare. The time of the plain forward
        differs by a constant, the same for all schedules.
        """
        until, share, again_s = graph.backward_start, self.again_share, self.again_s
        times = (share * operator.seconds + again_s for operator in graph.operators)
        pairs = zip(graph.operators[:until], times, strict=False)
        forward = [replace(operator, seconds=seconds) for operator, seconds in pairs]
        return replace(graph, operators=(*forward, *graph.operators[until:]))


def writes_apart(graph: StepGraph, index: int) -> bool:
    """Return whether an operator writes to a part of a storage, or to older memory."""
    for value in map(graph.values.__getitem__, graph.operators[index].outputs):
        storage = graph.storages[value.storage]
        is_part = value.bytes < storage.bytes and storage.birth < index
        if is_part or storage.birth < 0:
            return True
    return False


FITTED_LAUNCH_S = 5.5e-6
"""What launching an operator took where the overheads in Python were fitted."""

NO_OVERHEADS = Overheads()
CPU_OVERHEADS = Overheads(
    cache_bytes=1 << 19,
    record_region_s=230e-6,
    record_s=16e-6,
    record_cold_s=42e-6,
    record_saved_s=24e-6,
    record_write_s=65e-6,
    again_s=40e-6,
    rerun_region_s=84e-6,
    rerun_module_s=40e-6,
    rerun_nested_s=12e-6,
    rerun_saved_s=9.5e-6,
)
"""With the recorder in Python."""

NATIVE_OVERHEADS = Overheads(
    cache_bytes=1 << 19,
    replays_in_python=False,
    record_region_s=178e-6,
    record_s=1.1e-6,
    record_cold_s=4.4e-6,
    record_saved_s=3.9e-6,
    replay_region_s=50e-6,
    replay_saved_s=3.9e-6,
    again_s=1e-6,
    again_share=0.87,
    rerun_region_s=70e-6,
    rerun_module_s=17.5e-6,
    rerun_nested_s=39e-6,
    rerun_saved_s=3.8e-6,
)
"""With the recorder in C++, of calls that follow a route."""


def is_inside(call: ModuleCall, block: Block) -> bool:
    """Return whether a module call runs some operators, all of them in a block."""
    return block.start <= call.start < call.end <= block.end
