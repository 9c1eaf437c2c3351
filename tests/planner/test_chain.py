"""The chain programme against every nested schedule of small chains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.graph import ModuleCall, StepGraph
from membudget.planner import nested as nested_chains
from membudget.planner.blocks import Segment
from membudget.planner.chain import COARSEST, FINEST, SegmentChoice
from membudget.planner.choice import Choice
from membudget.planner.nested import ChainNumbers, deeply_nested, nested
from membudget.planner.nests import Checkpoint
from membudget.planner.overheads import Overheads
from membudget.planner.schedule import Simulator
from membudget.planner.simulate import Simulation, simulate
from membudget.planner.timeline import timeline
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
    graph = chain_of(sizes, [float(s) for s in seconds])
    operators = [
        replace(o, workspace_bytes=draw(st.sampled_from([0, 0, 6])))
        for o in graph.operators[:count]
    ]
    return replace(graph, operators=(*operators, *graph.operators[count:]))


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


@given(chains(), st.randoms())
@settings(max_examples=20, deadline=None)
def test_the_answer_does_not_depend_on_what_was_asked_before(graph, generator):
    plain = timeline(graph).peak_bytes
    chain = chain_by_operator(graph).chain(plain)
    budgets = [*range(1, plain + 1)]
    generator.shuffle(budgets)
    for budget in budgets:
        alone = chain_by_operator(graph).chain(plain)
        assert chain.solve(budget) == alone.solve(budget)


def test_six_equal_operators_run_in_two_storages_where_checkpoints_move():
    graph = chain_of([4] * 6, [1.0] * 6)
    links = chain_by_operator(graph)
    chain = links.chain(24)
    seconds = []
    for budget in range(8, 25, 4):
        answer = chain.solve(budget)
        assert answer is not None
        found = simulate(graph, [links.choice(answer)])
        assert found.peak_bytes <= budget
        seconds.append(found.seconds)
    # Twelve are the step; with two storages, six operators run again.
    assert seconds == [18.0, 15.0, 14.0, 13.0, 12.0]
    assert chain.solve(7) is None


def test_a_stage_retains_what_its_first_segment_saved():
    # Each operator saves, as dropout does, a mask that no other operator reads.
    draft = Draft()
    value = draft.outside()
    for _ in range(4):
        value, mask = draft.run(value, makes=[1, 1])
        draft.save(mask)
    graph = draft.finish()
    links = chain_by_operator(graph)
    chain = links.chain(timeline(graph).peak_bytes)
    answer = chain.solve(timeline(graph).peak_bytes - 1)
    assert answer is not None
    # Two run again; three would, if stages retained nothing but what crosses a cut.
    assert simulate(graph, [links.choice(answer)]).seconds == 10.0
    assert any(c.is_saved_set for choice in answer for c in choice.checkpoints)


@given(chains(), st.data())
@settings(max_examples=40, deadline=None)
def test_what_must_not_run_again_does_not_in_any_answer(graph, data):
    count = graph.backward_start
    pinned = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    operators = tuple(
        replace(o, must_keep=i in pinned) for i, o in enumerate(graph.operators)
    )
    graph = replace(graph, operators=operators)
    links = chain_by_operator(graph)
    plain = timeline(graph).peak_bytes
    chain = links.chain(plain)
    for budget in range(1, plain + 1):
        answer = chain.solve(budget)
        if answer is not None:
            found = simulate(graph, [links.choice(answer)])
            assert pinned.isdisjoint(found.recomputed)


@pytest.mark.parametrize(("later", "retained"), [(0, 7), (1, 7)])
def test_what_crosses_a_cut_unsaved_is_retained_until_it_is_read(later, retained):
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[7])
    (b,) = draft.run(a, makes=[2])
    draft.save(b)
    for _ in range(later):
        draft.run(b, makes=[1])
    graph = draft.finish()
    assert graph.storages[1].death == 2
    chain = chain_by_operator(graph).chain(100)
    assert chain._segments[0].choices[0].retained_bytes == retained


def in_one_module(count: int) -> StepGraph:
    graph = chain_of([4] * count, [1.0] * count)
    return replace(graph, calls=(ModuleCall("", 0, count),))


@pytest.mark.parametrize("make", [nested, deeply_nested])
@pytest.mark.parametrize(
    ("count", "lengths"), [(5, [5]), (12, [12]), (20, [12, 20]), (60, [12, 24, 48])]
)
def test_the_largest_call_is_cut_into_12_24_and_for_the_smallest_plans_48_segments(
    count, lengths, make, monkeypatch
):
    made = []
    monkeypatch.setattr(
        nested_chains,
        "_Nested",
        lambda simulator, call, chain, *_: made.append(len(chain)),
    )
    make(Simulator(in_one_module(count)))
    assert made == (lengths if make is deeply_nested else lengths[:2])


def test_a_step_without_module_calls_is_not_nested():
    assert nested(Simulator(chain_of([4] * 3, [1.0] * 3))) == []


def test_a_nested_schedule_is_one_region_with_stages():
    simulator = Simulator(
        in_one_module(6), Overheads(record_s=0.5, record_cold_s=0.5, again_s=0.5)
    )
    (solver,) = nested(simulator)
    plain = simulator.simulate(()).peak_bytes
    least = next(b for b in range(1, plain) if solver.solve(b) is not None)
    schedule = solver.schedule(solver.solve(least))
    assert schedule.calls == (ModuleCall("", 0, 6),)
    (choice,) = schedule.choices
    assert (choice.start, choice.end) == (0, 6)
    assert [stage.start for stage in choice.stages] == [0, 1, 2, 3, 4, 5]
    assert schedule.peak_bytes <= least
    assert schedule.overhead_s == 3.0


def test_a_solver_leaves_no_large_tables_behind():
    solver: Any = nested(Simulator(in_one_module(6)))[0]
    for budget in (5, 8, 5):
        found = list(solver.schedules(budget))
        assert "table" not in vars(solver._chain._nests)
        again = list(nested(Simulator(in_one_module(6)))[0].schedules(budget))
        assert [s.choices for s in found] == [s.choices for s in again]


def test_bytes_are_counted_in_quanta_of_the_plain_peak():
    graph = chain_of([4, 4, 4], [1.0] * 3)
    assert (FINEST, COARSEST) == (6000, 1500)
    for most, quantum in [(100, 1), (6000 * 4, 4), (6000 * 8, 8), (6000 * 7, 7)]:
        chain = chain_by_operator(graph).chain(most)
        assert chain._quantum.bytes == quantum
        assert chain._size == most // quantum + 1
    # A coarser one that divides the sizes is better than a finer one that does not.
    assert chain_by_operator(graph).chain(6000 * 3)._quantum.bytes == 4
