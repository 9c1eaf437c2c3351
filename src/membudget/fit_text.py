"""What a fitted model's plan does, region by region, as a person reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from membudget.graph import StepGraph
from membudget.plan_text import short_name
from membudget.planner.choice import Choice, saved_storages, storages_of
from membudget.planner.schedule import Schedule
from membudget.sizes import format_bytes
from membudget.tables import rendered

MOST = 3
"""How many kinds of operators a cell names; the plan holds them all."""


def region_table(graph: StepGraph, schedule: Schedule) -> str:
    """Return a table of what each region keeps and makes again.

    Neighbours that do the same share a line, with the sum of their bytes and seconds.

    Args:
        graph: The plain step.
        schedule: The choices of a plan, simulated.
    """
    pairs = zip(schedule.calls, schedule.choices, strict=True)
    again = schedule.simulation.recomputed
    regions = [_described(graph, call.path, region, again) for call, region in pairs]
    rows = [_row(list(alike), graph) for _, alike in groupby(regions, key=_content)]
    titles = ("region", "keeps", "makes again", "operators", "kept", "of the step")
    makes = _share(sum(region.seconds for region in regions), graph)
    own = _share(schedule.seconds - schedule.simulation.seconds, graph)
    return (
        f"{rendered(titles, rows, left=3)}\n\nof the plain step's time, what is made "
        f"again takes {makes}, and the regions themselves take {own}"
    )


@dataclass(frozen=True)
class _Described:
    """One region.

    Attributes:
        path: The module.
        operators: How many operators run in its call.
        keeps: The operators whose outputs stay, by name and number.
        kept_bytes: What those take.
        makes: The operators that run again, likewise.
        seconds: What those take.
    """

    path: str
    operators: int
    keeps: str
    kept_bytes: int
    makes: str
    seconds: float


def _content(region: _Described) -> tuple[object, ...]:
    return region.operators, region.keeps, region.makes


def _described(
    graph: StepGraph, path: str, choice: Choice, recomputed: Iterable[int]
) -> _Described:
    again = [index for index in recomputed if choice.start <= index < choice.end]
    kept = choice.kept & _needed(graph, choice, again)
    return _Described(
        path or "(the model)",
        choice.end - choice.start,
        _counted(graph, sorted({graph.storages[storage].birth for storage in kept})),
        sum(graph.storages[storage].bytes for storage in kept),
        _counted(graph, again),
        sum(graph.operators[index].seconds for index in again),
    )


def _needed(graph: StepGraph, choice: Choice, again: Iterable[int]) -> set[int]:
    """Return the storages that must stay for the region's backward."""
    read = [value for index in again for value in graph.operators[index].inputs]
    return {*saved_storages(graph, choice), *storages_of(graph, read)}


def _counted(graph: StepGraph, operators: Iterable[int]) -> str:
    """Return operators by their names, each with how many there are."""
    counts = Counter(short_name(graph.operators[index].name) for index in operators)
    found = counts.most_common()
    texts = [name if n == 1 else f"{name} ×{n}" for name, n in found[:MOST]]
    rest = sum(number for _, number in found[MOST:])
    return ", ".join(texts) + (f" and {rest} more" if rest else "") or "nothing"


def _row(alike: list[_Described], graph: StepGraph) -> tuple[str, ...]:
    first = alike[0]
    name = first.path
    if alike[1:]:
        name = f"{first.path} to {alike[-1].path} ({len(alike)})"
    kept = format_bytes(sum(region.kept_bytes for region in alike))
    share = _share(sum(region.seconds for region in alike), graph)
    return name, first.keeps, first.makes, str(first.operators), kept, share


def _share(seconds: float, graph: StepGraph) -> str:
    return f"{seconds / graph.seconds if graph.seconds else 0.0:.1%}"
