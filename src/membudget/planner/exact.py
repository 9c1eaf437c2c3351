"""The fastest schedule of a step within a budget, with a proof or a bound.

The problem: planners that are quick search a part of all schedules. This one hands all
of them to an integer programme (`milp`, after Checkmate, Jain et al. 2020; `alive`
says what fits) and lets HiGHS search: one region spans the whole forward, with a stage
for each operator that saved something, so that

    kept    = what stays from the forward
    held[g] = what was made again and is there when the stage after g begins

is any schedule that the engine can run. It takes seconds for tens of operators, minutes
for a hundred, and is refused for many more. The simulation has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from membudget.graph import StepGraph
from membudget.planner.alive import Room
from membudget.planner.makers import Problem, reduced
from membudget.planner.milp import Choices
from membudget.planner.programme import Answer
from membudget.planner.regions import Region, Stage
from membudget.planner.simulate import Simulation, simulate

MOST_VARIABLES = 60_000
"""A programme with more is refused: even its relaxation would take minutes."""

_MARGIN = 2e-6
"""The part of the budget by which the solver may take a row to be met that is not."""

Status = Literal["optimal", "feasible", "infeasible", "unknown", "too large"]


@dataclass(frozen=True)
class Exact:
    """What the search found.

    Attributes:
        status: `"optimal"`: no schedule is faster by more than `programme.GAP`.
            `"feasible"`: one was found; the time was up before the proof.
            `"infeasible"`: none fits; with an incumbent: none that is faster fits.
            `"unknown"`: none was found in the time. `"too large"`: it was not tried.
        region: The schedule; `None` without one.
        simulation: What comes of it.
        seconds: What runs again takes.
        bound_s: No schedule that fits runs operators again for less.
        gap: How far the schedule may be above the bound, as a part of it.
        variables: Of the programme.
    """

    status: Status
    region: Region | None
    simulation: Simulation | None
    seconds: float
    bound_s: float
    variables: int

    @property
    def gap(self) -> float:
        """The part of the seconds that a faster schedule may save at most."""
        if self.region is None:
            return float("inf")
        return 1 - self.bound_s / self.seconds if self.seconds else 0.0


def exact(
    graph: StepGraph,
    budget_bytes: int,
    limit_s: float,
    incumbent_s: float | None = None,
) -> Exact:
    """Find the schedule that runs operators again for the fewest seconds.

    Args:
        graph: The plain step.
        budget_bytes: For what the step allocates, as in `Simulation.peak_bytes`.
        limit_s: How long to look.
        incumbent_s: What a schedule that is known takes more than the plain step: only
            faster ones are looked for.

    Raises:
        MissingExtraError: If SciPy is not installed.
    """
    problem = reduced(graph)
    unit_s = graph.seconds or 1.0
    choices = Choices(problem, unit_s)
    programme = choices.programme
    if programme.size > MOST_VARIABLES:
        return _without("too large", 0.0, programme.size)
    choices.add_rules()
    Room(graph, choices, budget_bytes).add_rows()
    if incumbent_s is not None:
        programme.at_most(programme.cost, incumbent_s / unit_s)
    answer = programme.solve(limit_s)
    return _read(graph, choices, answer, budget_bytes)


def _without(status: Status, bound_s: float, variables: int) -> Exact:
    return Exact(status, None, None, float("inf"), bound_s, variables)


def _read(
    graph: StepGraph, choices: Choices, answer: Answer, budget_bytes: int
) -> Exact:
    unit_s = graph.seconds or 1.0
    bound_s = answer.bound * unit_s
    size = choices.programme.size
    if answer.status in ("infeasible", "unknown"):
        return _without(answer.status, bound_s, size)
    region = _region(graph, choices, answer)
    simulation = simulate(graph, [region])
    if simulation.peak_bytes > budget_bytes:
        return _without("unknown", bound_s, size)
    return Exact(answer.status, region, simulation, simulation.seconds - graph.seconds, bound_s, size)


def _region(graph: StepGraph, choices: Choices, answer: Answer) -> Region:
    problem = choices.problem
    chosen = {v for v, value in enumerate(answer.values) if value > 0.5}
    kept = {s for s, v in choices.kept.items() if v in chosen}
    there = _needed(choices, chosen)
    held: dict[int, set[int]] = {}
    for stage in choices.stages:
        of_stage = held.setdefault(problem.demands[stage.start].stage, set())
        of_stage |= there[stage.stop]
    stages = [Stage(start, frozenset(held[start])) for start in sorted(held)]
    return Region(0, graph.backward_start, problem.always | kept, tuple(stages))


def _needed(choices: Choices, chosen: set[int]) -> list[set[int]]:
    """Return what each demand finds held of use; nothing for the end."""
    problem = choices.problem
    found: list[set[int]] = [set()]
    for d in range(len(problem.demands) - 1, -1, -1):
        held = {s for e, s in choices.held if e == d and choices.held[e, s] in chosen}
        used = {problem.demands[d].item}
        for k in choices.runs[d]:
            if choices.run[d, k] in chosen:
                used.update(problem.makers[k].reads)
        found.append(held & (used | found[-1]))
    return found[::-1]
