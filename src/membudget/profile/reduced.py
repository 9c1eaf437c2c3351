"""The step of all ranks of a process group: the most bytes, the slowest seconds.

Ranks that train one model run the same operators, on shards of other sizes, on batches
of other lengths, and at other speeds. A plan for all of them is made from one graph,
in which each number is the largest of all ranks: a storage is born as early and dies as
late as on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256

from membudget.graph import Operator, Saved, StaticBytes, StepGraph, Storage

_NEVER = 1 << 62
"""The moment at which a storage is released that something holds until its death."""

Most = Callable[[Sequence[int]], list[int]]
Slowest = Callable[[Sequence[float]], list[float]]


def structure_of(graph: StepGraph) -> str:
    """Return a digest of all in a step that is no number of bytes or seconds."""
    found = sha256()
    for o in graph.operators:
        # Not the inputs: each rank takes its own part of what is scattered.
        found.update(f"{o.name} {o.phase} {o.module_path} {o.outputs}".encode())
        found.update(f"{o.is_view} {o.must_keep}\n".encode())
    for v in graph.values:
        found.update(f"{v.storage} {v.dtype} {v.operator} {v.output}\n".encode())
    for s in graph.storages:
        found.update(f"{s.kind} {s.name} {s.birth < 0}\n".encode())
    for saved in graph.saved:
        found.update(f"{saved.value} {saved.moment} {len(saved.asked)}\n".encode())
    found.update(repr(graph.calls).encode())
    return found.hexdigest()


def reduced(graph: StepGraph, most: Most, slowest: Slowest) -> StepGraph:
    """Return the step of all ranks, given that of one.

    Args:
        graph: The step of this rank; that of each other has the same structure.
        most: Returns the largest of all ranks' integers, place by place.
        slowest: The same for seconds.
    """
    numbers = iter(most(list(_numbers(graph))))
    seconds = iter(slowest([operator.seconds for operator in graph.operators]))
    return replace(
        graph,
        operators=tuple(_operator(o, numbers, seconds) for o in graph.operators),
        values=tuple(replace(v, bytes=next(numbers)) for v in graph.values),
        storages=tuple(_storage(s, numbers) for s in graph.storages),
        saved=tuple(_saved(s, numbers) for s in graph.saved),
        static=StaticBytes(*(next(numbers) for _ in range(4))),
    )


def _numbers(graph: StepGraph) -> Iterator[int]:
    """Yield what `reduced` takes, in that order."""
    for o in graph.operators:
        yield from (o.flops, o.read_bytes, o.written_bytes, o.workspace_bytes)
    yield from (value.bytes for value in graph.values)
    for s in graph.storages:
        # The earliest birth is the largest of the negative ones.
        yield from (s.bytes, -s.birth, s.death)
        yield _NEVER if s.released is None else s.released
    for saved in graph.saved:
        yield from (saved.freed, *saved.asked)
    static = graph.static
    yield from (static.parameters, static.buffers, static.inputs, static.optimizer)


def _operator(
    operator: Operator, numbers: Iterator[int], seconds: Iterator[float]
) -> Operator:
    flops, read, written, workspace = (next(numbers) for _ in range(4))
    return replace(
        operator,
        flops=flops,
        read_bytes=read,
        written_bytes=written,
        workspace_bytes=workspace,
        seconds=next(seconds),
    )


def _storage(storage: Storage, numbers: Iterator[int]) -> Storage:
    size, born, death, released = (next(numbers) for _ in range(4))
    return replace(
        storage,
        bytes=size,
        birth=-born,
        death=death,
        released=None if released == _NEVER else released,
    )


def _saved(saved: Saved, numbers: Iterator[int]) -> Saved:
    freed = next(numbers)
    return replace(saved, freed=freed, asked=tuple(next(numbers) for _ in saved.asked))
