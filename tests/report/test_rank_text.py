"""A report of several ranks has a row for each; one of a single process has none."""

from __future__ import annotations

from membudget.graph import StaticBytes, StepGraph
from membudget.report.kind_text import kind_lines
from membudget.report.rank_text import RankBytes, rank_lines


def test_each_rank_has_a_row() -> None:
    ranks = [RankBytes(1024, 4096, 2048, 0.5), RankBytes(1024, 4096, 1536, 0.25)]

    _, table = rank_lines(ranks, 2048)
    first, other = table.splitlines()[-2:]

    assert " ".join(first.split()) == "0 1.0 KiB 4.0 KiB 2.0 KiB 100.0% 500.0 ms"
    assert " ".join(other.split()) == "1 1.0 KiB 4.0 KiB 1.5 KiB 75.0% 250.0 ms"


def test_without_ranks_there_is_no_table() -> None:
    assert rank_lines((), 2048) == []


def test_a_step_that_communicates_with_nobody_has_no_table_of_kinds() -> None:
    graph = StepGraph((), (), (), (), (), 0, 0, StaticBytes(1, 1, 1, 1))

    assert kind_lines(graph) == []
