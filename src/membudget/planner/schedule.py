"""A schedule of a step, and what a solver is: something that proposes schedules.

Three words for a decision: a `Choice` says what to keep of one block, a `Schedule` is a
choice for each of some blocks, simulated, and a `Plan` is the file that it becomes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from membudget.graph import ModuleCall, Operator, StepGraph
from membudget.planner.choice import Block, Choice
from membudget.planner.simulate import Simulation, simulate

MAX_ATTEMPTS = 12
"""How often a solver is asked for one budget; reductions double, so 12 are many."""


@dataclass(frozen=True)
class Overheads:
    """The engine's time for each operator that a region records or runs again.

    A replay region records each operator of its forward, serves each saved tensor, and
    runs operators again from Python. While the engine's code stays in the processor's
    cache, that takes about 12 µs an operator. A kernel that moves more bytes than the
    cache holds evicts that code, and the next operator takes ten times as long. The
    figures are those of one AMD EPYC core under Python 3.11, fitted to whole steps of
    the models in `benchmarks/planners.py`. On a device the host's time mostly hides
    behind the kernels, so none is counted.
    """

    warm_s: float  # After a kernel that leaves the engine's code in the cache.
    cold_s: float  # After a kernel that evicts it.
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


@dataclass(frozen=True)
class Schedule:
    """A choice for each of some module calls, and what they lead to."""

    calls: tuple[ModuleCall, ...]  # They become regions.
    choices: tuple[Choice, ...]
    simulation: Simulation
    overhead_s: float  # The engine's own time.
    plain_s: float  # The time of the plain step.

    @property
    def peak_bytes(self) -> int:
        """The simulated peak."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """The time of the step, recomputation and overhead included."""
        return self.simulation.seconds + self.overhead_s

    @property
    def slowdown(self) -> float:
        """The time of the step relative to the plain one."""
        return self.seconds / self.plain_s if self.plain_s else 1.0


class Simulator:
    """Simulates schedules of one step, each set of choices once.

    Attributes:
        graph: The step, with the overhead of recording on its forward.
        candidates: How many sets of choices were simulated.
        operators: How many operators those simulations ran.
    """

    def __init__(self, graph: StepGraph, overheads: Overheads = NO_OVERHEADS):
        """Start with none simulated."""
        self.graph = overheads.added_to_forward(graph)
        self._overheads = overheads
        self.candidates = self.operators = 0
        self._known: dict[tuple[Choice, ...], Simulation] = {}

    def simulate(self, choices: Iterable[Choice]) -> Simulation:
        """Return the peak and time of the step under some choices."""
        key = tuple(choices)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = simulate(self.graph, key)
            self.candidates += 1
            self.operators += len(self.graph.operators) + len(found.recomputed)
        return found

    def schedule(
        self, calls: Sequence[ModuleCall], choices: Sequence[Choice]
    ) -> Schedule:
        """Return the schedule of a choice for each of some module calls."""
        found = self.simulate(choices)
        overhead_s = sum(self.recording_s(choice) for choice in choices)
        plain_s = self.graph.seconds
        return Schedule(tuple(calls), tuple(choices), found, overhead_s, plain_s)

    def recording_s(self, block: Block) -> float:
        """Return the overhead of recording a block in every step."""
        return self._overheads.recording_s(self.graph, block)

    def changed(self, schedule: Schedule, choices: Sequence[Choice]) -> Schedule:
        """Return a schedule with other choices for the same calls."""
        found = self.simulate(choices)
        return replace(schedule, choices=tuple(choices), simulation=found)


class Solver(ABC):
    """Proposes schedules of one kind for a budget.

    A solution is whatever its algorithm works on; two are compared by equality.
    """

    def __init__(self, simulator: Simulator):
        """Solve for the step of this simulator."""
        self._simulator = simulator

    @abstractmethod
    def solve(self, budget_bytes: int) -> Any:
        """Return the best solution by the solver's own count; `None` if none fits."""

    def smallest(self) -> Any:
        """Return the solution that retains least, at any time; `None` for none."""
        return None

    @abstractmethod
    def schedule(self, solution: Any) -> Schedule:
        """Return the schedule that a solution means."""

    def schedules(self, budget_bytes: int) -> Iterator[Schedule]:
        """Yield ever tighter schedules until one fits the budget when simulated.

        Solvers round bytes to a quantum and add up peaks that need not coincide, so a
        solution may overshoot. The next attempt asks for that much less; while rounding
        returns the same solution, the reduction doubles.
        """
        target, reduction, previous = budget_bytes, 0, None
        for _ in range(MAX_ATTEMPTS):
            solution = self.solve(target)
            if solution is None:
                return
            if solution != previous:
                yield (schedule := self.schedule(solution))
                reduction = schedule.peak_bytes - budget_bytes
                if reduction <= 0:
                    return
            target, reduction, previous = target - reduction, 2 * reduction, solution

    @cached_property
    def least(self) -> list[Schedule]:
        """The schedules with the least peak that this solver knows.

        One retains least; the other is found by bisection over the budget.
        """
        solution = self.smallest()
        found = [] if solution is None else [self.schedule(solution)]
        low = 0
        high = found[0].peak_bytes if found else self._simulator.simulate(()).peak_bytes
        for _ in range(MAX_ATTEMPTS):
            middle = (low + high) // 2
            tighter = self.solve(middle)
            if tighter is None:
                low = middle
            else:
                high, solution = middle, tighter
        return found if solution is None else [*found, self.schedule(solution)]
