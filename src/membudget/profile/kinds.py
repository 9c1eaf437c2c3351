"""Sort what is live at a step's peak into kinds, those of a sharded model included.

FSDP2 holds a part of each parameter. Around the forward and the backward of a block it
fills a buffer by an all-gather, copies the block's parameters out of it, and frees
both; the block's gradients are copied into the buffer of a reduce-scatter, whose result
is this rank's part:

    parameters ─copy─> buffer ─copy─> gathered parameters ─ the block ─> activations
    gradients <─ reduce-scatter ─ buffer <─copy─ unsharded gradients
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from membudget.graph import Kind, StepGraph, Storage
from membudget.planner.timeline import timeline

PeakKind = Literal[
    "parameters",
    "buffers",
    "inputs",
    "gathered parameters",
    "unsharded gradients",
    "gradients",
    "optimizer",
    "activations",
    "collectives' buffers",
    "workspace",
]
"""What bytes at a peak are for; activations are all that is of no other kind."""

KINDS: tuple[PeakKind, ...] = PeakKind.__args__  # type: ignore[attr-defined]

_OF_STORAGE: dict[Kind, PeakKind] = {
    "outside": "gathered parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
}
_INTO_BUFFER = "fsdp.chunk_cat"
COLLECTIVES = ("c10d.", "fsdp.")
"""How the names of the operators begin that DDP and FSDP communicate by."""


def peak_by_kind(graph: StepGraph) -> dict[PeakKind, int]:
    """Return the bytes of each kind that are live at a step's peak.

    They add up to the peak, what is in use before the step included.
    """
    static, moment = graph.static, timeline(graph).peak_moment
    sizes: Counter[PeakKind] = Counter(
        {
            "parameters": static.parameters,
            "buffers": static.buffers,
            "inputs": static.inputs,
            "optimizer": static.optimizer,
        }
    )
    if graph.operators:
        sizes["workspace"] = graph.operators[moment].workspace_bytes
    special = dict(_of_collectives(graph))
    for index, storage in enumerate(graph.storages):
        if 0 <= storage.birth <= moment < storage.death:
            sizes[_kind(graph, storage, special.get(index))] += storage.bytes
    return {kind: sizes[kind] for kind in KINDS if sizes[kind]}


def _kind(graph: StepGraph, storage: Storage, special: PeakKind | None) -> PeakKind:
    if graph.operators[storage.birth].phase == "optimizer":
        return "optimizer"
    return _OF_STORAGE.get(storage.kind) or special or "activations"


def _of_collectives(graph: StepGraph) -> Iterator[tuple[int, PeakKind]]:
    """Yield the storages that FSDP copies gradients from, and those it communicates."""
    for operator in graph.operators:
        if operator.name.startswith(COLLECTIVES):
            written = {graph.values[v].storage for v in operator.outputs}
            for value in operator.inputs:
                storage = graph.values[value].storage
                is_copied = operator.name.startswith(_INTO_BUFFER)
                is_gradient = is_copied and storage not in written
                kind = "unsharded gradients" if is_gradient else "collectives' buffers"
                yield storage, kind  # type: ignore[misc]
            yield from ((storage, "collectives' buffers") for storage in written)
