"""The chain programme against every nested schedule of small chains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.graph import StepGraph
from membudget.planner.blocks import Segment
from membudget.planner.chain import Checkpoint, SegmentChoice
from membudget.planner.choice import Choice
from membudget.planner.nested import ChainNumbers, nested
from membudget.planner.schedule import Simulator
from membudget.planner.simulate import Simulation, simulate, timeline
from tests.planner.drafts import Draft, chain_of


def chain_by_operator(graph: StepGraph) -> ChainNumbers:
    """Return the chain whose pieces are the operators."""
    count = graph.backward_start
    whole = Choice(0, count)
    made = [graph.born_at.get(i, ()) for i in range(count)]
    pieces = [
        Segment(i, i + 1, frozenset(made[i]) if i + 1 < count else frozenset())
        for i in range(count)
    ]
    return ChainNumbers(graph, whole, pieces)


def nests(
    i: int, j: int, held: tuple[Checkpoint, ...]
) -> Iterator[dict[int, SegmentChoice]]:
    """Yield every way to go back through the segment from i to j."""
    if i == j:
        yield {i: SegmentChoice(None, -1, held)}
        return
    for rest in nests(i + 1, j, (*held, Checkpoint(i, i, is_saved_set=True))):
        yield {i: SegmentChoice(None, -1, held), **rest}
    for c in range(i + 1, j + 1):
        for right in nests(c, j, (*held, Checkpoint(i, c - 1))):
            for left in nests(i, c - 1, held):
                yield {**left, **right}


def solutions(
    links: ChainNumbers, count: int, start: int = 0
) -> Iterator[list[SegmentChoice]]:
    """Yield every solution of a chain."""
    if start == count:
        yield []
        return
    for rest in solutions(links, count, start + 1):
        for option in range(len(links.keep_sets[start])):
            yield [SegmentChoice(option, start), *rest]
    for end in range(start, count):
        for rest in solutions(links, count, end + 1):
            for staged in nests(start, end, ()):
                segment = [
                    SegmentChoice(None, end, staged[p].checkpoints)
                    for p in range(start, end + 1)
                ]
                yield [*segment, *rest]


def of_each_solution(graph: StepGraph) -> list[Simulation]:
    links = chain_by_operator(graph)
    found = {links.choice(t) for t in solutions(links, graph.backward_start)}
    return [simulate(graph, [region]) for region in found]


@st.composite
def chains(draw: st.DrawFn) -> StepGraph:
    count = draw(st.integers(2, 5))
    number = st.integers(1, 9)
    sizes = draw(st.lists(number, min_size=count, max_size=count))
    seconds = draw(st.lists(number, min_size=count, max_size=count))
    return chain_of(sizes, [float(s) for s in seconds])


def test_a_loop_is_recomputed_in_stages_although_all_of_it_writes_one_storage():
    draft, count = Draft(), 24
    (results,) = draft.run(makes=[1])
    value = draft.outside()
    for _ in range(count):
        (value,) = draft.run(value, makes=[10])
        draft.save(value)
        (results,) = draft.run(value, writes=[results])
    draft.save(*draft.run(results, makes=[1]))
    graph = draft.finish([("", 0, len(draft.operators))])
    solvers = nested(Simulator(graph))
    found = min((s for of in solvers for s in of.least), key=lambda s: s.peak_bytes)
    assert timeline(graph).peak_bytes > 10 * count
    assert found.peak_bytes < 10 * count / 2


@given(chains())
@settings(max_examples=60, deadline=None)
def test_the_answer_is_the_best_nested_schedule_that_fits(graph):
    links = chain_by_operator(graph)
    plain = timeline(graph).peak_bytes
    chain = links.chain(plain)
    every = of_each_solution(graph)
    for budget in range(1, plain + 1):
        fitting = [s.seconds for s in every if s.peak_bytes <= budget]
        answer = chain.solve(budget)
        if answer is None:
            assert fitting == []
            continue
        found = simulate(graph, [links.choice(answer)])
        assert found.peak_bytes <= budget
        assert found.seconds == pytest.approx(min(fitting))
