"""Move gradients that autograd adds in place to the storages of an unrecorded step.

Without a dispatch mode, autograd works in place in two cases: it adds a gradient to
another one whose storage nothing else holds, and it writes the gradient of `x[index]`
into new zeros. Under the recorder's dispatch mode, autograd allocates a new tensor
instead. The result of an addition or indexed write therefore moves to its first
operand's storage, if the operand is not a view and dies at the operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from membudget.graph import Value
from membudget.profile.lifetimes import Lifetimes, RecordedOperator
from membudget.profile.step_recorder import StepRecorder


def add_in_place(recorder: StepRecorder) -> None:
    """Move accumulated gradients to the storages that an unrecorded step would use."""
    values = recorder.lifetimes.values
    values_on = _by_storage(values)
    last_sum: dict[int, int] = {}
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
        if _can_take(recorder.lifetimes, older, made, index, last_sum):
            last_sum[older.storage] = index
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


def _can_take(
    lifetimes: Lifetimes,
    older: Value,
    made: Value,
    moment: int,
    last_sum: dict[int, int],
) -> bool:
    old, new = lifetimes.storages[older.storage], lifetimes.storages[made.storage]
    return (
        # Not a view: made with its storage, or by the last sum moved there.
        older.operator in (old.birth, last_sum.get(older.storage))
        and old.birth >= 0
        and old.death == moment + 1
        and new.birth == moment
        and old.bytes == new.bytes
    )


def _merge(lifetimes: Lifetimes, target: int, made: int, moved: list[int]) -> None:
    """Move the values of one storage, whose indices are `moved`, to another."""
    old, new = lifetimes.storages[target], lifetimes.storages[made]
    old.death, old.kind, old.name = new.death, new.kind, new.name
    new.bytes, new.kind, new.name = 0, "activation", ""
    for index in moved:
        lifetimes.values[index] = replace(lifetimes.values[index], storage=target)
