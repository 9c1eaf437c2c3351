"""What a programme answers for a budget, simulated; and the least that it can do.

A programme counts what it must add up, and simulation has the word: where its answer
takes more than was given, it is asked again for as much less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.regions import Region
from membudget.planner.simulate import Simulation, simulate

_MOST_TRIES = 12


@dataclass(frozen=True)
class Chosen:
    """A plan as the planner sees it.

    Attributes:
        calls: The calls that become regions.
        regions: Them, with what they keep.
        simulation: What comes of it.
        own_s: What the engine itself takes, in seconds.
        plain_seconds: Of the plain step.
    """

    calls: tuple[ModuleCall, ...]
    regions: tuple[Region, ...]
    simulation: Simulation
    own_s: float
    plain_seconds: float

    @property
    def seconds(self) -> float:
        """Of the step, with what the engine itself costs."""
        return self.simulation.seconds + self.own_s

    @property
    def stages(self) -> int:
        """In how many stages its regions go back, beyond one each."""
        return sum(max(0, len(region.stages) - 1) for region in self.regions)

    @property
    def slowdown(self) -> float:
        """The time of the step, of the plain one."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 1.0


def simulated(
    graph: StepGraph,
    calls: Sequence[ModuleCall],
    regions: Sequence[Region],
    own_s: float = 0.0,
) -> Chosen:
    """Simulate regions.

    Args:
        graph: The plain step.
        calls: The modules.
        regions: Their regions.
        own_s: What the engine itself takes.
    """
    found = simulate(graph, regions)
    return Chosen(tuple(calls), tuple(regions), found, own_s, graph.seconds)


class Answers(ABC):
    """One way to plan a step."""

    def __init__(self, graph: StepGraph):
        """Plan this step."""
        self._graph = graph

    @abstractmethod
    def solve(self, budget_bytes: int) -> Any:
        """Return the programme's answer; `None` if nothing fits."""

    @abstractmethod
    def least_seconds(self, budget_bytes: int) -> float:
        """Return what no answer goes below, by the programme's own count of bytes.

        Bytes are rounded down. What the engine itself costs is in it.
        """

    @abstractmethod
    def smallest(self) -> Any:
        """Return the answer that holds least, whatever it costs; `None` for none."""

    @abstractmethod
    def simulated(self, answer: Any) -> Chosen:
        """Return what an answer comes to."""

    def candidates(self, budget_bytes: int) -> list[Chosen]:
        """Return answers that may fit; the fastest that does is among them."""
        found: list[Chosen] = []
        inner, step, before = budget_bytes, 0, None
        for _ in range(_MOST_TRIES):
            answer = self.solve(inner)
            if answer is None:
                break
            if answer != before:
                found.append(self.simulated(answer))
                step = found[-1].simulation.peak_bytes - budget_bytes
                if step <= 0:
                    break
            before = answer
            # The same answer comes again where the programme's grain is coarser.
            inner -= step
            step *= 2
        return found

    @cached_property
    def least(self) -> list[Chosen]:
        """The answers with the least peak, by what they hold and by the programme."""
        answer = self.smallest()
        found = [] if answer is None else [self.simulated(answer)]
        low, high = 0, self._highest(found)
        for _ in range(_MOST_TRIES):
            middle = (low + high) // 2
            less = self.solve(middle)
            if less is None:
                low = middle
            else:
                high, answer = middle, less
        return found if answer is None else [*found, self.simulated(answer)]

    def _highest(self, found: Sequence[Chosen]) -> int:
        if found:
            return found[0].simulation.peak_bytes
        return simulate(self._graph, ()).peak_bytes
