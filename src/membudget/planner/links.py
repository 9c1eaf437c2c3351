"""A region as a chain of pieces: their numbers, and what a solution means for it.

What a piece needs to begin again is what crosses its beginning. What is in a piece and
pinned is kept by every plan. Bytes that no plan moves are alive at their moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

from membudget.graph import StepGraph
from membudget.planner.chain import Chain, Hold, Link, Treatment
from membudget.planner.cuts import Piece
from membudget.planner.flat import Option
from membudget.planner.regions import Region, Stage, made_in, storages_of, wanted_in
from membudget.planner.simulate import own
from membudget.planner.windows import Windows


class Links:
    """The pieces of one region of a step.

    Attributes:
        choices: What may be kept of each piece.
    """

    def __init__(self, graph: StepGraph, region: Region, pieces: Sequence[Piece]):
        """Find what each piece makes, saves, leaves and takes."""
        self._graph = graph
        self._region = region
        self._pieces = pieces
        regions = [Region(piece.start, piece.end) for piece in pieces]
        self._made = [frozenset(made_in(graph, part)) for part in regions]
        self._pinned = [self._pinned_in(i) for i in range(len(pieces))]
        self._saved = [frozenset(wanted_in(graph, part)) for part in regions]
        # What nothing else keeps alive between forward and backward.
        kept = [
            (piece.leaves & made) | pinned
            for piece, made, pinned in zip(
                pieces, self._made, self._pinned, strict=True
            )
        ]
        self._windows = Windows(graph, regions, kept)
        self.choices = self._windows.choices

    def _pinned_in(self, i: int) -> frozenset[int]:
        piece = self._pieces[i]
        operators = self._graph.operators[piece.start : piece.end]
        pinned = [o for o in operators if o.is_pinned and not o.is_view]
        values = (value for o in pinned for value in o.outputs)
        return self._made[i].intersection(storages_of(self._graph, values))

    def chain(self, most_bytes: int, rounds_up: bool = True) -> Chain:
        """Return the chain.

        Args:
            most_bytes: The largest budget that will be asked for.
            rounds_up: See `chain.Chain`.
        """
        return Chain(*self._numbers, most_bytes, rounds_up)

    @cached_property
    def _numbers(self) -> tuple[list[Link], list[list[int]], list[list[int]]]:
        options = self._windows.options()
        links = [self._link(i, of_piece) for i, of_piece in enumerate(options)]
        return links, self._crossing_bytes(), self._forward_bytes()

    def _link(self, i: int, options: Sequence[Option]) -> Link:
        piece, made, pinned = self._pieces[i], self._made[i], self._pinned[i]
        leaves = (piece.leaves & made) - pinned
        tape = ((piece.leaves | self._saved[i]) & made) - pinned
        again = (self._saved[i] & made) - pinned
        pass_s, pass_peak_bytes = self._run(i, leaves)
        tape_s, tape_peak_bytes = self._run(i, tape)
        again_s, _ = self._run(i, again)
        alone = own(self._graph, Region(piece.start, piece.end, pinned))
        start = self._windows.backward_start(self._windows.regions[i])
        end = self._windows.backward_end(start)
        return Link(
            tuple(self._with_leaves(i, option) for option in options),
            pass_s,
            tape_s,
            again_s,
            self._bytes(tape),
            pass_peak_bytes,
            tape_peak_bytes,
            self._windows.peak_between(alone, start, end),
            self._windows.fixed_bytes[start] if start < end else 0,
            self._bytes(pinned),
        )

    def _with_leaves(self, i: int, option: Option) -> Option:
        """Count what leaves a piece and dies in the forward of the plain step."""
        until = self._graph.backward_start
        storages = self._graph.storages
        leaves = self._pieces[i].leaves & self._made[i]
        more = self._bytes(frozenset(s for s in leaves if storages[s].death <= until))
        return Option(option.held_bytes + more, option.peak_bytes, option.seconds)

    def _run(self, i: int, targets: frozenset[int]) -> tuple[float, int]:
        """Return seconds and peak of making storages from what enters a piece."""
        piece, made = self._pieces[i], self._made[i] - self._pinned[i]
        needed = set(targets)
        operators: list[int] = []
        for index in range(piece.end - 1, piece.start - 1, -1):
            operator = self._graph.operators[index]
            outputs = storages_of(self._graph, operator.outputs)
            if not operator.is_view and needed.intersection(outputs):
                operators.append(index)
                needed |= made.intersection(storages_of(self._graph, operator.inputs))
        seconds = sum(self._graph.operators[index].seconds for index in operators)
        return seconds, self._peak_of_run(operators[::-1], targets)

    def _peak_of_run(self, operators: Sequence[int], targets: frozenset[int]) -> int:
        graph = self._graph
        last: dict[int, int] = {}
        for index in operators:
            operator = graph.operators[index]
            for storage in storages_of(graph, (*operator.inputs, *operator.outputs)):
                last[storage] = index
        alive = peak = 0
        there: set[int] = set()
        for index in operators:
            operator = graph.operators[index]
            outputs = storages_of(graph, operator.outputs)
            born = {s for s in outputs if graph.storages[s].birth == index}
            there |= born
            alive += self._bytes(born)
            peak = max(peak, alive + operator.workspace_bytes)
            touched = {*outputs, *storages_of(graph, operator.inputs)} - targets
            ended = {s for s in touched & there if last[s] == index}
            alive -= self._bytes(ended)
        return peak

    def _crossing_bytes(self) -> list[list[int]]:
        count = len(self._pieces)
        table = [[0] * (count + 1) for _ in range(count)]
        for i in range(count):
            made: frozenset[int] = frozenset()
            for c in range(i + 1, count + 1):
                made |= self._made[c - 1] - self._pinned[c - 1]
                table[i][c] = self._bytes(made & self._pieces[c - 1].leaves)
        return table

    def _forward_bytes(self) -> list[list[int]]:
        """Return what the forward needs where nothing is kept, from each piece on."""
        fixed = self._windows.fixed_bytes
        operators = self._graph.operators
        until = self._graph.backward_start
        table = []
        for piece in self._pieces:
            steps = [0] * (until + 1)
            for index in range(piece.start, self._region.end):
                for storage in self._graph.born_at.get(index, ()):
                    facts = self._graph.storages[storage]
                    end = facts.death if facts.released is None else facts.released
                    steps[index] += facts.bytes
                    steps[min(end, until)] -= facts.bytes
            alive = list(accumulate(steps))
            table.append(
                [
                    max(
                        alive[m] + fixed[m] + operators[m].workspace_bytes
                        for m in range(other.start, other.end)
                    )
                    for other in self._pieces
                ]
            )
        return table

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._graph.storages[storage].bytes for storage in storages)

    # What a solution means.

    def region(self, treatments: Sequence[Treatment]) -> Region:
        """Return the region with what it keeps, and its stages."""
        kept: set[int] = set()
        stages = []
        first_of: dict[int, int] = {}  # Of segments, by their last piece.
        for i, (piece, treatment) in enumerate(
            zip(self._pieces, treatments, strict=True)
        ):
            kept |= self._pinned[i]
            if treatment.option is not None:
                kept |= self.choices[i][treatment.option].kept
            else:
                first = first_of.setdefault(treatment.segment_end, i)
                if treatment.segment_end == i:
                    kept |= self._leaving(first, i)
            held = frozenset(s for h in treatment.holds for s in self._held(h, i))
            stages.append(Stage(piece.start, held))
        everything = frozenset(kept)
        return Region(
            self._region.start,
            self._region.end,
            everything,
            tuple(Stage(s.start, s.held - everything) for s in stages),
        )

    def _leaving(self, first: int, last: int) -> frozenset[int]:
        made = frozenset[int]().union(*self._made[first : last + 1])
        return made & self._pieces[last].leaves

    def _held(self, hold: Hold, piece: int) -> frozenset[int]:
        """Return what a hold means in the stage of a piece.

        The piece that begins with what is held is the last to read it: what comes after
        asks for the tape alone.
        """
        tape = self._saved[hold.first] & self._made[hold.first]
        if hold.last + 1 == piece:
            return tape if hold.is_tape else frozenset()
        leaving = self._leaving(hold.first, hold.last)
        return leaving | tape if hold.is_tape else leaving
