"""The timeline of intervals is what counting at each moment gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from membudget.planner.timeline import lifetimes, of_intervals, timeline
from tests.profile.test_graph import graphs


@st.composite
def graphs_and_intervals(draw):
    graph = draw(graphs())
    count = len(graph.operators)
    start = st.integers(0, count)
    interval = st.tuples(start, st.integers(0, count + 2), st.integers(0, 1000))
    ordered = interval.filter(lambda i: i[0] <= i[1])
    return graph, draw(st.lists(ordered, max_size=8))


@given(graphs_and_intervals())
def test_the_bytes_at_each_moment_are_those_counted(given_):
    graph, intervals = given_

    found = of_intervals(graph, intervals)

    counted = [
        sum(size for start, end, size in intervals if start <= moment < end)
        for moment in range(len(graph.operators))
    ]
    needed = [
        alive + operator.workspace_bytes
        for alive, operator in zip(counted, graph.operators, strict=True)
    ]
    assert list(found.alive_bytes) == counted
    assert found.peak_bytes == max(needed, default=0)
    assert found.peak_moment == (needed.index(max(needed)) if needed else 0)


@given(graphs())
def test_a_plain_step_lists_only_what_it_made(graph):
    made = lifetimes(graph)

    found = timeline(graph)

    assert all(birth >= 0 for birth, _, _ in made)
    for moment, alive in enumerate(found.alive_bytes):
        here = [s.bytes for s in graph.storages if 0 <= s.birth <= moment < s.death]
        assert alive == sum(here)
