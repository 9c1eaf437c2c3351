"""Solve for nested recomputation of the largest module call, cut into a chain.

`ChainNumbers` derives the costs that the dynamic programme (`chain`) needs.
Recomputation that begins at a segment needs every storage that crosses the segment's
start. Outputs of operators that must not run again are kept in every choice. Nested
recomputation is no faster than recomputing a module call in one stage but fits smaller
budgets, because it recomputes one part of the call at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.block_costs import BlockCosts, ChoiceCost
from membudget.planner.blocks import (
    Segment,
    filled_in_parts,
    largest_call,
    segments,
)
from membudget.planner.chain import Chain, SegmentChoice
from membudget.planner.choice import (
    Block,
    Choice,
    Stage,
    bytes_of,
    made_in,
    storages_of,
    wanted_in,
)
from membudget.planner.known_blocks import KnownBlocks
from membudget.planner.nests import Checkpoint, SegmentCosts
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.slices import slice_of
from membudget.planner.solver import Solver
from membudget.planner.timeline import live_bytes, peak_of, timeline

LENGTHS = (12, 24)
"""Lengths of the chains: few segments retain less, many recompute less at once."""

LONGEST = 48
"""Length of the chain that fits the smallest budgets of all.

It takes as long to solve as the others together, and its plans for other budgets are
hardly ever the fastest.
"""


def deeply_nested(simulator: Simulator) -> list[Solver]:
    """Return the solvers that find the smallest schedules, the longest chain's too."""
    return nested(simulator, (*LENGTHS, LONGEST))


def nested(simulator: Simulator, lengths: Sequence[int] = LENGTHS) -> list[Solver]:
    """Return one solver for each chain length."""
    graph = simulator.graph
    call = largest_call(graph)
    if call is None:
        return []
    block = Block(call.start, call.end)
    chains: list[tuple[list[Segment], frozenset[int]]] = []
    for kept in {frozenset[int](): None, filled_in_parts(graph, block): None}:
        for length in lengths:
            chain = segments(graph, block, length, kept), kept
            if chain not in chains:
                chains.append(chain)
    return [_Nested(simulator, call, *chain) for chain in chains]


class _Nested(Solver):
    """Solver for one chain of segments, and storages that it keeps in any case."""

    def __init__(
        self,
        simulator: Simulator,
        call: ModuleCall,
        chain: list[Segment],
        kept: frozenset[int],
    ):
        super().__init__(simulator)
        self._call = call
        block = Block(call.start, call.end)
        self._numbers = ChainNumbers(
            simulator.graph, block, chain, kept, simulator.known
        )
        self._chain = self._numbers.chain(timeline(simulator.graph).peak_bytes)

    def solve(self, budget_bytes: int) -> list[SegmentChoice] | None:
        return self._chain.solve(budget_bytes)

    def schedule(self, solution: list[SegmentChoice]) -> Schedule:
        choice = self._numbers.choice(solution)
        return self._simulator.schedule([self._call], [choice])

    def schedules(self, budget_bytes: int) -> Iterator[Schedule]:
        """Yield ever tighter schedules; leave no large tables behind."""
        yield from super().schedules(budget_bytes)
        self._chain.free_tables()


class ChainNumbers:
    """The storages, keep-sets and costs of each segment of a block."""

    def __init__(
        self,
        graph: StepGraph,
        block: Block,
        chain: Sequence[Segment],
        kept: frozenset[int] = frozenset(),
        known: KnownBlocks | None = None,
    ):
        """Find the storages and keep-sets of each segment, which include `kept`.

        What is `known` of blocks of the step is not computed again.
        """
        self._graph = graph
        self._known = known or KnownBlocks(graph)
        self._block = block
        self._chain = chain
        self._kept = kept
        self._made = [frozenset(made_in(graph, segment)) for segment in chain]
        self._must_keep = [self._must_keep_of(i) for i in range(len(chain))]
        made = zip(chain, self._made, strict=True)
        self._saved = [of & wanted_in(graph, segment) for segment, of in made]
        # What crosses a segment's end is the input of the next one.
        always = [self._crossing(i, i) | kept for i, kept in enumerate(self._must_keep)]
        self._costs = BlockCosts(graph, chain, always, self._known)
        self.keep_sets = self._costs.keep_sets

    def _must_keep_of(self, i: int) -> frozenset[int]:
        segment = self._chain[i]
        operators = self._graph.operators[segment.start : segment.end]
        values = (
            v for o in operators if o.must_keep and not o.is_view for v in o.outputs
        )
        return self._made[i] & self._kept.union(storages_of(self._graph, values))

    def chain(self, most_bytes: int) -> Chain:
        """Return the dynamic programme for budgets of up to `most_bytes`."""
        costs = [self._segment(i, of) for i, of in enumerate(self._costs.costs())]
        return Chain(costs, self._crossing_bytes(), self._forward_bytes(), most_bytes)

    def _segment(self, i: int, choices: Sequence[ChoiceCost]) -> SegmentCosts:
        graph, segment, must_keep = self._graph, self._chain[i], self._must_keep[i]
        crossing = self._crossing(i, i) - must_keep
        again = self._saved[i] - must_keep
        pass_s, pass_peak_bytes = self._run(i, crossing)
        saving_s, saving_peak_bytes = self._run(i, crossing | again)
        again_s, _ = self._run(i, again)
        alone = self._known.timeline(Choice(segment.start, segment.end, must_keep))
        start = self._costs.backward_start(segment)
        end = self._costs.next_backward(start)
        return SegmentCosts(
            tuple(self._with_crossing(i, choice) for choice in choices),
            pass_s,
            saving_s,
            again_s,
            bytes_of(graph, crossing | again),
            pass_peak_bytes,
            saving_peak_bytes,
            self._costs.peak_between(alone, start, end),
            self._costs.outside_bytes[start] if start < end else 0,
            bytes_of(graph, must_keep),
        )

    def _with_crossing(self, i: int, cost: ChoiceCost) -> ChoiceCost:
        """Return a cost that counts bytes crossing the segment's end as retained."""
        until, storages = self._graph.backward_start, self._graph.storages
        dies = [s for s in self._crossing(i, i) if storages[s].death <= until]
        more = bytes_of(self._graph, dies)
        return replace(cost, retained_bytes=cost.retained_bytes + more)

    def _run(self, i: int, targets: frozenset[int]) -> tuple[float, int]:
        """Return the time and peak of recomputing storages from a segment's inputs."""
        graph, made = self._graph, self._made[i] - self._must_keep[i]
        found = slice_of(graph, self._chain[i], made, dict.fromkeys(targets, 0))
        run = sorted(found.writes)
        seconds = sum(graph.operators[index].seconds for index in run)
        touched = {n: (*found.reads[n], *found.writes[n]) for n in run}
        return seconds, peak_of_run(graph, run, touched, targets)

    def _crossing_bytes(self) -> list[list[int]]:
        """Return table[i][c]: bytes that segments i to c - 1 make and that cross c."""
        count = len(self._chain)
        made_by = {
            storage: i
            for i, made in enumerate(self._made)
            for storage in made - self._must_keep[i]
        }
        table = np.zeros((count, count + 1), int)
        for c, segment in enumerate(self._chain, 1):
            for storage in segment.crossing:
                if made_by.get(storage, c) < c:
                    size = self._graph.storages[storage].bytes
                    table[made_by[storage], c] += size
        # What a segment makes counts for all that begin before it, too.
        rows: list[list[int]] = np.cumsum(table[::-1], axis=0)[::-1].tolist()
        return rows

    def _forward_bytes(self) -> list[list[int]]:
        """Return table[i][j]: segment j's forward peak if segments ≥ i keep nothing."""
        graph, block, turn = self._graph, self._block, self._graph.backward_start
        own = slice(block.start, block.end)
        workspaces = [o.workspace_bytes for o in graph.operators[own]]
        beside = np.add(self._costs.outside_bytes[own], workspaces)
        starts = [segment.start - block.start for segment in self._chain]
        change = np.zeros(turn + 1, int)
        table: list[list[int]] = []
        for made in reversed(self._made):
            for facts in map(graph.storages.__getitem__, made):
                change[facts.birth] += facts.bytes
                change[min(facts.released_or_dead, turn)] -= facts.bytes
            peaks = np.cumsum(change)[own] + beside
            table.append(np.maximum.reduceat(peaks, starts).tolist())
        return table[::-1]

    # From a solution to a choice.

    def choice(self, solution: Sequence[SegmentChoice]) -> Choice:
        """Convert a solution to the block's choice: storages to keep, and stages."""
        kept: set[int] = set()
        stages = []
        first_of: dict[int, int] = {}  # First segment of a nest, by its last.
        for i, (segment, chosen) in enumerate(zip(self._chain, solution, strict=True)):
            kept |= self._must_keep[i]
            if chosen.keep_set is not None:
                kept |= self.keep_sets[i][chosen.keep_set].kept
            else:
                first = first_of.setdefault(chosen.nest_end, i)
                if chosen.nest_end == i:
                    kept |= self._crossing(first, i)
            retained = (s for point in chosen.checkpoints for s in self._at(point, i))
            stages.append(Stage(segment.start, frozenset(retained)))
        return Choice(
            self._block.start,
            self._block.end,
            frozenset(kept),
            tuple(Stage(stage.start, stage.retained - kept) for stage in stages),
        )

    def _crossing(self, first: int, last: int) -> frozenset[int]:
        made = frozenset[int]().union(*self._made[first : last + 1])
        return made & self._chain[last].crossing

    def _at(self, point: Checkpoint, i: int) -> frozenset[int]:
        """Return the storages of a checkpoint that the stage of segment `i` retains.

        The segment right after a checkpoint is the last to read the storages that cross
        its end; stages that run later need only the saved tensors.
        """
        saved = self._saved[point.first] if point.is_saved_set else frozenset[int]()
        if point.last + 1 == i:
            return saved
        return self._crossing(point.first, point.last) | saved


def peak_of_run(
    graph: StepGraph,
    run: Sequence[int],
    touched: Mapping[int, Iterable[int]],
    to_end: Container[int],
) -> int:
    """Return the peak of the bytes that a run of operators itself allocates.

    A storage is freed after the last operator that touches it; storages in `to_end`
    stay live.
    """
    last = {storage: i + 1 for i, index in enumerate(run) for storage in touched[index]}
    last |= {storage: len(run) for storage in last if storage in to_end}
    intervals = [
        (i, last[storage], graph.storages[storage].bytes)
        for i, index in enumerate(run)
        for storage in graph.born_at.get(index, ())
        if storage in last
    ]
    operators = [graph.operators[index] for index in run]
    return peak_of(operators, live_bytes(len(run), intervals))[0]
