"""What the bytes at a step's peak are for, as a table, for steps that communicate."""

from __future__ import annotations

from membudget.graph import StepGraph
from membudget.planner.second_run import communicates
from membudget.profile.kinds import COLLECTIVES, peak_by_kind
from membudget.report import rendered, share
from membudget.text import format_bytes


def kind_lines(graph: StepGraph) -> list[str]:
    """Return a row for each kind of bytes at the peak of a step of one rank.

    Returns:
        A table after an empty line; nothing if the step communicates with no other
        rank.
    """
    inside = any(map(communicates, graph.operators))
    if not inside and not any(o.name.startswith(COLLECTIVES) for o in graph.operators):
        return []
    sizes = peak_by_kind(graph)
    total = sum(sizes.values())
    rows = [
        (kind, format_bytes(size), share(size, total)) for kind, size in sizes.items()
    ]
    total_row = ("in all", format_bytes(total), "")
    return ["", rendered(("this rank, at its peak", "", ""), [*rows, total_row])]
