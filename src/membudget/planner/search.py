"""Improve schedules by local search, with peaks and times from the simulation.

Solvers add up peaks that need not coincide, so their schedules may leave memory unused,
and they value each storage as if no others were kept. Three local searches, by
contrast, evaluate complete schedules by simulation:

* `fill` tries to keep recomputed storages one by one, most seconds saved per byte
  first; a storage stays kept if the step then fits and is faster;
* `anneal` changes storages at random, and seldom accepts what is slower;
* `rerun_where_faster` tries to rerun each region instead of replaying it.

The best schedules are improved first. Simulations saved by pruning candidates that
cannot pay off and by abandoning hopeless runs are then spent on the best schedule of
each kind of solver. Adding a solver therefore rarely makes the final schedule slower,
and takes no more simulations. On twelve profiles (`benchmarks/solvers.py`), neither
pruning nor abandoning runs made any schedule slower.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from membudget.graph import StepGraph
from membudget.planner.annealing import MOST_ANNEALED_OPERATORS, anneal, is_too_large
from membudget.planner.choice import RERUN, Choice, is_movable, made_in
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.second_run import may_rerun

MOST_FILLED_OPERATORS = 40_000
"""Maximum number of operators that the simulations of one `fill` run."""

MOST_FILLED = 3
"""Number of schedules filled for a small step: the second may end up faster."""

_seconds = attrgetter("seconds")


def never() -> bool:
    """Return `False`: there is no time limit."""
    return False


def improved(
    simulator: Simulator,
    kinds: Sequence[Sequence[Schedule]],
    budget_bytes: int,
    quickly: bool,
    is_late: Callable[[], bool] = never,
) -> list[Schedule]:
    """Return schedules that fit; the fastest is no slower than any given one that fits.

    `kinds` holds each kind of solver's initial schedules, which may exceed the budget.
    If `quickly`, fill only the fastest schedule that fits, and skip annealing. Once
    something fits, no annealing begins if `is_late`.
    """
    fitting = [[s for s in of if s.peak_bytes <= budget_bytes] for of in kinds]
    fastest = sorted((s for of in fitting for s in of), key=_seconds)
    if quickly:
        filled = [fill(simulator, s, budget_bytes) for s in fastest[:1]]
        return [rerun_where_faster(simulator, s, budget_bytes) for s in filled]
    best_of_kinds = [min(of, key=_seconds) for of in fitting if of]
    is_large = is_too_large(simulator.graph)
    first = fastest[: 1 if is_large else MOST_FILLED]
    found = _filled(simulator, first, best_of_kinds, budget_bytes)
    over = (s for of in kinds for s in of if s.peak_bytes > budget_bytes)
    nearest = sorted(over, key=lambda s: _penalised(s, budget_bytes))[:1]
    if not is_large:
        found = _annealed(simulator, found, nearest, budget_bytes, is_late)
    best = sorted(found, key=_seconds)[:MOST_FILLED]
    rerun = [rerun_where_faster(simulator, s, budget_bytes) for s in best]
    return _distinct([*rerun, *found, *fastest])


def _filled(
    simulator: Simulator,
    first: Sequence[Schedule],
    others: Sequence[Schedule],
    budget_bytes: int,
) -> list[Schedule]:
    """Fill the schedules in `first`, then `others` with the simulations left over."""
    each = len(simulator.graph.operators)
    # As many operators as filling `first` would run without pruning.
    most = sum(len(_by_worth(simulator.graph, schedule)) for schedule in first)
    limit = simulator.operators + min(most * each, len(first) * MOST_FILLED_OPERATORS)
    starts = _distinct([*first, *others])
    found = [fill(simulator, schedule, budget_bytes, limit) for schedule in starts]
    return sorted(found, key=_seconds)


def _annealed(
    simulator: Simulator,
    found: Sequence[Schedule],
    nearest: Sequence[Schedule],
    budget_bytes: int,
    is_late: Callable[[], bool],
) -> list[Schedule]:
    """Anneal the best schedule with and without stages, and the nearest to fitting."""
    flat = [
        simulator.changed(s, [replace(choice, stages=()) for choice in s.choices])
        for s in found
    ]
    first = _distinct([*found[:1], *flat[:1], *nearest])
    each = MOST_ANNEALED_OPERATORS
    limit = simulator.operators + len(first) * each
    results = list(found)
    for place, start in enumerate(_distinct([*first, *found[1:], *flat[1:]])):
        # Further starts use the simulations that hopeless runs saved.
        if place >= len(first) and simulator.operators + each > limit:
            break
        if results and is_late():
            break
        known_s = min((s.seconds for s in results), default=math.inf)
        annealed = anneal(simulator, start, budget_bytes, known_s, place > 0)
        if annealed is not None:
            results.append(fill(simulator, annealed, budget_bytes))
    return results


def _distinct(schedules: Iterable[Schedule]) -> list[Schedule]:
    return list({schedule.choices: schedule for schedule in schedules}.values())


def _penalised(schedule: Schedule, budget_bytes: int) -> float:
    over = schedule.simulation.share_over(budget_bytes)
    return schedule.seconds + over * schedule.plain_s


def fill(
    simulator: Simulator, schedule: Schedule, budget_bytes: int, limit: float = math.inf
) -> Schedule:
    """Keep more storages in a fitting schedule as long as it fits and gets faster.

    The search stops when the simulator has run `limit` operators in total.
    """
    graph = simulator.graph
    tries = MOST_FILLED_OPERATORS // max(1, len(graph.operators))
    for place, storage in _by_worth(graph, schedule)[:tries]:
        if simulator.operators >= limit:
            break
        if not _may_pay(graph, schedule, storage, budget_bytes):
            continue
        choices = [*schedule.choices]
        choices[place] = replace(choices[place], kept=choices[place].kept | {storage})
        fuller = simulator.changed(schedule, choices)
        if fuller.peak_bytes <= budget_bytes and fuller.seconds < schedule.seconds:
            schedule = fuller
    return schedule


def _may_pay(
    graph: StepGraph, schedule: Schedule, storage: int, budget_bytes: int
) -> bool:
    """Return whether keeping a storage may save time and still fit."""
    facts, turn = graph.storages[storage], graph.backward_start - 1
    if facts.birth not in schedule.simulation.recomputed:
        return False
    # A kept storage is live at the end of the forward: it must fit there.
    is_live = facts.released_or_dead > turn
    turn_bytes = schedule.simulation.alive_bytes[turn]
    return is_live or turn_bytes + facts.bytes <= budget_bytes


def _by_worth(graph: StepGraph, schedule: Schedule) -> list[tuple[int, int]]:
    """Return pairs (choice, recomputed storage), most seconds saved per byte first."""
    times = Counter(schedule.simulation.recomputed)
    found = []
    for place, choice in enumerate(schedule.choices):
        droppable = () if choice.engine == RERUN else made_in(graph, choice)
        for storage in {*droppable} - choice.kept:
            facts = graph.storages[storage]
            seconds = times[facts.birth] * graph.operators[facts.birth].seconds
            if seconds and facts.bytes:
                found.append((seconds / facts.bytes, place, storage))
    return [(place, storage) for _, place, storage in sorted(found, reverse=True)]


def rerun_where_faster(
    simulator: Simulator, schedule: Schedule, budget_bytes: int
) -> Schedule:
    """Rerun each region for which that is faster than its replay and still fits."""
    for place, choice in enumerate(schedule.choices):
        if choice.engine == RERUN or not may_rerun(simulator.graph, choice):
            continue
        choices = [*schedule.choices]
        choices[place] = Choice(choice.start, choice.end, engine=RERUN)
        other = simulator.changed(schedule, choices)
        if other.peak_bytes <= budget_bytes and other.seconds < schedule.seconds:
            schedule = other
    return schedule


def moving_all(simulator: Simulator, schedule: Schedule) -> Schedule:
    """Move all that a schedule keeps and that can be moved to the host."""
    graph = simulator.graph
    choices = [
        replace(
            choice,
            offloaded=frozenset(s for s in choice.kept if is_movable(graph, choice, s)),
        )
        for choice in schedule.choices
    ]
    return simulator.changed(schedule, choices)
