"""The definition: peak bytes and seconds of a step under regions.

Every planner is held against this, and it is held against the meter. A region is a run
of operators of the forward. What autograd saves in it and the region made is dropped,
unless it is kept; the replay engine (`engine.replay`) makes it again when the backward
first asks for it. The rules are the engine's:

1. A storage lives while the user's code holds it, while autograd keeps a saved tensor
   in it that is not dropped, and while a dropped tensor that is still wanted comes of
   it: kept storages and inputs of a region are sources.
2. When the backward asks for a dropped tensor that is not there, the operators on the
   way to it from what is there are run, in the order of the forward, and each at most
   once in a step.
3. What such a run makes stays as long as something that is wanted later needs it:
   another saved tensor, or an operator that has yet to run.
4. Views cost nothing. A storage that is written in place is made by all operators that
   write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from membudget.errors import OptionError
from membudget.graph import StepGraph
from membudget.planner.regions import Region, made_in, saved_in, storages_of


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
    machine = _Machine(graph, ordered)
    for region in ordered:
        machine.drop(region)
    return machine.run()


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
    machine = _Machine(graph, [region])
    machine.drop(region)
    return machine.run_alone(region)


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


@dataclass
class _Dropped:
    """A storage that has to be made again.

    Attributes:
        writers: The operators that make it, in order.
        uses: How often it is still needed: by saved tensors and by operators.
        is_there: Whether it was made again.
    """

    writers: list[int] = field(default_factory=list)
    uses: int = 0
    is_there: bool = False


class _Machine:
    """The state of a simulated step."""

    def __init__(self, graph: StepGraph, regions: Sequence[Region]):
        self.graph = graph
        inside = [i for r in regions for i in range(r.start, r.end)]
        chosen = [(index, graph.operators[index]) for index in inside]
        self.reads = {i: storages_of(graph, o.inputs) for i, o in chosen}
        self.writes = {
            i: [] if o.is_view else storages_of(graph, o.outputs) for i, o in chosen
        }
        self.ends = [storage.death for storage in graph.storages]
        self.dropped: dict[int, _Dropped] = {}
        # The region of a storage and of an operator, by the region's first operator.
        self.made_by: dict[int, int] = {}
        self.runs_in: dict[int, int] = {}
        self.births: dict[int, list[int]] = {}
        self.deaths: dict[int, list[int]] = {}
        self.asks: dict[int, list[int]] = {}
        self.frees: dict[int, list[int]] = {}
        self.ran: set[int] = set()
        self.recomputed: list[int] = []
        self.alive = self.peak = self.peak_moment = 0
        self.moment = 0

    # Before the step: what is dropped, and until when the rest must stay.

    def drop(self, region: Region) -> None:
        graph = self.graph
        made = made_in(graph, region)
        wanted = self._wanted(region, made - region.kept)
        until = self._needed_until(region, made - region.kept, wanted)
        for storage in made - region.kept:
            released = graph.storages[storage].released
            if released is not None and storage in wanted:
                self.ends[storage] = self._end_without(storage, wanted[storage])
        self.made_by |= dict.fromkeys(made, region.start)
        self.runs_in |= dict.fromkeys(range(region.start, region.end), region.start)
        for storage, moment in until.items():
            # What another region made is a source here, though that one dropped it.
            if storage not in made or storage not in self.dropped:
                self.ends[storage] = max(self.ends[storage], moment)

    def _wanted(self, region: Region, candidates: set[int]) -> dict[int, list[int]]:
        """Return the saved tensors that are dropped, by their storage."""
        wanted: dict[int, list[int]] = {}
        for index in saved_in(self.graph, region):
            storage = self.graph.values[self.graph.saved[index].value].storage
            if storage in candidates:
                wanted.setdefault(storage, []).append(index)
        return wanted

    def _end_without(self, storage: int, dropped: list[int]) -> int:
        """Return until when a storage lives without its dropped saved tensors."""
        graph = self.graph
        released = graph.storages[storage].released
        assert released is not None
        others = [i for i in graph.saved_on.get(storage, ()) if i not in dropped]
        return max([released, *(graph.saved[index].freed for index in others)])

    def _needed_until(
        self, region: Region, candidates: set[int], wanted: dict[int, list[int]]
    ) -> dict[int, int]:
        """Count the uses of what is dropped; return until when each source stays."""
        until = {
            storage: max(self.graph.saved[index].freed for index in indices)
            for storage, indices in wanted.items()
        }
        for storage, indices in wanted.items():
            self._entry(storage).uses += len(indices)
            for index in indices:
                saved = self.graph.saved[index]
                if saved.asked:
                    self.asks.setdefault(saved.asked[0], []).append(storage)
                self.frees.setdefault(saved.freed, []).append(storage)
        for index in range(region.end - 1, region.start - 1, -1):
            outputs = [s for s in self.writes[index] if s in candidates and s in until]
            if not outputs:
                continue
            moment = max(until[storage] for storage in outputs)
            for storage in outputs:
                self._entry(storage).writers.insert(0, index)
            for storage in self.reads[index]:
                if storage not in outputs:
                    until[storage] = max(until.get(storage, 0), moment)
                    if storage in candidates:
                        self._entry(storage).uses += 1
        return until

    def _entry(self, storage: int) -> _Dropped:
        return self.dropped.setdefault(storage, _Dropped())

    # The step.

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
                self.deaths.setdefault(self.ends[index], []).append(index)

    def _pass(self, moment: int) -> None:
        self.moment = moment
        self.alive -= self._bytes(self.deaths.get(moment, ()))
        for storage in self.frees.get(moment, ()):
            self._used(storage)
        for storage in self.asks.get(moment, ()):
            self._make(storage)
        self.alive += self._bytes(self.births.get(moment, ()))
        self._note(self.graph.operators[moment].workspace_bytes)

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.graph.storages[index].bytes for index in storages)

    def _note(self, workspace_bytes: int) -> None:
        if self.alive + workspace_bytes > self.peak:
            self.peak, self.peak_moment = self.alive + workspace_bytes, self.moment

    def _make(self, storage: int) -> None:
        """Run what leads to a dropped storage."""
        entry = self.dropped[storage]
        if entry.is_there or self.moment < self.ends[storage]:
            return
        for index in sorted(self._path_to(storage)):
            self._run_again(index)

    def _path_to(self, storage: int) -> set[int]:
        path: set[int] = set()
        pending = [storage]
        while pending:
            entry = self.dropped[pending.pop()]
            for index in entry.writers:
                if index not in path and index not in self.ran:
                    path.add(index)
                    pending += [s for s in self.reads[index] if self._is_missing(s)]
        return path

    def _is_missing(self, storage: int) -> bool:
        entry = self.dropped.get(storage)
        return (
            entry is not None
            and not entry.is_there
            and self.moment >= self.ends[storage]
        )

    def _run_again(self, index: int) -> None:
        self.ran.add(index)
        self.recomputed.append(index)
        fresh = []
        for storage in self.writes[index]:
            if self.graph.storages[storage].birth == index:
                self.alive += self.graph.storages[storage].bytes
                entry = self.dropped.get(storage)
                if entry is None or entry.uses <= 0 or entry.is_there:
                    fresh.append(storage)  # Nobody wants it: it goes at once.
                else:
                    entry.is_there = True
        self._note(self.graph.operators[index].workspace_bytes)
        self.alive -= self._bytes(fresh)
        for storage in self.reads[index]:
            is_source = self.made_by.get(storage) != self.runs_in[index]
            if storage not in self.writes[index] and not is_source:
                self._used(storage)

    def _used(self, storage: int) -> None:
        entry = self.dropped.get(storage)
        if entry is not None:
            entry.uses -= 1
            if entry.uses <= 0 and entry.is_there:
                entry.is_there = False
                self.alive -= self.graph.storages[storage].bytes
