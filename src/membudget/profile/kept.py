"""The activations that autograd keeps for the backward, with their origin.

A storage counts once, for the first that kept it. What was there before the step
(parameters, the batch) is kept without a byte more, and is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

from membudget.graph import StepGraph


@dataclass(frozen=True, slots=True)
class SavedActivation:
    """A storage that autograd keeps from the forward for the backward.

    Attributes:
        storage: Its index.
        bytes: Of the storage.
        module_path: The module whose forward kept it first.
        line: The user's line in it.
        operator: What kept it, such as `"aten.gelu.default"`.
        shape: Of the tensor that was kept.
        dtype: Likewise.
    """

    storage: int
    bytes: int
    module_path: str
    line: str
    operator: str
    shape: tuple[int, ...]
    dtype: str


def saved_activations(graph: StepGraph) -> tuple[SavedActivation, ...]:
    """Return what autograd holds when the backward begins, the largest first."""
    found: dict[int, SavedActivation] = {}
    for saved in graph.saved:
        value = graph.values[saved.value]
        storage = graph.storages[value.storage]
        is_for_backward = saved.freed > graph.backward_start
        if storage.birth < 0 or not is_for_backward or value.storage in found:
            continue
        found[value.storage] = SavedActivation(
            storage=value.storage,
            bytes=storage.bytes,
            module_path=saved.module_path,
            line=saved.line,
            operator=graph.operators[saved.moment].name,
            shape=value.shape,
            dtype=value.dtype,
        )
    return tuple(sorted(found.values(), key=lambda item: (-item.bytes, item.storage)))
