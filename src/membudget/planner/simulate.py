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


@dataclass(frozen=True)
class Region:
    """Operators of the forward that run as one region.

    Attributes:
        start: The first of them.
        end: The first after them.
        kept: The storages that stay, by index, among those that the region makes.
    """

    start: int
    end: int
    kept: frozenset[int] = frozenset()


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
    machine = _Machine(graph)
    for region in ordered:
        machine.drop(region)
    return machine.run()


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

    def __init__(self, graph: StepGraph):
        self.graph = graph
        operators = graph.operators
        self.reads = [_storages(graph, o.inputs) for o in operators]
        self.writes = [
            [] if o.is_view else _storages(graph, o.outputs) for o in operators
        ]
        self.ends = [storage.death for storage in graph.storages]
        self.dropped: dict[int, _Dropped] = {}
        self.asks: dict[int, list[int]] = {}
        self.frees: dict[int, list[int]] = {}
        self.ran: set[int] = set()
        self.recomputed: list[int] = []
        self.alive = self.peak = self.peak_moment = 0
        self.moment = 0

    # Before the step: what is dropped, and until when the rest must stay.

    def drop(self, region: Region) -> None:
        graph = self.graph
        made = {
            s
            for s in range(len(graph.storages))
            if region.start <= graph.storages[s].birth < region.end
        }
        wanted = self._wanted(region, made - region.kept)
        until = self._needed_until(region, made - region.kept, wanted)
        for storage in made - region.kept:
            released = graph.storages[storage].released
            if released is not None and storage in wanted:
                self.ends[storage] = self._end_without(storage, wanted[storage])
        for storage, moment in until.items():
            if storage not in self.dropped:
                self.ends[storage] = max(self.ends[storage], moment)

    def _wanted(self, region: Region, candidates: set[int]) -> dict[int, list[int]]:
        """Return the saved tensors that are dropped, by their storage."""
        wanted: dict[int, list[int]] = {}
        for index, saved in enumerate(self.graph.saved):
            storage = self.graph.values[saved.value].storage
            if storage in candidates and region.start <= saved.moment < region.end:
                wanted.setdefault(storage, []).append(index)
        return wanted

    def _end_without(self, storage: int, dropped: list[int]) -> int:
        """Return until when a storage lives without its dropped saved tensors."""
        graph = self.graph
        released = graph.storages[storage].released
        assert released is not None
        others = [
            saved.freed
            for index, saved in enumerate(graph.saved)
            if graph.values[saved.value].storage == storage and index not in dropped
        ]
        return max([released, *others])

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
        deaths: dict[int, list[int]] = {}
        births: dict[int, list[int]] = {}
        for index, known in enumerate(graph.storages):
            if known.birth >= 0:
                births.setdefault(known.birth, []).append(index)
                deaths.setdefault(self.ends[index], []).append(index)
        alive_bytes = []
        for moment, operator in enumerate(graph.operators):
            self.moment = moment
            self.alive -= self._bytes(deaths.get(moment, ()))
            for storage in self.frees.get(moment, ()):
                self._used(storage)
            for storage in self.asks.get(moment, ()):
                self._make(storage)
            self.alive += self._bytes(births.get(moment, ()))
            self._note(operator.workspace_bytes)
            alive_bytes.append(self.alive)
        again = sum(graph.operators[index].seconds for index in self.recomputed)
        return Simulation(
            self.peak,
            self.peak_moment,
            tuple(alive_bytes),
            graph.seconds + again,
            tuple(self.recomputed),
        )

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
            if storage not in self.writes[index]:
                self._used(storage)

    def _used(self, storage: int) -> None:
        entry = self.dropped.get(storage)
        if entry is not None:
            entry.uses -= 1
            if entry.uses <= 0 and entry.is_there:
                entry.is_there = False
                self.alive -= self.graph.storages[storage].bytes


def _storages(graph: StepGraph, values: Sequence[int]) -> list[int]:
    """Return the storages of values, each once, in order."""
    return list(dict.fromkeys(graph.values[value].storage for value in values))


def region_of(graph: StepGraph, module_path: str) -> Region:
    """Return the region of the operators that ran in a module, its children included.

    Raises:
        OptionError: If none did, or the module ran more than once.
    """
    inside = [
        index
        for index, operator in enumerate(graph.operators[: graph.backward_start])
        if operator.module_path == module_path
        or operator.module_path.startswith(f"{module_path}.")
    ]
    if not inside:
        raise OptionError(f"no operator of the forward ran in {module_path!r}")
    start, end = inside[0], inside[-1] + 1
    if len(inside) != end - start:
        raise OptionError(
            f"{module_path!r} ran more than once in the step, so its operators are no "
            "single region"
        )
    return Region(start, end)


def keeping(graph: StepGraph, region: Region, operators: Iterable[str]) -> Region:
    """Return the region with the outputs of some operators kept.

    Args:
        graph: The step.
        region: The region.
        operators: Overloads, such as `"aten.addmm.default"`.
    """
    names = frozenset(operators)
    kept = frozenset(
        storage
        for index in range(region.start, region.end)
        if graph.operators[index].name in names
        for storage in _storages(graph, graph.operators[index].outputs)
        if graph.storages[storage].birth == index
    )
    return Region(region.start, region.end, region.kept | kept)
