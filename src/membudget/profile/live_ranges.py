"""Live ranges of a recorded step: what autograd saves, and what is live at the peak.

    birth                 drop_start                last
      ├─ the forward holds it ─┼─ only autograd holds it ─┤ freed

A region can drop a saved storage from `drop_start` on. Pure functions over a
`StepGraph`; nothing here needs torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from membudget.graph import Operator, Phase, Saved, StepGraph, Storage, Value
from membudget.planner.simulate import timeline

Group = Literal[
    "gradients", "saved activations", "temporaries", "optimizer state", "workspace"
]


@dataclass(frozen=True, slots=True)
class SavedActivation:
    """A storage that autograd saves in the forward for the backward pass.

    Attributes:
        storage: Its index.
        bytes: Its size.
        module_path: The module whose forward saved it first.
        line: The user's line in that forward.
        operator: The operator that saved it, such as `"aten.gelu.default"`.
        shape: Shape of the saved tensor.
        dtype: Dtype of the saved tensor.
    """

    storage: int
    bytes: int
    module_path: str
    line: str
    operator: str
    shape: tuple[int, ...]
    dtype: str


def saved_activations(graph: StepGraph) -> tuple[SavedActivation, ...]:
    """Return what autograd holds when the backward pass begins, largest first.

    A storage counts once, for the operator that saved it first. Parameters and the
    batch exist anyway, and are not listed.
    """
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


@dataclass(frozen=True, slots=True)
class SavedRange:
    """When autograd holds a storage that the forward made, as op indices.

    Attributes:
        first: The first op at which autograd holds it.
        last: The first op at which autograd no longer holds it.
        drop_start: The first op from which on nothing but autograd holds it.
    """

    first: int
    last: int
    drop_start: int


def saved_ranges(graph: StepGraph) -> dict[int, SavedRange]:
    """Return when autograd holds each storage of the forward, by its index."""
    return {
        index: _saved_range(graph, index, [graph.saved[i] for i in indices])
        for index, indices in graph.saved_on.items()
        if 0 <= graph.storages[index].birth < graph.backward_start
    }


def _saved_range(graph: StepGraph, index: int, records: Sequence[Saved]) -> SavedRange:
    storage = graph.storages[index]
    first = min(saved.moment for saved in records)
    last = min(max(saved.freed for saved in records), storage.death)
    if storage.released is not None:
        return SavedRange(first, last, max(first, storage.released))
    # Something else holds it throughout the forward; if it outlives autograd's hold,
    # throughout its life.
    alone = graph.backward_start if storage.death <= last else storage.death
    return SavedRange(first, last, max(first, alone))


@dataclass(frozen=True, slots=True)
class LiveItem:
    """A storage that is live at the peak, or the workspace of the peak's operator.

    Attributes:
        storage: Its index; -1 for the workspace.
        bytes: Its size.
        group: Why it is live. "saved activations" are held by autograd at the peak;
            "temporaries" are everything without a better name, such as the gradients
            of activations.
        module_path: The module of its producer; for a parameter's gradient, the module
            that holds the parameter.
        line: The user's line of its producer.
        operator: Its producer.
        phase: The phase in which it was made.
        shape: Shape of the first tensor in it.
        dtype: Dtype of the first tensor in it.
        is_droppable: Whether a region could have dropped it: only autograd holds it,
            and the peak's operator does not use it.
    """

    storage: int
    bytes: int
    group: Group
    module_path: str
    line: str
    operator: str
    phase: Phase
    shape: tuple[int, ...] = ()
    dtype: str = ""
    is_droppable: bool = False


@dataclass(frozen=True)
class PeakContents:
    """The peak of a step, and what is live then.

    Attributes:
        moment: Op index of the peak.
        operator: The operator that runs then; `None` for a step without operators.
        items: Everything live then, largest first.
    """

    moment: int
    operator: Operator | None
    items: tuple[LiveItem, ...]

    @property
    def peak_bytes(self) -> int:
        """Sum of the items."""
        return sum(item.bytes for item in self.items)

    @property
    def droppable_bytes(self) -> int:
        """Bytes that checkpointing could have dropped."""
        return sum(item.bytes for item in self.items if item.is_droppable)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer made."""
        return sum(item.bytes for item in self.items if item.phase == "optimizer")

    def by_group(self) -> dict[Group, int]:
        """Return the bytes by group, largest first."""
        sizes: defaultdict[Group, int] = defaultdict(int)
        for item in self.items:
            sizes[item.group] += item.bytes
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))

    def by_module(self) -> dict[str, int]:
        """Return the bytes by module path, except those that the optimizer made."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for item in self.items:
            if item.phase != "optimizer":
                sizes[item.module_path] += item.bytes
        return dict(sizes)


def peak_contents(graph: StepGraph) -> PeakContents:
    """Return what is live at the peak; at its first op index, if there are several."""
    if not graph.operators:
        return PeakContents(0, None, ())
    moment = timeline(graph).peak_moment
    operator = graph.operators[moment]
    ranges = saved_ranges(graph)
    produced = _first_values(graph)
    touched = touched_storages(graph, moment)
    items = [
        _live_item(
            graph, index, ranges.get(index), produced.get(index), moment, touched
        )
        for index, storage in enumerate(graph.storages)
        if 0 <= storage.birth <= moment < storage.death and storage.bytes
    ]
    if operator.workspace_bytes:
        items.append(
            LiveItem(
                storage=-1,
                bytes=operator.workspace_bytes,
                group="workspace",
                module_path=operator.module_path,
                line=operator.line,
                operator=operator.name,
                phase=operator.phase,
            )
        )
    items.sort(key=lambda item: (-item.bytes, item.storage))
    return PeakContents(moment, operator, tuple(items))


def _live_item(
    graph: StepGraph,
    index: int,
    saved: SavedRange | None,
    value: Value | None,
    moment: int,
    touched: set[int],
) -> LiveItem:
    storage = graph.storages[index]
    producer = graph.operators[storage.birth]
    is_saved = saved is not None and saved.first <= moment < saved.last
    is_dropped = is_saved and saved is not None and saved.drop_start <= moment
    path = producer.module_path
    if storage.kind == "gradient":
        path = storage.name.rpartition(".")[0]
    return LiveItem(
        storage=index,
        bytes=storage.bytes,
        group=_group(storage, is_saved),
        module_path=path,
        line=producer.line,
        operator=producer.name,
        phase=producer.phase,
        shape=value.shape if value else (),
        dtype=value.dtype if value else "",
        is_droppable=is_dropped and index not in touched,
    )


def _group(storage: Storage, is_saved: bool) -> Group:
    if storage.kind == "gradient":
        return "gradients"
    if storage.kind == "optimizer":
        return "optimizer state"
    return "saved activations" if is_saved else "temporaries"


def touched_storages(graph: StepGraph, moment: int) -> set[int]:
    """Return the storages that an operator reads or writes."""
    operator = graph.operators[moment]
    return {graph.values[i].storage for i in (*operator.inputs, *operator.outputs)}


def _first_values(graph: StepGraph) -> dict[int, Value]:
    first: dict[int, Value] = {}
    for value in graph.values:
        if value.operator >= 0:
            first.setdefault(value.storage, value)
    return first
