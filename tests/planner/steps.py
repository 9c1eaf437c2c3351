"""Small random steps with all that a bound must allow for, and their schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hypothesis import strategies as st

from membudget.graph import Operator, StepGraph, Storage
from membudget.planner.choice import RERUN, Block, Choice, Stage, made_in
from membudget.planner.second_run import may_rerun
from membudget.planner.simulate import Simulation, simulate
from tests.planner.drafts import Draft, operator


@st.composite
def steps(draw: st.DrawFn) -> StepGraph:
    """Draw a step with views, held and unasked tensors, workspaces and gradients."""
    draft = Draft()
    draft.run()
    known = [draft.outside()]
    used: set[int] = set()
    for _ in range(draw(st.integers(2, 7))):
        inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))
        used |= {draft.values[v].storage for v in inputs}
        free = [v for v in known[1:] if draft.values[v].storage not in used]
        kind = draw(st.sampled_from(["make", "make", "make", "view", "write"]))
        if kind == "view":
            outputs = [draft.view(inputs[0])]
        else:
            writes = [draw(st.sampled_from(free))] if kind == "write" and free else []
            count = 0 if writes else draw(st.integers(1, 2))
            outputs = draft.run(
                *inputs,
                makes=[draw(st.integers(0, 9)) for _ in range(count)],
                writes=writes,
                seconds=draw(st.integers(0, 9)) / 7,
                workspace=draw(st.sampled_from([0, 0, 1, 5])),
                must_keep=draw(st.integers(0, 7)) == 0,
            )
            known = [v for v in known if v not in writes]
        known += outputs
        candidates = sorted({*inputs, *outputs})
        # An operator's inputs are saved before its outputs.
        for value in sorted(draw(st.lists(st.sampled_from(candidates), max_size=3))):
            draft.save(value, is_asked=draw(st.integers(0, 4)) > 0)
            used.add(draft.values[value].storage)
        used |= {draft.values[v].storage for v in outputs if len(outputs) > 1}
        if draw(st.integers(0, 9)) == 0:
            draft.hold(outputs[0])
    return with_gradients(draw, draft.finish())


@st.composite
def longer_steps(draw: st.DrawFn) -> StepGraph:
    """Draw a step with more backward operators, which read what was unpacked."""
    graph = draw(steps())
    operators: list[Operator] = []
    places = [0]  # Of each operator, and of the end.
    for index, known in enumerate(graph.operators):
        operators.append(known)
        values = [s.value for s in graph.saved if index in s.asked]
        for _ in range(draw(st.integers(0, 2)) if values else 0):
            read = draw(st.lists(st.sampled_from(values), max_size=2))
            operators.append(replace(operator("backward", 0.5), inputs=tuple(read)))
        places.append(len(operators))
    storages = (
        replace(
            storage,
            birth=places[storage.birth] if storage.birth >= 0 else -1,
            death=places[storage.death],
            released=None if storage.released is None else places[storage.released],
        )
        for storage in graph.storages
    )
    saved = (
        replace(s, asked=tuple(places[i] for i in s.asked), freed=places[s.freed])
        for s in graph.saved
    )
    return replace(
        graph,
        operators=tuple(operators),
        storages=tuple(storages),
        saved=tuple(saved),
        optimizer_start=len(operators),
    )


def with_gradients(draw: st.DrawFn, graph: StepGraph) -> StepGraph:
    """Return the step with storages that the backward makes."""
    count = len(graph.operators)
    made = []
    for _ in range(draw(st.integers(0, 3))):
        birth = draw(st.integers(graph.backward_start, count - 1))
        death = draw(st.integers(birth + 1, count))
        size = draw(st.integers(1, 9))
        made.append(Storage(size, "gradient", "", birth, death, None))
    return replace(graph, storages=(*graph.storages, *made))


def subsets(members: Iterable[int]) -> Iterator[frozenset[int]]:
    """Yield every subset, the small ones first."""
    chosen = list(members)
    for count in range(len(chosen) + 1):
        yield from map(frozenset, itertools.combinations(chosen, count))


def every_schedule(
    graph: StepGraph, borders: list[int], always: frozenset[int] = frozenset()
) -> list[Simulation]:
    """Simulate every choice of storages, with regions between the borders.

    Schedules that run a pinned operator again are left out; `always` is kept by all.
    """
    cuts = list(itertools.pairwise(borders))
    saved = {graph.values[s.value].storage for s in graph.saved}
    own = [
        s
        for s, storage in enumerate(graph.storages)
        if storage.birth >= 0 and s in saved and s not in always
    ]
    found = []
    for kept in subsets(own[:9]):
        rest = kept | always | frozenset(own[9:])
        found.append(simulate(graph, [Choice(a, b, rest) for a, b in cuts if a < b]))
    return [s for s in found if runs_nothing_pinned(graph, s)]


def runs_nothing_pinned(graph: StepGraph, simulation: Simulation) -> bool:
    """Return whether no operator that must not run again does so."""
    return not any(graph.operators[i].must_keep for i in simulation.recomputed)


def read_across(graph: StepGraph, borders: list[int]) -> frozenset[int]:
    """Return what one region makes and a later one reads."""
    return frozenset(
        graph.values[value].storage
        for end in borders
        for operator in graph.operators[end : graph.backward_start]
        for value in operator.inputs
        if graph.storages[graph.values[value].storage].birth < end
    )


@st.composite
def schedules(draw: st.DrawFn, graph: StepGraph) -> list[Choice]:
    """Draw regions with any engine, any kept storages and any stages."""
    end = graph.backward_start
    borders = sorted({0, end, *draw(st.lists(st.integers(0, end), max_size=2))})
    return [draw(_choices(graph, Block(a, b))) for a, b in itertools.pairwise(borders)]


@st.composite
def _choices(draw: st.DrawFn, graph: StepGraph, block: Block) -> Choice:
    made = sorted(made_in(graph, block))
    some = st.frozensets(st.sampled_from(made)) if made else st.just(frozenset[int]())
    if may_rerun(graph, block) and draw(st.integers(0, 3)) == 0:
        return Choice(block.start, block.end, engine=RERUN)
    kept = draw(some)
    inside = st.integers(block.start + 1, block.end)
    starts = sorted(draw(st.sets(inside, max_size=3)) - {block.end})
    stages = [Stage(s, draw(some) - kept) for s in [block.start, *starts]]
    return Choice(block.start, block.end, kept, tuple(stages) if starts else ())
