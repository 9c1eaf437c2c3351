"""The seconds of operators, as planners need them."""

from __future__ import annotations

from membudget.planner.costs import smoothed
from tests.planner.drafts import chain_of


def test_blocks_that_are_equal_take_equal_seconds_and_the_sum_stays():
    graph = chain_of([4, 4, 4, 4], [1.0, 2.0, 3.0, 6.0], per_call=2)
    even = smoothed(graph)
    assert [o.seconds for o in even.operators[:4]] == [2.0, 4.0, 2.0, 4.0]
    assert even.seconds == graph.seconds
