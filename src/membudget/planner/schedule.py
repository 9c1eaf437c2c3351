"""Schedules of a step, and their simulator.

A `Choice` is the decision for one block, a `Schedule` combines choices for several
blocks with their simulation, and a `Plan` is a schedule stored as a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import Block, BlockEngine, Choice, saved_in
from membudget.planner.known_blocks import KnownBlocks
from membudget.planner.moved import Host
from membudget.planner.overheads import NO_OVERHEADS, Overheads
from membudget.planner.second_run import rerun_operators
from membudget.planner.simulate import AskedOrders, Simulation, simulate
from membudget.planner.timeline import PlainStep


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
        alike: Simulator | None = None,
    ):
        """Create a simulator whose schedules move nothing.

        It shares what it learns of bytes with one of the same step (`alike`), whose
        operators may take other times.
        """
        self.plain = graph
        self.host: Host | None = None
        self.graph = overheads.with_replayed_forward(graph)
        self._overheads = overheads
        self._plain = PlainStep(self.graph)
        known: KnownBlocks | None = None if alike is None else alike.known
        self.known: KnownBlocks = KnownBlocks(self.graph, self._plain, known)
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
