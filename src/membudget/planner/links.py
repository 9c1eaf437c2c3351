"""A region as a chain of pieces: their numbers, and what a solution means for it.

What a piece needs to begin again is what crosses its beginning. What is in a piece and
pinned is kept by every plan. Bytes that no plan moves are alive at their moments.
"""

from __future__ import annotations

from collections.abc import Sequence

from membudget.graph import StepGraph
from membudget.planner.chain import Chain, Hold, Link, Treatment
from membudget.planner.cuts import Piece
from membudget.planner.flat import Option
from membudget.planner.regions import Region, Stage, made_in, saved_in, storages_of
from membudget.planner.simulate import own
from membudget.planner.windows import Windows


class Links:
    """The pieces of one region of a step."""

    def __init__(self, graph: StepGraph, region: Region, pieces: Sequence[Piece]):
        """Find what each piece makes, saves, leaves and takes."""
        self._graph = graph
        self._region = region
        self._pieces = pieces
        regions = [Region(piece.start, piece.end) for piece in pieces]
        self._made = [frozenset(made_in(graph, part)) for part in regions]
        self._pinned = [self._pinned_in(piece) for piece in pieces]
        self._saved = [self._saved_in(part) for part in regions]
        # What nothing else keeps alive between forward and backward.
        kept = [
            (piece.leaves & made) | pinned
            for piece, made, pinned in zip(
                pieces, self._made, self._pinned, strict=True
            )
        ]
        self._windows = Windows(graph, regions, kept)

    def _pinned_in(self, piece: Piece) -> frozenset[int]:
        operators = self._graph.operators[piece.start : piece.end]
        pinned = [o for o in operators if o.is_pinned and not o.is_view]
        return frozenset(
            s for o in pinned for s in storages_of(self._graph, o.outputs)
        ) & frozenset(made_in(self._graph, Region(piece.start, piece.end)))

    def _saved_in(self, part: Region) -> frozenset[int]:
        saved = (self._graph.saved[index] for index in saved_in(self._graph, part))
        values = [s.value for s in saved if s.asked]
        return frozenset(storages_of(self._graph, values))

    def chain(self, most_bytes: int) -> Chain:
        """Return the chain.

        Args:
            most_bytes: The largest budget that will be asked for.
        """
        options = self._windows.options()
        links = [self._link(i, of_piece) for i, of_piece in enumerate(options)]
        return Chain(links, self._crossing_bytes(), most_bytes)

    def _link(self, i: int, options: Sequence[Option]) -> Link:
        piece, made, pinned = self._pieces[i], self._made[i], self._pinned[i]
        leaves = (piece.leaves & made) - pinned
        tape = ((piece.leaves | self._saved[i]) & made) - pinned
        again = (self._saved[i] & made) - pinned
        pass_s, pass_peak_bytes = self._run(piece, leaves, pinned)
        tape_s, tape_peak_bytes = self._run(piece, tape, pinned)
        again_s, _ = self._run(piece, again, pinned)
        alone = own(self._graph, Region(piece.start, piece.end, pinned))
        start, end = self._backward(i)
        return Link(
            tuple(self._with_leaves(i, option) for option in options),
            pass_s,
            tape_s,
            again_s,
            self._bytes(tape),
            pass_peak_bytes,
            tape_peak_bytes,
            self._windows.peak_between(alone, start, end),
            self._windows.peak_between(alone, piece.start, piece.end),
            self._windows.fixed_bytes[start],
            self._bytes(pinned),
        )

    def _with_leaves(self, i: int, option: Option) -> Option:
        """Count what leaves a piece and dies in the forward of the plain step."""
        until = self._graph.backward_start
        storages = self._graph.storages
        leaves = self._pieces[i].leaves & self._made[i]
        more = self._bytes(frozenset(s for s in leaves if storages[s].death <= until))
        return Option(option.held_bytes + more, option.peak_bytes, option.seconds)

    def _backward(self, i: int) -> tuple[int, int]:
        """Return when the backward of a piece begins, and when that of another does."""
        count = len(self._graph.operators)
        starts = [self._windows.backward_start(r) for r in self._windows.regions]
        later = [start for start in starts if start > starts[i]]
        return min(starts[i], count - 1), min(later, default=count)

    def _run(
        self, piece: Piece, targets: frozenset[int], there: frozenset[int]
    ) -> tuple[float, int]:
        """Return seconds and peak of making storages from what enters a piece."""
        made = self._made_in(piece) - there
        needed = set(targets)
        operators: list[int] = []
        for index in range(piece.end - 1, piece.start - 1, -1):
            operator = self._graph.operators[index]
            outputs = storages_of(self._graph, operator.outputs)
            if not operator.is_view and needed.intersection(outputs):
                operators.insert(0, index)
                needed |= made.intersection(storages_of(self._graph, operator.inputs))
        seconds = sum(self._graph.operators[index].seconds for index in operators)
        return seconds, self._peak_of_run(operators, targets)

    def _peak_of_run(self, operators: Sequence[int], targets: frozenset[int]) -> int:
        graph = self._graph
        last: dict[int, int] = {}
        for index in operators:
            operator = graph.operators[index]
            for storage in storages_of(graph, (*operator.inputs, *operator.outputs)):
                last[storage] = index
        alive = peak = 0
        for index in operators:
            operator = graph.operators[index]
            born = [
                storage
                for storage in storages_of(graph, operator.outputs)
                if graph.storages[storage].birth == index
            ]
            alive += self._bytes(born)
            peak = max(peak, alive + operator.workspace_bytes)
            touched = storages_of(graph, (*operator.inputs, *operator.outputs))
            ends = [s for s in touched if last[s] == index and s not in targets]
            alive -= self._bytes(
                [s for s in ends if graph.storages[s].birth in operators]
            )
        return peak

    def _made_in(self, piece: Piece) -> set[int]:
        return made_in(self._graph, Region(piece.start, piece.end))

    def _crossing_bytes(self) -> list[list[int]]:
        count = len(self._pieces)
        table = [[0] * (count + 1) for _ in range(count)]
        for i in range(count):
            made: frozenset[int] = frozenset()
            for c in range(i + 1, count + 1):
                made |= self._made[c - 1] - self._pinned[c - 1]
                table[i][c] = self._bytes(made & self._pieces[c - 1].leaves)
        return table

    def _bytes(self, storages: Sequence[int] | frozenset[int]) -> int:
        return sum(self._graph.storages[storage].bytes for storage in storages)

    # What a solution means.

    def region(self, treatments: Sequence[Treatment]) -> Region:
        """Return the region with what it keeps, and its stages."""
        kept: set[int] = set()
        stages = []
        for i, (piece, treatment) in enumerate(
            zip(self._pieces, treatments, strict=True)
        ):
            kept |= self._pinned[i]
            if treatment.option is not None:
                kept |= self._windows.choices[i][treatment.option].kept
            elif treatment.segment_end == i:
                kept |= self._leaving(self._segment_start(treatments, i), i)
            held = frozenset(s for h in treatment.holds for s in self._held(h, i))
            stages.append(Stage(piece.start, held))
        everything = frozenset(kept)
        return Region(
            self._region.start,
            self._region.end,
            everything,
            tuple(Stage(s.start, s.held - everything) for s in stages),
        )

    def _segment_start(self, treatments: Sequence[Treatment], end: int) -> int:
        inside = [
            i
            for i, treatment in enumerate(treatments)
            if treatment.option is None and treatment.segment_end == end
        ]
        return min(inside)

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
