"""The keep-sets of equal blocks are found once, and are those of each block's front."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from membudget.planner import block_costs
from membudget.planner.block_costs import Fronts
from membudget.planner.choice import Choice
from membudget.planner.frontier import Front
from tests.planner.drafts import chain_of, drafts


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch):
    graph = chain_of([3, 5] * 4, [1.0, 2.0] * 4)
    solved = []

    def counted(*arguments):
        solved.append(arguments)
        return Front(*arguments)

    monkeypatch.setattr(block_costs, "Front", counted)
    known = Fronts(graph)
    regions = [Choice(start, start + 2) for start in (2, 4)]
    found = [known.of(region) for region in regions]
    assert len(solved) == 1
    assert found == [Front(graph, region).keep_sets() for region in regions]


@given(drafts())
@settings(deadline=None)
def test_the_keep_sets_of_a_block_are_those_of_its_front(graph):
    known = Fronts(graph)
    count = graph.backward_start
    for start in range(count):
        region = Choice(start, count)
        assert known.of(region) == Front(graph, region).keep_sets()
        assert known.of(region) == Front(graph, region).keep_sets()
