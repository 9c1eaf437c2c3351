"""What blocks keep and what it costs: as simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.graph import StepGraph
from membudget.planner.block_costs import BlockCosts, ChoiceCost
from membudget.planner.choice import Block, Choice
from membudget.planner.simulate import simulate
from tests.planner.drafts import chain_of

Row = tuple[int, int, int]


def chain_with_workspaces(rows: Sequence[Row]) -> StepGraph:
    graph = chain_of([size for size, *_ in rows], [float(s) for _, s, _ in rows])
    operators = list(graph.operators)
    for index, (*_, workspace) in enumerate(rows):
        operators[index] = replace(operators[index], workspace_bytes=workspace)
    return replace(graph, operators=tuple(operators))


rows = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.just(0)), min_size=2, max_size=8
)


@settings(max_examples=100, deadline=None)
@given(rows, st.data())
def test_the_costs_of_blocks_add_up_to_what_is_simulated(rows, data):
    graph = chain_with_workspaces(rows)
    borders = data.draw(st.sets(st.integers(0, len(rows)), min_size=2, max_size=4))
    blocks = [Block(start, end) for start, end in pairwise(sorted(borders))]
    found = BlockCosts(graph, blocks)
    numbers = [range(len(of)) for of in found.keep_sets]
    for picked in product(*numbers):
        costs = [of[i] for of, i in zip(found.costs(), picked, strict=True)]
        kept = [of[i].kept for of, i in zip(found.keep_sets, picked, strict=True)]
        pairs = zip(blocks, kept, strict=True)
        step = simulate(graph, [Choice(b.start, b.end, k) for b, k in pairs])
        before = [sum(c.retained_bytes for c in costs[:i]) for i in range(len(costs))]
        peaks = [b + c.peak_bytes for b, c in zip(before, costs, strict=True)]
        assert max(peaks) == step.peak_bytes
        assert graph.seconds + sum(c.seconds for c in costs) == step.seconds


def test_a_workspace_counts_in_the_peak_of_its_block_alone():
    sizes = [(4, 1, 0), (4, 1, 50), (4, 1, 0), (4, 1, 30)]
    first, second = BlockCosts(
        chain_with_workspaces(sizes), [Block(0, 2), Block(2, 4)]
    ).costs()
    # Forward, 4 + 4 bytes and the workspace of 50; what both keep is 8.
    assert first[0] == ChoiceCost(8, 58, 0.0)
    # Its own saved tensor is the first that the backward pass unpacks.
    assert second[0] == ChoiceCost(0, 38, 0.0)
    # A later block is no operator between blocks, whose peak the first would count.
    later = [(4, 1, 0), (4, 1, 30), (4, 1, 0), (4, 1, 50)]
    first, second = BlockCosts(
        chain_with_workspaces(later), [Block(0, 2), Block(2, 4)]
    ).costs()
    assert (first[0].peak_bytes, second[0].peak_bytes) == (38, 58)
    alone = BlockCosts(chain_with_workspaces(sizes), [Block(2, 4)])
    # What lies outside counts where it is live.
    assert alone.outside_bytes == (4, 8, 8, 8, 8, 8, 4, 0)
    assert alone.costs()[0][0].peak_bytes == 8 + 38


def test_blocks_that_keep_something_in_any_case_keep_it_in_every_choice():
    graph = chain_of([3, 5, 4], [1.0, 2.0, 1.0])
    always = frozenset(graph.born_at[1])
    found = BlockCosts(graph, [Block(0, 3)], [always])
    assert all(always <= k.kept for k in found.keep_sets[0])
    assert found.keep_sets != BlockCosts(graph, [Block(0, 3)]).keep_sets


def test_the_backward_of_a_block_begins_when_its_first_saved_tensor_is_unpacked():
    graph = chain_of([3, 5, 4, 2], [1.0] * 4)
    blocks = [Block(0, 1), Block(1, 3), Block(3, 4)]
    found = BlockCosts(graph, blocks)
    assert [found.backward_start(b) for b in blocks] == [7, 5, 4]
    assert [found.next_backward(moment) for moment in (3, 4, 5, 7)] == [4, 5, 7, 8]
    assert found.backward_start(Block(1, 1)) == 8
