"""The fastest schedule of a step within a budget, with a proof or a bound.

The problem: planners that are quick search a part of all schedules. This one hands all
of them to an integer programme (`milp`, after Checkmate, Jain et al. 2020; `alive`
says what fits) and lets HiGHS search. One region spans the forward, with a stage for
each operator that saved something, so that

    kept    = what stays from the forward
    held[g] = what was made again and is there when the stage after g begins

is any schedule that the engine can run. A hundred operators take a minute; a thousand
are refused. Simulation has the word: where an answer takes more than was given, which
the solver's tolerance allows, it is asked again for as much less.

What is called optimal is so among the schedules of these stages that make nothing
before it is asked for. Rarely, another division into stages is faster: a test that is
expected to fail has one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from membudget.graph import StepGraph
from membudget.planner.choice import Choice, Stage
from membudget.planner.simulate import Simulation, simulate
from tests.oracles.alive import Room
from tests.oracles.milp import Choices
from tests.oracles.problem import Problem, reduced
from tests.oracles.programme import GAP, Answer

MOST_VARIABLES = 40_000
"""A programme with more is refused: its relaxation alone would take minutes."""

_MOST_TRIES = 3

Status = Literal["optimal", "feasible", "infeasible", "unknown", "too large"]


@dataclass(frozen=True)
class Exact:
    """What the search found.

    Attributes:
        status: `"optimal"`: no schedule of those above saves more than the part
            `programme.GAP` of the seconds. `"feasible"`: the time was up before the
            proof. `"infeasible"`: nothing fits; with an incumbent: nothing that is
            faster fits. `"unknown"`: nothing was found. `"too large"`: it was not
            tried.
        region: The schedule; `None` without one.
        simulation: What comes of it.
        seconds: What runs again takes; infinite without a schedule.
        bound_s: What runs again takes no less in any of those schedules that fits.
        variables: Of the programme.
    """

    status: Status
    region: Choice | None
    simulation: Simulation | None
    seconds: float
    bound_s: float
    variables: int

    @property
    def gap(self) -> float:
        """The part of the seconds that another of those schedules may save at most."""
        if self.region is None:
            return 1.0
        return 1 - self.bound_s / self.seconds if self.seconds else 0.0


def exact(
    graph: StepGraph,
    budget_bytes: int,
    limit_s: float,
    incumbent_s: float = float("inf"),
    region: Choice | None = None,
) -> Exact:
    """Find the schedule that runs operators again for the fewest seconds.

    Args:
        graph: The plain step.
        budget_bytes: For what the step allocates, as in `Simulation.peak_bytes`.
        limit_s: How long to look.
        incumbent_s: What runs again takes in a schedule that is known: only those are
            looked for that take no more.
        region: What is gone back through; the whole forward if `None`.
    """
    whole = region or Choice(0, graph.backward_start)
    problem, end = reduced(graph, whole), time.monotonic() + limit_s
    inner_bytes = budget_bytes
    first: Exact | None = None
    for _ in range(_MOST_TRIES):
        found = _search(graph, problem, inner_bytes, end, (incumbent_s, whole))
        first = first or found
        if found.simulation is None:
            break
        over_bytes = found.simulation.peak_bytes - budget_bytes
        if over_bytes <= 0:
            return found if found is first else _again(found, first.bound_s)
        inner_bytes -= over_bytes
    if found is first and found.region is None:
        return found
    return _nothing("unknown", first.bound_s if first else 0.0, found.variables)


def _again(found: Exact, bound_s: float) -> Exact:
    """Return what was found within less, beside the bound for what was given."""
    is_optimal = found.seconds * (1 - GAP) <= bound_s
    status: Status = "optimal" if is_optimal else "feasible"
    return replace(found, status=status, bound_s=min(bound_s, found.seconds))


def _nothing(status: Status, bound_s: float, variables: int) -> Exact:
    return Exact(status, None, None, float("inf"), bound_s, variables)


def _search(
    graph: StepGraph,
    problem: Problem,
    budget_bytes: int,
    end: float,
    known: tuple[float, Choice],
) -> Exact:
    incumbent_s, whole = known
    unit_s = graph.seconds or 1.0
    choices = Choices(problem, unit_s)
    programme = choices.programme
    if programme.size > MOST_VARIABLES:
        return _nothing("too large", 0.0, programme.size)
    choices.add_rules()
    Room(graph, choices, budget_bytes).add_rows()
    if incumbent_s < float("inf"):
        programme.at_most(programme.cost, incumbent_s / unit_s)
    answer = programme.solve(max(0.0, end - time.monotonic()))
    bound_s = min(answer.bound * unit_s, incumbent_s)
    if answer.status in ("infeasible", "unknown"):
        return _nothing(answer.status, bound_s, programme.size)
    region = _fewer_stages(graph, _region(whole, choices, answer))
    simulation = simulate(graph, [region])
    seconds = sum(graph.operators[index].seconds for index in simulation.recomputed)
    # The solver's bound may be above its answer by as much as it rounds.
    bound_s = min(bound_s, seconds)
    return Exact(answer.status, region, simulation, seconds, bound_s, programme.size)


def _region(whole: Choice, choices: Choices, answer: Answer) -> Choice:
    """Return the schedule that an answer means."""
    problem = choices.problem
    chosen = {v for v, value in enumerate(answer.values) if value > 0.5}
    kept = {s for s, v in choices.kept.items() if v in chosen}
    there = _found_held(choices, chosen)
    held: dict[int, set[int]] = {}
    for stage in choices.stages:
        of_stage = held.setdefault(problem.demands[stage.start].stage, set())
        of_stage |= there[stage.stop]
    for start, moments in problem.idle.items():
        of_stage = held.setdefault(start, set())
        for moment in moments:
            of_stage |= there[sum(d.moment <= moment for d in problem.demands)]
    stages = tuple(Stage(start, frozenset(held[start])) for start in sorted(held))
    return Choice(whole.start, whole.end, problem.always | kept, stages)


def _found_held(choices: Choices, chosen: set[int]) -> list[set[int]]:
    """Return what each demand finds held that it, or a later one, needs."""
    demands, makers = choices.problem.demands, choices.problem.makers
    found: list[set[int]] = [set()]
    for d in range(len(demands) - 1, -1, -1):
        held = {s for (e, s), v in choices.held.items() if e == d and v in chosen}
        used = {demands[d].item}
        for k in choices.runs[d]:
            if choices.run[d, k] in chosen:
                used.update(makers[k].reads)
        found.append(held & (used | found[-1]))
    return found[::-1]


def _fewer_stages(graph: StepGraph, region: Choice) -> Choice:
    """Join neighbouring stages where the same runs again, within no more bytes."""
    before = simulate(graph, [region])
    for stage in region.stages[1:]:
        # What the later stage of the two held for the earlier one, that needs anyway.
        stages = tuple(other for other in region.stages if other != stage)
        joined = replace(region, stages=stages)
        after = simulate(graph, [joined])
        is_same = after.recomputed == before.recomputed
        if is_same and after.peak_bytes <= before.peak_bytes:
            region = joined
    return region
