"""Hypothesis strategy: steps whose numbers fit together, as those of a recorder do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from membudget.graph import (
    Operator,
    Phase,
    Saved,
    StaticBytes,
    StepGraph,
    Storage,
    Value,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]

PATHS = ("", "a", "a.b", "h.0", "h.0.x", "h.1", "h.1.x", "h.2", "head")
SIZES = st.sampled_from([0, 1, 2, 8, 1 << 20, 10**12]) | st.integers(0, 1000)


@st.composite
def steps(draw: Draw) -> StepGraph:
    """Draw a step of up to a dozen operators."""
    counts = [draw(st.integers(low, 5)) for low in (0, 0, 0)]
    phases: list[Phase] = ["forward"] * counts[0]
    phases += ["backward"] * counts[1]
    phases += ["optimizer"] * counts[2]
    storages = [
        Storage(draw(SIZES), "parameter", name, -1, len(phases), None)
        for name in draw(st.sets(st.sampled_from(["w", "a.w", "h.0.x.w", "h.1.x.w"])))
    ]
    values = [Value(i, s.bytes, (), "", -1, 0) for i, s in enumerate(storages)]
    operators = []
    for moment, phase in enumerate(phases):
        inputs: tuple[int, ...] = ()
        if values:
            known = st.sampled_from(range(len(values)))
            inputs = tuple(draw(st.lists(known, max_size=3)))
        made = [_storage(draw, moment, phases) for _ in range(draw(st.integers(0, 2)))]
        first = len(values)
        for output, storage in enumerate(made):
            index = len(storages)
            storages.append(storage)
            shape = (storage.bytes,)
            values.append(Value(index, storage.bytes, shape, "uint8", moment, output))
        outputs = range(first, len(values))
        operators.append(_operator(draw, phase, inputs, tuple(outputs)))
    return StepGraph(
        operators=tuple(operators),
        values=tuple(values),
        storages=tuple(storages),
        saved=tuple(_saved(draw, values, counts[0], len(phases))),
        calls=(),
        backward_start=counts[0],
        optimizer_start=counts[0] + counts[1],
        static=StaticBytes(sum(s.bytes for s in storages if s.birth < 0), 1, 2, 3),
    )


def _storage(draw: Draw, moment: int, phases: list[Phase]) -> Storage:
    death = draw(st.integers(moment + 1, len(phases)))
    kind = draw(st.sampled_from(["activation", "activation", "gradient"]))
    is_gradient = kind == "gradient" and phases[moment] == "backward"
    released = None
    if phases[moment] == "forward" and draw(st.booleans()):
        released = draw(st.integers(moment + 1, phases.count("forward")))
    name = draw(st.sampled_from(["w", "a.w", "h.0.x.w"])) if is_gradient else ""
    return Storage(
        bytes=draw(SIZES),
        kind="gradient" if is_gradient else "activation",
        name=name,
        birth=moment,
        death=death,
        released=None if released is None or released >= death else released,
    )


def _operator(
    draw: Draw, phase: Phase, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> Operator:
    return Operator(
        name=draw(st.sampled_from(["aten.mm.default", "aten.relu.default"])),
        phase=phase,
        module_path="" if phase == "optimizer" else draw(st.sampled_from(PATHS)),
        line=draw(st.sampled_from(["", "model.py:3"])),
        inputs=inputs,
        outputs=outputs,
        flops=draw(SIZES),
        read_bytes=0,
        written_bytes=0,
        workspace_bytes=draw(st.sampled_from([0, 0, 7])),
        seconds=draw(st.sampled_from([0.0, 0.1, 3e-7])),
        is_view=False,
        is_random=False,
        must_keep=False,
    )


def _saved(draw: Draw, values: list[Value], forward: int, count: int) -> list[Saved]:
    if not (values and forward):
        return []
    saved = []
    for index in draw(st.lists(st.sampled_from(range(len(values))), max_size=5)):
        moment = draw(st.integers(0, forward - 1))
        if values[index].operator <= moment:
            path = draw(st.sampled_from(PATHS))
            freed = draw(st.integers(moment + 1, count))
            saved.append(Saved(index, moment, (), freed, path, "model.py:3"))
    return saved
