"""Equal regions are solved once, and answered as if each had been solved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from membudget.planner import repeats
from membudget.planner.keep import choices
from membudget.planner.regions import Region
from membudget.planner.repeats import Repeats
from tests.planner.drafts import chain_of, drafts


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch):
    graph = chain_of([3, 5] * 4, [1.0, 2.0] * 4)
    solved = []

    def counted(*arguments):
        solved.append(arguments)
        return choices(*arguments)

    monkeypatch.setattr(repeats, "choices", counted)
    known = Repeats(graph)
    regions = [Region(start, start + 2) for start in (2, 4)]
    found = [known.choices(region, frozenset()) for region in regions]
    assert len(solved) == 1
    assert found == [choices(graph, region) for region in regions]


@given(drafts())
@settings(deadline=None)
def test_the_choices_of_a_region_are_those_of_keep(graph):
    known = Repeats(graph)
    count = graph.backward_start
    for start in range(count):
        region = Region(start, count)
        assert known.choices(region, frozenset()) == choices(graph, region)
        assert known.choices(region, frozenset()) == choices(graph, region)
