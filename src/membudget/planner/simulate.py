"""The definition: peak bytes and seconds of a step under regions.

Every planner is held against this, and it is held against the meter. A region is a run
of operators of the forward. What autograd saves in it and the region made is dropped,
unless it is kept; the replay engine (`engine.replay`) makes it again when the backward
first asks for it, as `replayed` says. The rules are the engine's:

1. A storage lives while the user's code holds it, while autograd keeps a saved tensor
   in it that is not dropped, and while a dropped tensor that is still wanted comes of
   it: kept storages and inputs of a region are sources.
2. When the backward asks for a dropped tensor that is not there, the operators on the
   way to it from what is there are run, in the order of the forward, and each at most
   once in a stage.
3. What such a run makes stays as long as something that the stage serves needs it:
   another saved tensor, or an operator that has yet to run; and until the next stage
   begins where the stage holds it.
4. Views cost nothing. A storage that is written in place is made by all operators that
   write it.
5. Autograd may write into what it is given: it gets a copy of what an operator of the
   stage has yet to read, or of another stage where this one holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.regions import Region, made_in
from membudget.planner.replayed import Replay


@dataclass(frozen=True)
class Simulation:
    """A step under regions.

    Attributes:
        peak_bytes: The most bytes alive at once of what the step allocates.
        peak_moment: When.
        alive_bytes: At the end of each moment, without workspace.
        seconds: Of the step, what runs again included.
        recomputed: The operators that ran again, in the order in which they did.
    """

    peak_bytes: int
    peak_moment: int
    alive_bytes: tuple[int, ...]
    seconds: float
    recomputed: tuple[int, ...]

    def share_over(self, budget_bytes: int) -> float:
        """Return by how much the peak is over a budget, as a share of it."""
        return max(0, self.peak_bytes - budget_bytes) / max(1, budget_bytes)


def simulate(graph: StepGraph, regions: Iterable[Region]) -> Simulation:
    """Run a step under regions on paper.

    Args:
        graph: The plain step.
        regions: The regions; they do not overlap.

    Raises:
        OptionError: If they do, or reach beyond the forward.
    """
    ordered = sorted(regions, key=lambda region: region.start)
    _check(graph, ordered)
    return _Machine(graph, ordered).run()


@dataclass(frozen=True)
class Own:
    """What a region's own storages do, at the moments at which anything does.

    Attributes:
        moments: Those moments, in order.
        alive_bytes: At the end of each; it stays so up to the next.
        peak_bytes: The most within each, the workspace of its operator included.
    """

    moments: tuple[int, ...]
    alive_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def own(graph: StepGraph, region: Region) -> Own:
    """Simulate one region alone: the storages that it makes, and no others."""
    return _Machine(graph, [region]).run_alone(region)


def _check(graph: StepGraph, regions: Sequence[Region]) -> None:
    before = 0
    for region in regions:
        if not before <= region.start <= region.end <= graph.backward_start:
            raise OptionError(
                f"the region of operators {region.start} to {region.end} overlaps the "
                f"one before it or leaves the forward, which ends at "
                f"{graph.backward_start}"
            )
        before = region.end


class _Machine:
    """The state of a simulated step."""

    def __init__(self, graph: StepGraph, regions: Sequence[Region]):
        self.graph = graph
        self.replays = [Replay(graph, region, self) for region in regions]
        # Where it is another than in the plain step.
        self.ends: dict[int, int] = {}
        for replay in self.replays:
            replay.move_ends(self.ends)
        self.births: dict[int, list[int]] = {}
        self.deaths: dict[int, list[int]] = {}
        self.asks: dict[int, list[tuple[Replay, int]]] = {}
        self.frees: dict[int, list[tuple[Replay, int]]] = {}
        for replay in self.replays:
            for index in replay.dropped_saved:
                saved = graph.saved[index]
                if saved.asked:
                    self.asks.setdefault(saved.asked[0], []).append((replay, index))
                self.frees.setdefault(saved.freed, []).append((replay, index))
        self.recomputed: list[int] = []
        self.alive = self.peak = self.peak_moment = 0
        self.moment = 0

    def run(self) -> Simulation:
        graph = self.graph
        self._expect(range(len(graph.storages)))
        alive_bytes = []
        for moment in range(len(graph.operators)):
            self._pass(moment)
            alive_bytes.append(self.alive)
        again = sum(graph.operators[index].seconds for index in self.recomputed)
        return Simulation(
            self.peak,
            self.peak_moment,
            tuple(alive_bytes),
            graph.seconds + again,
            tuple(self.recomputed),
        )

    def run_alone(self, region: Region) -> Own:
        self._expect(made_in(self.graph, region))
        events = {*self.births, *self.deaths, *self.frees, *self.asks}
        events |= set(range(region.start, region.end))
        rows = []
        for moment in sorted(events):
            if moment < len(self.graph.operators):
                self.peak = 0
                self._pass(moment)
                rows.append((moment, self.alive, self.peak))
        moments, alive, peaks = zip(*rows, strict=True) if rows else ((), (), ())
        return Own(moments, alive, peaks)

    def _expect(self, storages: Iterable[int]) -> None:
        for index in storages:
            birth = self.graph.storages[index].birth
            if birth >= 0:
                self.births.setdefault(birth, []).append(index)
                self.deaths.setdefault(self._end(index), []).append(index)

    def _end(self, storage: int) -> int:
        end = self.ends.get(storage)
        return self.graph.storages[storage].death if end is None else end

    def _pass(self, moment: int) -> None:
        self.moment = moment
        for storage in self.deaths.get(moment, ()):
            self.let_go(storage)
        for replay, index in self.frees.get(moment, ()):
            replay.free(index)
        for replay, index in self.asks.get(moment, ()):
            replay.ask(index)
        for storage in self.births.get(moment, ()):
            self.take(storage)
        self.note(moment)

    # What a replay does to the timeline.

    def is_first_life(self, storage: int) -> bool:
        """Tell whether what the forward made is still there."""
        return self.moment < self._end(storage)

    def take(self, storage: int) -> None:
        """A storage is made."""
        self.alive += self.graph.storages[storage].bytes

    def let_go(self, storage: int) -> None:
        """A storage goes."""
        self.alive -= self.graph.storages[storage].bytes

    def run_again(self, operator: int) -> None:
        """An operator runs for another time."""
        self.recomputed.append(operator)

    def note(self, operator: int) -> None:
        """What is alive while an operator runs is a peak or not."""
        most = self.alive + self.graph.operators[operator].workspace_bytes
        if most > self.peak:
            self.peak, self.peak_moment = most, self.moment
