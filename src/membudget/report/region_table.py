"""A table of what each region of a schedule keeps, moves to the host and recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from membudget.graph import StepGraph
from membudget.planner.choice import RERUN, Choice, storages_of, storages_saved_in
from membudget.planner.schedule import Schedule
from membudget.report import rendered
from membudget.report.plan_text import short_name
from membudget.text import format_bytes

MOST_KINDS = 3
"""How many kinds of operators a cell names."""

EVERYTHING = "the whole call (rerun)"


def region_table(graph: StepGraph, schedule: Schedule) -> str:
    """Return a table of the operators whose outputs each region keeps or recomputes."""
    pairs = zip(schedule.calls, schedule.choices, strict=True)
    again = schedule.simulation.recomputed
    share = schedule.again_share
    regions = [_region_line(graph, c.path, choice, again, share) for c, choice in pairs]
    # Adjacent regions with the same content share a row, which sums their costs.
    rows = [_row(list(alike), graph) for _, alike in groupby(regions, key=_content)]
    titles = ["region", "keeps", "recomputes", "operators", "kept", "time added"]
    wait_s, waits = schedule.simulation.moves.wait_s, ""
    if schedule.simulation.moves.out_bytes:
        titles.append("moves to the host")
        waits = f", waits for the link {_share(wait_s, graph)}"
    else:
        rows = [row[:-1] for row in rows]
    # With the overhead, exactly what the slowdown is above 1.
    recompute = _share(schedule.simulation.seconds - wait_s - graph.seconds, graph)
    overhead = _share(schedule.seconds - schedule.simulation.seconds, graph)
    return (
        f"{rendered(titles, rows, left=3)}\n\nrecomputation takes {recompute} of the "
        f"plain step{waits}, and the regions' overhead {overhead}"
    )


@dataclass(frozen=True)
class _RegionLine:
    """One region: operators kept and recomputed, by name and count, and their costs."""

    path: str
    operators: int
    keeps: str
    kept_bytes: int
    recomputes: str
    seconds: float
    moves: str


def _content(region: _RegionLine) -> tuple[object, ...]:
    return region.operators, region.keeps, region.recomputes, region.moves


def _region_line(
    graph: StepGraph,
    path: str,
    choice: Choice,
    recomputed: Iterable[int],
    again_share: float,
) -> _RegionLine:
    again = [index for index in recomputed if choice.start <= index < choice.end]
    # A plan may keep storages that nothing reads after all; they are not reported.
    kept = choice.kept & _needed(graph, choice, again)
    return _RegionLine(
        path or "(the model)",
        choice.end - choice.start,
        _counted(graph, sorted({graph.storages[storage].birth for storage in kept})),
        sum(graph.storages[storage].bytes for storage in kept),
        EVERYTHING if choice.engine == RERUN else _counted(graph, again),
        sum(graph.operators[index].seconds for index in again)
        * (1.0 if choice.engine == RERUN else again_share),
        _counted(graph, sorted(graph.storages[s].birth for s in choice.offloaded)),
    )


def _needed(graph: StepGraph, choice: Choice, again: Iterable[int]) -> set[int]:
    """Return the storages that a region's backward pass and recomputation read."""
    read = [value for index in again for value in graph.operators[index].inputs]
    return {*storages_saved_in(graph, choice).values(), *storages_of(graph, read)}


def _counted(graph: StepGraph, operators: Iterable[int]) -> str:
    """Return operator names with counts, most frequent first."""
    counts = Counter(short_name(graph.operators[index].name) for index in operators)
    found = counts.most_common()
    texts = [name if n == 1 else f"{name} ×{n}" for name, n in found[:MOST_KINDS]]
    rest = sum(number for _, number in found[MOST_KINDS:])
    return ", ".join(texts) + (f" and {rest} more" if rest else "") or "nothing"


def _row(alike: list[_RegionLine], graph: StepGraph) -> tuple[str, ...]:
    first = alike[0]
    name = first.path
    if alike[1:]:
        last = alike[-1].path
        name = f"{name} ({len(alike)} calls)"
        if last != first.path:
            name = f"{first.path} to {last} ({len(alike)})"
    kept = format_bytes(sum(region.kept_bytes for region in alike))
    share = _share(sum(region.seconds for region in alike), graph)
    content = first.keeps, first.recomputes, str(first.operators)
    return name, *content, kept, share, first.moves


def _share(seconds: float, graph: StepGraph) -> str:
    return f"{seconds / graph.seconds if graph.seconds else 0.0:.1%}"
