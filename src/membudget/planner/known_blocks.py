"""What is known of a step's blocks: identical blocks are solved and simulated once.

The simulation of a block compares op indices and nothing else of them. Two blocks have
the same timeline, but for these indices, if the ranks of the indices are the same:

    a layer      births 40 41 42     forward ends 90     freed 131 128 125
    the next            43 44 45                  90           122 119 116
    ranks of both        0  1  2                   3             6   5   4
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from membudget.graph import Saved, StepGraph
from membudget.planner.choice import (
    Block,
    Choice,
    is_output,
    made_in,
    outlives_forward,
    saved_in,
    wanted_in,
)
from membudget.planner.frontier import Front, KeepSet
from membudget.planner.overwrites import copies_of_saved, overwrites_in, part_of
from membudget.planner.second_run import buffers_of
from membudget.planner.simulate import BlockTimeline, simulate_block
from membudget.planner.timeline import PlainStep


class _Shape(NamedTuple):
    """All that decides the timelines of a block, but for names of what is in it."""

    made: list[int]  # Its storages; their places here stand for them.
    moments: np.ndarray  # Its op indices; their ranks stand for them.
    signature: Hashable


class KnownBlocks:
    """Cache of keep-sets and timelines of the blocks of one step."""

    def __init__(
        self,
        graph: StepGraph,
        plain: PlainStep | None = None,
        alike: KnownBlocks | None = None,
    ):
        """Create a cache for one step, of which the `plain` one is known.

        It shares timelines with the cache of a step that differs in seconds alone.
        """
        self._graph, self._plain = graph, plain or PlainStep(graph)
        self._keep_sets: dict[Hashable, list[KeepSet]] = {}
        self._shapes: dict[tuple[int, int], _Shape | None] = {}
        self._timelines: dict[Hashable, BlockTimeline] = {}
        if alike is not None:
            self._shapes, self._timelines = alike._shapes, alike._timelines

    def keep_sets(
        self, block: Block, always: frozenset[int] = frozenset()
    ) -> list[KeepSet]:
        """Return the keep-sets of a block, largest first.

        Every keep-set includes the storages in `always`, whose bytes are not counted.
        """
        # Storages are numbered within their block, so that equal blocks match.
        made = sorted(made_in(self._graph, block))
        place_of = {storage: place for place, storage in enumerate(made)}
        signature = self._signature(block, place_of, always)
        known = self._keep_sets.get(signature)
        if known is None:
            known = [
                replace(k, kept=frozenset(place_of[s] for s in k.kept | always))
                for k in Front(self._graph, block, always).keep_sets()
            ]
            self._keep_sets[signature] = known
        return [
            replace(k, kept=frozenset(made[place] for place in k.kept)) for k in known
        ]

    def _signature(
        self, block: Block, place_of: dict[int, int], always: frozenset[int]
    ) -> Hashable:
        """Return what two blocks share whose keep-sets are the same.

        Their operators agree in time and data flow, and the storages that they allocate
        in size and in whether autograd needs them.
        """
        graph = self._graph
        operators = tuple(
            (o.seconds, o.must_keep, *_flow(graph, index, place_of))
            for index in range(block.start, block.end)
            for o in [graph.operators[index]]
        )
        wanted = wanted_in(graph, block)
        storages = tuple(
            (
                graph.storages[storage].bytes,
                outlives_forward(graph, storage),
                storage in wanted,
                storage in always,
            )
            for storage in place_of
        )
        return operators, storages

    def timeline(self, choice: Choice) -> BlockTimeline:
        """Return the timeline of a block; see `simulate_block`."""
        where = choice.start, choice.end
        if where not in self._shapes:
            self._shapes[where] = _shape(self._graph, choice)
        shape = self._shapes[where]
        if shape is None or choice.stages:
            if choice not in self._timelines:
                self._timelines[choice] = simulate_block(
                    self._graph, choice, self._plain
                )
            return self._timelines[choice]
        made, moments, signature = shape
        places = tuple(i for i, storage in enumerate(made) if storage in choice.kept)
        key = signature, choice.engine, places
        known = self._timelines.get(key)
        if known is None:
            found = simulate_block(self._graph, choice, self._plain)
            starts, ends = np.searchsorted(moments, (found.starts, found.ends))
            known = self._timelines[key] = found._replace(starts=starts, ends=ends)
        return known._replace(starts=moments[known.starts], ends=moments[known.ends])


def _flow(
    graph: StepGraph, index: int, place_of: dict[int, int]
) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    """Return whether an operator is a view, and the places of what it touches."""
    reads = tuple(place_of.get(s, -1) for s in graph.reads[index])
    writes = tuple(place_of.get(s, -1) for s in graph.writes[index])
    return graph.operators[index].is_view, reads, writes


def _shape(graph: StepGraph, block: Block) -> _Shape | None:
    """Return a block's shape; `None` where more than that decides its timelines.

    That is where autograd asks for a saved tensor more than once, or within the
    forward.
    """
    saved = [graph.saved[index] for index in saved_in(graph, block)]
    turn, operators = graph.backward_start, len(graph.operators)
    made = sorted(made_in(graph, block))
    if any(len(s.asked) > 1 or min(s.asked, default=turn) < turn for s in saved):
        return None
    own = range(block.start, block.end)
    place_of = {storage: place for place, storage in enumerate(made)}
    ends = [_ends(graph, block, storage) for storage in made]
    saves = [(s.moment, s.freed, *s.asked) for s in saved]
    copies = copies_of_saved(graph, block)
    copied = [(copy.start, copy.end) for copy in copies]
    buffers = buffers_of(graph, block)
    moments = sorted({*own, block.end, turn, operators}.union(*ends, *saves, *copied))
    rank = {moment: i for i, moment in enumerate(moments)}
    facts = [graph.storages[storage] for storage in made]
    signature = (
        rank[turn],
        tuple(_flow(graph, index, place_of) for index in own),
        tuple(graph.operators[m].workspace_bytes for m in moments if m < operators),
        tuple((f.bytes, f.released is None) for f in facts),
        tuple(tuple(rank[moment] for moment in of) for of in ends),
        tuple(tuple(rank[moment] for moment in of) for of in saves),
        tuple(tuple(rank[moment] for moment in of) for of in copied),
        tuple(graph.storages[copy.storage].bytes for copy in copies),
        tuple(graph.storages[buffer].bytes for buffer in buffers),
        tuple(_saved_value(graph, s, place_of) for s in saved),
        (*_overwriting(graph, block, saved),) if _overwrites_read(graph, own) else (),
    )
    return _Shape(made, np.array(moments), signature)


def _overwrites_read(graph: StepGraph, block: range) -> bool:
    """Return whether a block writes to a storage that an operator has only read."""
    read: set[int] = set()
    for index in block:
        if not graph.operators[index].is_view:
            if not read.isdisjoint(graph.writes[index]):
                return True
            read.update(s for s in graph.reads[index] if s not in graph.writes[index])
    return False


def _overwriting(
    graph: StepGraph, block: Block, saved: Sequence[Saved]
) -> list[tuple[int | bool, ...]]:
    """Return what decides the copies of a block that overwrites what it has read.

    That is where it touches the memory that it overwrites, which tensors there may
    share elements, and which memory is from before.
    """
    overwritten = overwrites_in(graph, block)
    operators = [(i, graph.operators[i]) for i in range(block.start, block.end)]
    touched = [(i - block.start, v) for i, o in operators for v in o.inputs + o.outputs]
    touched += [(~i, s.value) for i, s in enumerate(saved)]
    numbers: defaultdict[Hashable, int] = defaultdict(count().__next__)
    found: list[tuple[int | bool, ...]] = [tuple(o.must_keep for _, o in operators)]
    for place, value in touched:
        storage = graph.values[value].storage
        if storage in overwritten:
            facts = graph.storages[storage]
            before = facts.birth < block.start, facts.birth < 0
            split, part = part_of(graph, value) or (-1, -1)
            row = place, numbers[storage], numbers["split", split], part, facts.bytes
            found.append((*row, *before, facts.kind == "parameter"))
    return found


def _ends(graph: StepGraph, block: Block, storage: int) -> list[int]:
    """Return a storage's birth and all op indices at which it may be freed."""
    facts = graph.storages[storage]
    saved = (graph.saved[index] for index in graph.saved_on.get(storage, ()))
    others = [s.freed for s in saved if not block.start <= s.moment < block.end]
    return [facts.birth, facts.death, facts.released_or_dead, *others]


def _saved_value(
    graph: StepGraph, saved: Saved, place_of: dict[int, int]
) -> tuple[int, bool]:
    """Return the place of a saved tensor's storage, and whether it is an output."""
    place = place_of.get(graph.values[saved.value].storage, -1)
    return place, is_output(graph, saved)
