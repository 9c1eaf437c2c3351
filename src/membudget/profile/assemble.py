"""Build the `StepGraph` of a recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from membudget.graph import (
    Operator,
    Saved,
    StaticBytes,
    StepGraph,
    Storage,
    Value,
)
from membudget.ops import decides, facts_of
from membudget.profile.lifetimes import RecordedOperator, RecordedStorage
from membudget.profile.step_recorder import StepRecorder


def assemble(recorder: StepRecorder, optimizer_bytes: int) -> StepGraph:
    """Return the recorded step as a graph.

    Args:
        recorder: The recorder of the step; it must not be used afterwards.
        optimizer_bytes: Bytes of the optimizer's state.

    Returns:
        The graph, with each operator's seconds in the recorded run.
    """
    _add_in_place(recorder)
    count = len(recorder.operators)
    phases = [operator.phase for operator in recorder.operators]
    return StepGraph(
        operators=tuple(_operator(recorder, o) for o in recorder.operators),
        values=tuple(recorder.lifetimes.values),
        storages=tuple(_storage(s, count) for s in recorder.lifetimes.storages),
        saved=tuple(
            Saved(
                s.value,
                s.moment,
                tuple(s.asked),
                count if s.freed is None else s.freed,
                *s.place,
            )
            for s in recorder.saved
        ),
        calls=tuple(recorder.calls),
        backward_start=_first(phases, ("backward", "optimizer")),
        optimizer_start=_first(phases, ("optimizer",)),
        static=_static(recorder.lifetimes.storages, optimizer_bytes),
    )


def _first(phases: Sequence[str], wanted: Sequence[str]) -> int:
    return next((i for i, p in enumerate(phases) if p in wanted), len(phases))


def _add_in_place(recorder: StepRecorder) -> None:
    """Move accumulated gradients to the storages that the plain step uses.

    Without a dispatch mode autograd works in place in two cases: it adds one gradient
    into another if nothing else holds that one's storage, and it writes the gradient of
    `x[index]` into new zeros. Under the recorder's dispatch mode it does neither. So
    the result of such an operator is moved to the storage of its first operand, if that
    is not a view and dies there.
    """
    last_sum: dict[int, int] = {}
    for index, operator in enumerate(recorder.operators):
        if operator.phase != "backward" or operator.node is None:
            continue
        name = str(operator.operator)
        is_sum = name == "aten.add.Tensor" and len(operator.inputs) == 2
        if is_sum and not _meets_another_node(recorder, operator):
            continue
        if not is_sum and name != "aten.index_put.default":
            continue
        made = recorder.lifetimes.values[operator.outputs[0]]
        older = recorder.lifetimes.values[operator.inputs[0]]
        if _can_take(recorder, older, made, index, last_sum.get(older.storage)):
            last_sum[older.storage] = index
            _merge(recorder, older.storage, made.storage)


def _meets_another_node(recorder: StepRecorder, operator: RecordedOperator) -> bool:
    nodes = []
    for position in operator.inputs:
        producer = recorder.lifetimes.values[position].operator
        nodes.append(recorder.operators[producer].node if producer >= 0 else None)
    return nodes[0] != nodes[1] and operator.node in nodes


def _can_take(
    recorder: StepRecorder,
    older: Value,
    made: Value,
    moment: int,
    last_sum: int | None,
) -> bool:
    old, new = (
        recorder.lifetimes.storages[older.storage],
        recorder.lifetimes.storages[made.storage],
    )
    return (
        older.operator in (old.birth, last_sum)
        and old.birth >= 0
        and old.death == moment + 1
        and new.birth == moment
        and old.bytes == new.bytes
    )


def _merge(recorder: StepRecorder, target: int, made: int) -> None:
    old, new = recorder.lifetimes.storages[target], recorder.lifetimes.storages[made]
    old.death, old.kind, old.name = new.death, new.kind, new.name
    new.bytes, new.kind, new.name = 0, "activation", ""
    values = recorder.lifetimes.values
    for index, value in enumerate(values):
        if value.storage == made:
            values[index] = replace(value, storage=target)


def _operator(recorder: StepRecorder, recorded: RecordedOperator) -> Operator:
    facts = facts_of(recorded.operator)
    is_view = facts is not None and (
        facts.is_view or _makes_nothing(recorder, recorded)
    )
    return Operator(
        name=str(recorded.operator),
        phase=recorded.phase,
        module_path=recorded.place[0],
        line=recorded.place[1],
        # `empty_like(x)` reads only the shape of x.
        inputs=() if facts is not None and facts.is_empty else tuple(recorded.inputs),
        outputs=tuple(recorded.outputs),
        flops=recorded.flops,
        read_bytes=0 if is_view else _bytes(recorder, recorded.inputs),
        written_bytes=0 if is_view else _bytes(recorder, recorded.outputs),
        workspace_bytes=recorded.workspace_bytes,
        seconds=recorded.nanoseconds * 1e-9,
        is_view=is_view,
        is_random=facts is not None and facts.is_random,
        is_pinned=facts is None
        or facts.is_opaque
        or facts.is_routing
        or decides(
            facts,
            _dtypes(recorder, recorded.inputs),
            _dtypes(recorder, recorded.outputs),
        ),
    )


def _dtypes(recorder: StepRecorder, values: Sequence[int]) -> list[Any]:
    return [getattr(torch, recorder.lifetimes.values[v].dtype) for v in values]


def _makes_nothing(recorder: StepRecorder, recorded: RecordedOperator) -> bool:
    """Tell whether all outputs share memory with inputs, and nothing was written."""
    if not recorded.outputs or recorded.operator._schema.is_mutable:
        return False
    read = {recorder.lifetimes.values[i].storage for i in recorded.inputs}
    return all(recorder.lifetimes.values[i].storage in read for i in recorded.outputs)


def _bytes(recorder: StepRecorder, values: Sequence[int]) -> int:
    largest: dict[int, int] = {}
    for index in values:
        value = recorder.lifetimes.values[index]
        largest[value.storage] = max(largest.get(value.storage, 0), value.bytes)
    return sum(largest.values())


def _storage(recorded: RecordedStorage, count: int) -> Storage:
    death = count if recorded.death is None else recorded.death
    released = recorded.released
    if released is not None and released >= death:
        released = None
    return Storage(
        recorded.bytes, recorded.kind, recorded.name, recorded.birth, death, released
    )


def _static(storages: Sequence[RecordedStorage], optimizer_bytes: int) -> StaticBytes:
    def total(*kinds: str) -> int:
        return sum(s.bytes for s in storages if s.kind in kinds and s.birth < 0)

    return StaticBytes(
        parameters=total("parameter"),
        buffers=total("buffer"),
        inputs=total("input"),
        optimizer=optimizer_bytes,
    )
