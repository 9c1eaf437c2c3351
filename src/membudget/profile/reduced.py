"""The step of all ranks of a process group: the most bytes, the slowest seconds.

Ranks that train one model run the same operators, on shards of other sizes, on batches
of other lengths, and at other speeds. A plan for all of them is made from one graph: it
has the live ranges of one rank's step, since threads of the process group free at any
time what they have sent, and of each number the largest of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from membudget.graph import Operator, StaticBytes, StepGraph

Most = Callable[[Sequence[int]], list[int]]
Slowest = Callable[[Sequence[float]], list[float]]


def places_of(graph: StepGraph) -> list[tuple[str, str, int]]:
    """Return what each operator of a step has in common with that of other ranks.

    That is its name, its module, and how many values it makes.
    """
    return [(o.name, o.module_path, len(o.outputs)) for o in graph.operators]


def reduced(graph: StepGraph, most: Most, slowest: Slowest) -> StepGraph:
    """Return the step of all ranks, given that of one.

    Args:
        graph: The step of this rank; `places_of` those of the others are the same.
        most: Returns the largest of all ranks' integers, place by place.
        slowest: The same for seconds.
    """
    numbers = iter(most(list(_numbers(graph))))
    seconds = slowest([operator.seconds for operator in graph.operators])
    values, storages = [*graph.values], [*graph.storages]
    operators = []
    for operator, of_all_s in zip(graph.operators, seconds, strict=True):
        operators.append(_operator(operator, numbers, of_all_s))
        for index in operator.outputs:
            value, size, stored = values[index], next(numbers), next(numbers)
            values[index] = replace(value, bytes=size)
            storage = storages[value.storage]
            storages[value.storage] = replace(storage, bytes=max(storage.bytes, stored))
    return replace(
        graph,
        operators=tuple(operators),
        values=tuple(values),
        storages=tuple(storages),
        static=StaticBytes(*(next(numbers) for _ in range(4))),
    )


def _numbers(graph: StepGraph) -> Iterator[int]:
    """Yield what `reduced` takes, in that order."""
    for o in graph.operators:
        yield from (o.flops, o.read_bytes, o.written_bytes, o.workspace_bytes)
        for value in (graph.values[index] for index in o.outputs):
            yield from (value.bytes, graph.storages[value.storage].bytes)
    static = graph.static
    yield from (static.parameters, static.buffers, static.inputs, static.optimizer)


def _operator(operator: Operator, numbers: Iterator[int], seconds: float) -> Operator:
    flops, read, written, workspace = (next(numbers) for _ in range(4))
    return replace(
        operator,
        flops=flops,
        read_bytes=read,
        written_bytes=written,
        workspace_bytes=workspace,
        seconds=seconds,
    )
