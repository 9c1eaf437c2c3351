"""Give gradients the memory that they have in an unrecorded step.

Without a dispatch mode, autograd works in place in two cases: it adds a gradient to
another one whose storage nothing else holds, and it writes the gradient of `x[index]`
into new zeros. Under the recorder's dispatch mode, autograd allocates a new tensor
instead. The result of an addition or indexed write therefore moves to its first
operand's storage, if the operand is not a view and dies at the operator.

A gradient that is zero everywhere, as of `sgn`, claims bytes that nobody allocates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import Value
from membudget.ops import facts_of
from membudget.profile.lifetimes import Lifetimes, RecordedOperator
from membudget.profile.step_recorder import StepRecorder

_ZEROS = "aten._efficientzerotensor.default"


def without_memory(recorder: StepRecorder) -> None:
    """Let gradients that are zero everywhere take no bytes."""
    for operator in recorder.operators:
        if str(operator.operator) == _ZEROS:
            for value in operator.outputs:
                storage = recorder.lifetimes.values[value].storage
                recorder.lifetimes.storages[storage].bytes = 0


def add_in_place(recorder: StepRecorder) -> None:
    """Move accumulated gradients to the storages that an unrecorded step would use."""
    values = recorder.lifetimes.values
    values_on = _by_storage(values)
    for index, operator in enumerate(recorder.operators):
        if operator.phase != "backward" or operator.node is None:
            continue
        name = str(operator.operator)
        # Only sums at which two nodes meet are autograd's; others are a formula's own.
        is_sum = name == "aten.add.Tensor" and len(operator.inputs) == 2
        if is_sum and not _meets_another_node(recorder, operator):
            continue
        if not is_sum and name != "aten.index_put.default":
            continue
        made, older = values[operator.outputs[0]], values[operator.inputs[0]]
        if _can_take(recorder, older, made, index):
            moved = values_on.pop(made.storage)
            values_on[older.storage] += moved
            _merge(recorder.lifetimes, older.storage, made.storage, moved)


def _by_storage(values: Sequence[Value]) -> defaultdict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for index, value in enumerate(values):
        found[value.storage].append(index)
    return found


def _meets_another_node(recorder: StepRecorder, operator: RecordedOperator) -> bool:
    """Return whether an addition sums the gradients from two autograd nodes."""
    nodes = []
    for position in operator.inputs:
        producer = recorder.lifetimes.values[position].operator
        nodes.append(recorder.operators[producer].node if producer >= 0 else None)
    return nodes[0] != nodes[1] and operator.node in nodes


def _can_take(recorder: StepRecorder, older: Value, made: Value, moment: int) -> bool:
    """Return whether the storage of an operand takes what an operator makes."""
    storages = recorder.lifetimes.storages
    old, new = storages[older.storage], storages[made.storage]
    return (
        old.birth >= 0
        and old.death == moment + 1
        and new.birth == moment
        and old.bytes == new.bytes
        and (older.operator == old.birth or _is_written_whole(recorder, older))
    )


def _is_written_whole(recorder: StepRecorder, value: Value) -> bool:
    """Return whether an operator has written a value to a whole storage in place."""
    if value.operator < 0:  # No operator has made this alias.
        return False
    facts = facts_of(recorder.operators[value.operator].operator)
    is_view = facts is None or facts.is_view
    return (
        not is_view and value.bytes == recorder.lifetimes.storages[value.storage].bytes
    )


def _merge(lifetimes: Lifetimes, target: int, made: int, moved: list[int]) -> None:
    """Move the values of one storage, whose indices are `moved`, to another."""
    old, new = lifetimes.storages[target], lifetimes.storages[made]
    old.death, old.kind, old.name = new.death, new.kind, new.name
    new.bytes, new.kind, new.name = 0, "activation", ""
    for index in moved:
        lifetimes.values[index] = replace(lifetimes.values[index], storage=target)
