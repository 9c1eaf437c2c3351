"""Schedules of a step, and their simulator.

A `Choice` is the decision for one block, a `Schedule` combines choices for several
blocks with their simulation, and a `Plan` is a schedule stored as a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import RERUN, Block, BlockEngine, Choice, saved_in
from membudget.planner.known_blocks import KnownBlocks
from membudget.planner.moved import Host
from membudget.planner.overwrites import reads_around_write, writes_apart
from membudget.planner.second_run import rerun_operators
from membudget.planner.simulate import AskedOrders, Simulation, simulate
from membudget.planner.timeline import PlainStep

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
    the field suite that may be tuned on, plain and under regions, on one AMD EPYC core
    under Python 3.11, where torch launches an operator in `FITTED_LAUNCH_S`; elsewhere,
    they are in proportion. Those of replays in C++ were measured on an Intel Xeon,
    where it takes 1.245 times as long, with the models of `benchmarks/predicted.py`
    beside. A step that is timed shows by what factor recording, or rerunning, is off
    for it (`membudget.terms`).
    On an accelerator, kernels mostly hide the host's time, so no overhead is counted.
    """

    cache_bytes: int = 0
    # Of a replay region, in the forward.
    record_region_s: float = 0.0
    record_s: float = 0.0  # Of an operator after whose kernel the cache is warm.
    record_cold_s: float = 0.0
    record_saved_s: float = 0.0  # Of each saved tensor.
    record_write_s: float = 0.0  # More, of a write to a part, or to older memory.
    # And in the backward.
    replay_region_s: float = 0.0
    replay_saved_s: float = 0.0  # Of each saved tensor.
    tape_factor: float = 1.0  # Of all that, and of the forward's, without a route.
    again_s: float = 0.0  # Of each operator that runs again, beside
    again_share: float = 1.0  # this share of its time in the forward.
    # Of a rerun region, in both.
    rerun_region_s: float = 0.0
    rerun_module_s: float = 0.0  # Of each module call in it.
    rerun_nested_s: float = 0.0  # If the region's module calls others.
    rerun_saved_s: float = 0.0  # Of each saved tensor.

    def on_a_processor(self, launch_s: float) -> Overheads:
        """Return the overheads where torch launches an operator in `launch_s`."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        factor = launch_s / FITTED_LAUNCH_S
        seconds = {n: s * factor for n, s in found.items() if n.endswith("_s")}
        return replace(self, **seconds)

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
        seconds = self.record_region_s + recorded_s + saved_s
        return seconds * self._factor(graph, choice)

    def region_of_s(self, graph: StepGraph, choice: Choice) -> float:
        """Return the overhead of a region, apart from that of what it replays."""
        if choice.engine != RERUN:
            asked_s = self.replay_saved_s * len(saved_in(graph, choice))
            backward_s = self.replay_region_s + asked_s
            backward_s *= self._factor(graph, choice)
            return self.forward_of_s(graph, choice) + backward_s
        inside = sum(is_inside(call, choice) for call in graph.calls)
        nested_s = self.rerun_nested_s if inside > 1 else 0.0
        region_s = self.rerun_region_s + self.rerun_module_s * inside + nested_s
        return region_s + self.rerun_saved_s * len(saved_in(graph, choice))

    def _factor(self, graph: StepGraph, block: Block) -> float:
        """Return by what calls of a block take longer that cannot follow a route."""
        return self.tape_factor if reads_around_write(graph, block) else 1.0

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


FITTED_LAUNCH_S = 5.5e-6
"""What launching an operator took where the overheads were fitted."""

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
    record_region_s=195e-6,
    record_s=1.6e-6,
    record_cold_s=2.8e-6,
    record_saved_s=1.8e-6,
    replay_region_s=32e-6,
    replay_saved_s=3.2e-6,
    tape_factor=3.0,
    again_s=3.6e-6,
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


@dataclass(frozen=True)
class Schedule:
    """One choice for each of several module calls, with the simulated result."""

    calls: tuple[ModuleCall, ...]  # They become regions.
    choices: tuple[Choice, ...]
    simulation: Simulation
    overhead_s: float  # The engine's own time.
    plain_s: float  # The time of the plain step.
    is_smallest: bool = False  # Whether no schedule with a smaller peak was found.
    again_share: float = 1.0  # What replayed operators take, of their time before.
    host: Host | None = None  # Where storages may be moved to.

    @property
    def peak_bytes(self) -> int:
        """Simulated peak of the step."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """Time of the step, including recomputation and engine overhead."""
        return self.simulation.seconds + self.overhead_s

    @property
    def slowdown(self) -> float:
        """Time of the step relative to the step without recomputation."""
        return self.seconds / self.plain_s if self.plain_s else 1.0


class Simulator:
    """Simulator for schedules of one step; each set of choices is simulated once.

    Attributes:
        plain: The step.
        graph: The step, with what a replay takes for each forward operator.
        candidates: Number of distinct sets of choices simulated so far.
        operators: Total number of operators that the simulations ran.
        known: What is known of the step's blocks.
        host: The host that storages may be moved to; `None` if they may not.
    """

    def __init__(
        self,
        graph: StepGraph,
        overheads: Overheads = NO_OVERHEADS,
    ):
        """Create a simulator with an empty cache, whose schedules move nothing."""
        self.plain = graph
        self.host: Host | None = None
        self.graph = overheads.with_replayed_forward(graph)
        self._overheads = overheads
        self._plain = PlainStep(self.graph)
        self.known = KnownBlocks(self.graph, self._plain)
        self.candidates = self.operators = 0
        self._orders = AskedOrders(self.graph)
        self._known: dict[tuple[Choice, ...], Simulation] = {}
        self._region_s: dict[tuple[int, int, BlockEngine], float] = {}

    def with_host(self, host: Host) -> Simulator:
        """Return a simulator of the same step with another host."""
        other = copy(self)
        other.host, other._known = host, {}
        other.candidates = other.operators = 0
        return other

    def simulate(self, choices: Iterable[Choice]) -> Simulation:
        """Return the simulated timeline and duration for a given set of choices."""
        key = tuple(choices)
        found = self._known.get(key)
        if found is None:
            found = simulate(self.graph, key, self._plain, self.host, self._orders)
            # A rerun takes an operator's time in the forward, not that in a replay.
            replay_s = self._seconds(self.graph, found.reran)
            rerun_s = self._seconds(self.plain, found.reran)
            found = replace(found, seconds=found.seconds - replay_s + rerun_s)
            self._known[key] = found
            self.candidates += 1
            self.operators += len(self.graph.operators) + len(found.recomputed)
        return found

    def schedule(
        self, calls: Sequence[ModuleCall], choices: Sequence[Choice]
    ) -> Schedule:
        """Return the schedule with one choice for each of the given module calls."""
        found = self.simulate(choices)
        overhead_s = sum(map(self.region_s, choices))
        plain_s = self.graph.seconds
        return Schedule(
            tuple(calls), tuple(choices), found, overhead_s, plain_s, host=self.host
        )

    def with_plain_times(self, schedule: Schedule) -> Schedule:
        """Return a schedule that counts the engine's overhead only in `overhead_s`."""
        found, share = schedule.simulation, self._overheads.again_share
        again_s = share * self._seconds(self.plain, found.replayed)
        again_s += self._seconds(self.plain, found.reran)
        replayed_s = self._overheads.again_s * len(found.replayed)
        overhead_s = schedule.overhead_s + replayed_s
        plain_s = self.plain.seconds
        if found.moves.out_bytes:  # What hides copies is what the device computes.
            found = simulate(self.plain, schedule.choices, host=schedule.host)
        seconds = plain_s + again_s + found.moves.wait_s
        simulation = replace(found, seconds=seconds)
        return replace(
            schedule,
            simulation=simulation,
            overhead_s=overhead_s,
            plain_s=plain_s,
            again_share=share,
        )

    def region_s(self, choice: Choice) -> float:
        """Return the overhead of a region, apart from that of replayed operators."""
        key = choice.start, choice.end, choice.engine
        if key not in self._region_s:
            self._region_s[key] = self._overheads.region_of_s(self.graph, choice)
        return self._region_s[key]

    def rerun_s(self, block: Block) -> float:
        """Return the time in which a block's operators run again as a whole."""
        again = rerun_operators(self.graph, block, saved_in(self.graph, block))
        return self._seconds(self.plain, again)

    @staticmethod
    def _seconds(graph: StepGraph, operators: Iterable[int]) -> float:
        return sum(graph.operators[index].seconds for index in operators)

    def changed(self, schedule: Schedule, choices: Sequence[Choice]) -> Schedule:
        """Return a schedule with new choices for the same module calls."""
        return self.schedule(schedule.calls, choices)
