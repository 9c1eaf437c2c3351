"""Minimum cuts against every cut there is."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.planner.network import Network

Edge = tuple[int, int, float]

INFINITE = float("inf")


def cut_capacity(edges: list[Edge], side: set[int]) -> float:
    return sum(c for start, end, c in edges if start in side and end not in side)


def least_cuts(nodes: int, edges: list[Edge]) -> tuple[float, list[set[int]]]:
    """Return the least capacity of a cut, and every side that has it."""
    table: list[tuple[float, set[int]]] = []
    for bits in product((False, True), repeat=nodes - 2):
        side = {0, *(i + 2 for i, is_in in enumerate(bits) if is_in)}
        table.append((cut_capacity(edges, side), side))
    least = min(capacity for capacity, _ in table)
    return least, [side for capacity, side in table if capacity == least]


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, list[Edge]]:
    nodes = draw(st.integers(2, 7))
    ends = st.integers(0, nodes - 1)
    capacity = st.one_of(st.integers(0, 9).map(float), st.just(INFINITE))
    edges = draw(st.lists(st.tuples(ends, ends, capacity), max_size=14))
    # Where an infinite path leads to the sink there is no cut: planners build none.
    return nodes, [
        (start, end, c)
        for start, end, c in edges
        if start != end and (c < INFINITE or (end != 1 and start != 1))
    ]


def side_of(nodes: int, edges: list[Edge]) -> set[int]:
    network = Network(nodes)
    for edge in edges:
        network.connect(*edge)
    return network.source_side(0, 1)


@settings(max_examples=100, deadline=None)
@given(networks())
def test_the_cut_is_a_least_one_of_all_cuts(made):
    nodes, edges = made
    side = side_of(nodes, edges)
    assert 0 in side
    assert 1 not in side
    assert cut_capacity(edges, side) == least_cuts(nodes, edges)[0]


@settings(max_examples=100, deadline=None)
@given(networks())
def test_the_side_lies_within_that_of_every_other_least_cut(made):
    nodes, edges = made
    side = side_of(nodes, edges)
    assert all(side <= other for other in least_cuts(nodes, edges)[1])


def test_edges_between_the_same_nodes_add_up():
    edges = [(0, 2, 1.0), (0, 2, 1.0), (2, 1, 1.5)]
    assert side_of(3, edges) == {0, 2}


def test_flow_is_taken_back_where_another_way_needs_the_room():
    # The shortest path goes over the middle edge; the best two do not.
    edges = [(0, 2, 1.0), (0, 3, 1.0), (2, 3, 1.0), (2, 1, 1.0), (3, 1, 1.0)]
    edges += [(0, 4, 0.5), (4, 2, 9.0)]
    assert side_of(5, edges) == {0, 2, 3, 4}


def test_a_network_whose_source_leads_nowhere_is_cut_at_the_source():
    assert side_of(3, [(2, 1, 1.0)]) == {0}


def test_long_chains_are_cut_at_their_narrowest_edge():
    count = 3000
    nodes = [0, *range(2, count), 1]
    edges = [(a, b, 2.0) for a, b in pairwise(nodes)]
    edges[1700] = (*edges[1700][:2], 1.0)
    assert len(side_of(count, edges)) == 1701


def test_a_path_is_taken_again_where_it_was_left_before_a_full_edge():
    # The first path fills its first edge; what comes after has room for the second.
    edges = [(0, 2, 1.0), (0, 3, 2.0), (2, 4, 9.0), (3, 4, 9.0), (4, 1, 9.0)]
    assert side_of(5, edges) == {0}
    assert side_of(5, [*edges[:4], (4, 1, 2.5)]) == {0, 2, 3, 4}
