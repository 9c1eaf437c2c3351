"""What is known of blocks: found once for equal ones, and the same for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.graph import Saved, StepGraph
from membudget.planner import known_blocks
from membudget.planner.choice import RERUN, Block, Choice, Stage, made_in
from membudget.planner.frontier import Front
from membudget.planner.known_blocks import KnownBlocks
from membudget.planner.second_run import SMALL_BUFFER_BYTES, may_rerun
from membudget.planner.simulate import simulate_block
from tests.planner.drafts import Draft, chain_of, drafts, subsets


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch):
    graph = chain_of([3, 5] * 4, [1.0, 2.0] * 4)
    solved = []

    def counted(*arguments):
        solved.append(arguments)
        return Front(*arguments)

    monkeypatch.setattr(known_blocks, "Front", counted)
    known = KnownBlocks(graph)
    regions = [Choice(start, start + 2) for start in (2, 4)]
    found = [known.keep_sets(region) for region in regions]
    assert len(solved) == 1
    assert found == [Front(graph, region).keep_sets() for region in regions]


@given(drafts())
@settings(deadline=None)
def test_the_keep_sets_of_a_block_are_those_of_its_front(graph):
    known = KnownBlocks(graph)
    count = graph.backward_start
    for start in range(count):
        region = Choice(start, count)
        assert known.keep_sets(region) == Front(graph, region).keep_sets()
        assert known.keep_sets(region) == Front(graph, region).keep_sets()


def unequal(change: str) -> tuple[StepGraph, int]:
    """Return a step of two blocks that differ in one thing, and where they meet."""
    draft = Draft()
    value = draft.outside()
    for block in range(2):
        is_other = block == 1
        (a,) = draft.run(
            value,
            makes=[3 + (is_other and change == "bytes")],
            seconds=1.0 + (is_other and change == "seconds"),
            must_keep=is_other and change == "must_keep",
        )
        if not (is_other and change == "saved"):
            draft.save(a)
        (b,) = draft.run(a, *[value] * (is_other and change == "reads"), makes=[2])
        draft.save(b)
        if is_other and change == "held":
            draft.hold(a)
        value = draft.view(b)
    return draft.finish(), 3


@pytest.mark.parametrize(
    "change", ["", "bytes", "seconds", "must_keep", "saved", "reads", "held"]
)
def test_blocks_that_differ_are_solved_apart(change, monkeypatch):
    graph, middle = unequal(change)
    solved = []

    def counted(*arguments):
        solved.append(arguments)
        return Front(*arguments)

    monkeypatch.setattr(known_blocks, "Front", counted)
    known = KnownBlocks(graph)
    for block in (Block(0, middle), Block(middle, 2 * middle)):
        assert known.keep_sets(block) == Front(graph, block).keep_sets()
    assert len(solved) == (2 if change else 1)


# Timelines.


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """Return the choices that are simulated from now on."""
    choices: list[Choice] = []

    def noted(graph, choice, plain):
        choices.append(choice)
        return simulate_block(graph, choice, plain)

    monkeypatch.setattr(known_blocks, "simulate_block", noted)
    return choices


def blocks_of(graph: StepGraph) -> list[Block]:
    until = graph.backward_start + 1
    return [Block(a, b) for a in range(until) for b in range(a, until)]


def check_timeline(known: KnownBlocks, graph: StepGraph, choice: Choice) -> None:
    found, alone = known.timeline(choice), simulate_block(graph, choice)
    assert [c.tolist() for c in found] == [c.tolist() for c in alone]


def check_timelines(graph: StepGraph) -> None:
    known = KnownBlocks(graph)
    for block in blocks_of(graph):
        choices = [
            Choice(block.start, block.end, k) for k in subsets(made_in(graph, block))
        ]
        if may_rerun(graph, block):
            choices.append(Choice(block.start, block.end, engine=RERUN))
        for choice in choices:
            check_timeline(known, graph, choice)


Layer = list[tuple[list[int], int, bool, bool, int]]

BUFFERS = st.one_of(st.none(), st.integers(1, 2), st.just(SMALL_BUFFER_BYTES + 1))


@st.composite
def repeated(draw: st.DrawFn) -> StepGraph:
    """Make a step of equal layers, one of which may differ a little."""
    layer: Layer = [
        (
            draw(st.lists(st.integers(0, 2), min_size=1, max_size=2)),
            draw(st.integers(1, 3)),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.integers(0, 2)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    layers = [layer] * 3
    if draw(st.booleans()):
        other = draw(st.integers(0, 2))
        layers[other] = [(*row[:4], draw(st.integers(0, 2))) for row in layer]
    sizes = draw(st.lists(BUFFERS, min_size=3, max_size=3))
    draft = Draft()
    known = [draft.outside()]
    for rows, buffer_bytes in zip(layers, sizes, strict=True):
        buffer = [draft.outside(buffer_bytes, "buffer")] if buffer_bytes else []
        for back, size, is_in_place, is_saved, workspace in rows:
            inputs = [known[-1 - min(i, len(known) - 1)] for i in back] + buffer
            written = known[-1:] if is_in_place and known[1:] else []
            makes = [] if written else [size]
            (made,) = draft.run(
                *inputs, makes=makes, writes=written, workspace=workspace
            )
            if is_saved:
                draft.save(made)
            known = [*(known[:-1] if written else known), made]
    return draft.finish()


@settings(max_examples=60, deadline=None)
@given(repeated())
def test_the_timelines_of_equal_blocks_are_those_of_their_simulations(graph):
    check_timelines(graph)


@settings(max_examples=30, deadline=None)
@given(drafts())
def test_the_timelines_of_any_blocks_are_those_of_their_simulations(graph):
    check_timelines(graph)


def test_equal_blocks_are_simulated_once_for_each_way_to_keep(simulated):
    graph = chain_of([3, 5] * 4, [1.0, 2.0] * 4)
    known = KnownBlocks(graph)
    for start in (2, 4):
        for kept in (frozenset[int](), frozenset(graph.born_at[start])):
            known.timeline(Choice(start, start + 2, kept))
    assert [choice.start for choice in simulated] == [2, 2]


def test_a_step_that_differs_in_seconds_alone_shares_timelines(simulated):
    graph = chain_of([3, 5] * 4, [1.0, 2.0] * 4)
    slower = tuple(replace(operator, seconds=7.0) for operator in graph.operators)
    known = KnownBlocks(graph)
    other = KnownBlocks(replace(graph, operators=slower), alike=known)
    kept = frozenset(graph.born_at[2])
    found, again = (of.timeline(Choice(2, 4, kept)) for of in (known, other))
    assert len(simulated) == 1
    for one, two in zip(found, again, strict=True):
        assert one.tolist() == two.tolist()
    assert known.keep_sets(Block(2, 4)) != other.keep_sets(Block(2, 4))


def test_a_block_with_stages_is_simulated_with_them(simulated):
    graph = chain_of([3, 5] * 4, [1.0, 2.0] * 4)
    known = KnownBlocks(graph)
    flat = Choice(2, 6)
    staged = replace(flat, stages=(Stage(2), Stage(4)))
    for choice in (flat, staged, flat, staged):
        check_timeline(known, graph, choice)
    assert simulated == [flat, staged]


def asked_again(graph: StepGraph, index: int, asked: tuple[int, ...]) -> StepGraph:
    saved: list[Saved] = list(graph.saved)
    saved[index] = replace(saved[index], asked=asked)
    return replace(graph, saved=tuple(saved))


@pytest.mark.parametrize("asked", [(9, 10), (3,)])
def test_a_block_of_which_something_is_asked_twice_or_early_shares_nothing(
    asked, simulated
):
    graph = asked_again(chain_of([3] * 6, [1.0] * 6), 2, asked)
    known = KnownBlocks(graph)
    for start in (0, 2, 4, 2):
        choice = Choice(start, start + 2)
        check_timeline(known, graph, choice)
    assert [choice.start for choice in simulated] == [0, 2, 4]


def overwriting(change: str) -> StepGraph:
    """Return three blocks that overwrite what they read; the second may be another."""
    draft = Draft()
    value = draft.outside()
    for block in range(3):
        is_other = block == 1
        state = draft.outside(2 + (is_other and change == "bytes of the state"))
        weight = draft.outside(2, "parameter")
        (a,) = draft.run(value, makes=[4])
        one, two = draft.run(writes=[a, a], is_view=True)
        (value,) = draft.run(one, state, makes=[2])
        draft.save(value)
        draft.run(writes=[one if is_other and change == "part" else two])
        draft.run(writes=[weight if is_other and change == "memory" else state])
        draft.save(state)
    return draft.finish()


@pytest.mark.parametrize("change", ["", "part", "memory", "bytes of the state"])
def test_blocks_that_overwrite_alike_what_they_have_read_are_simulated_once(
    change, simulated
):
    graph = overwriting(change)
    known = KnownBlocks(graph)
    for start in (0, 5):
        for kept in (frozenset[int](), frozenset(graph.born_at[start])):
            check_timeline(known, graph, Choice(start, start + 5, kept))
    assert len(simulated) == (4 if change else 2)
