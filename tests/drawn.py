"""Plans that are drawn: any engine, any outputs kept, modules at any depth.

Solvers choose few kinds of plans. What a step takes under a plan must be as simulated
for all of them, or the next solver finds one for which it is not.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import (
    RERUN,
    Choice,
    Stage,
    made_in,
    saved_in,
    storages_of,
)
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.second_run import may_rerun


def drawn_schedule(simulator: Simulator, draws: Random) -> Schedule:
    """Return a schedule of disjoint module calls, each of two operators or more."""
    graph = simulator.graph
    calls = _drawn_calls(graph, draws)
    return simulator.schedule(calls, [_drawn_choice(graph, c, draws) for c in calls])


def staged_schedule(simulator: Simulator, draws: Random) -> Schedule:
    """Return a drawn schedule, or one of the whole model, whose replays have stages."""
    graph = simulator.graph
    calls = _drawn_calls(graph, draws)
    if draws.random() < 0.3:
        calls = [call for call in graph.calls if call.path == ""]
    choices = [_drawn_choice(graph, call, draws) for call in calls]
    return simulator.schedule(calls, [_staged(graph, c, draws) for c in choices])


def needed_before(graph: StepGraph, region: Choice, end: int) -> set[int]:
    """Return what making what was saved before an operator again may read."""
    found = {
        graph.values[graph.saved[index].value].storage
        for index in saved_in(graph, Choice(region.start, end))
    }
    for index in range(region.end - 1, region.start - 1, -1):
        operator = graph.operators[index]
        if not operator.is_view and found & set(storages_of(graph, operator.outputs)):
            found |= set(storages_of(graph, operator.inputs))
    return found


def _staged(graph: StepGraph, choice: Choice, draws: Random) -> Choice:
    places = range(choice.start + 1, choice.end)
    if choice.engine == RERUN:
        return choice
    made, share = made_in(graph, choice) - choice.kept, draws.choice([0.1, 0.3, 1.0])
    stages = [Stage(choice.start)]
    for start in sorted(draws.sample(places, min(draws.randrange(4), len(places)))):
        useful = sorted(made & needed_before(graph, choice, start))
        held = frozenset(storage for storage in useful if draws.random() < share)
        stages.append(Stage(start, held))
    return replace(choice, stages=tuple(stages))


def _drawn_calls(graph: StepGraph, draws: Random) -> list[ModuleCall]:
    found: list[ModuleCall] = []
    count = draws.choice([1, 2, 6, 20])
    calls = [call for call in graph.calls if call.end > call.start + 1]
    for call in draws.sample(calls, len(calls)):
        if len(found) < count and all(
            call.end <= other.start or other.end <= call.start for other in found
        ):
            found.append(call)
    return sorted(found, key=lambda call: call.start)


def _drawn_choice(graph: StepGraph, call: ModuleCall, draws: Random) -> Choice:
    reruns = Choice(call.start, call.end, engine=RERUN)
    if draws.random() < 0.3 and may_rerun(graph, reruns):
        return reruns
    share = draws.choice([0.0, 0.2, 0.5, 0.8])
    kept = {
        storage
        for storage in sorted(made_in(graph, reruns))
        if draws.random() < share
        or graph.operators[graph.storages[storage].birth].must_keep
    }
    return Choice(call.start, call.end, frozenset(kept))
