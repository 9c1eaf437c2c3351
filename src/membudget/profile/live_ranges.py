"""Find the storages that autograd saves in a recorded step, and those live at the peak.

    birth                 drop_start                last
      ├─ the forward holds it ─┼─ only autograd holds it ─┤ freed

From the op index `drop_start` on, only autograd holds a saved storage, so a region can
free it. The functions in this file are pure and do not need torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from membudget.graph import Operator, Phase, Saved, StepGraph, Storage, Value
from membudget.planner.timeline import timeline

Group = Literal[
    "gradients", "saved activations", "temporaries", "optimizer state", "workspace"
]


@dataclass(frozen=True, slots=True)
class SavedActivation:
    """A storage that autograd saves in the forward pass for the backward pass.

    Attributes:
        storage: Index of the storage.
        bytes: Size of the storage.
        module_path: Path of the module that first saved the storage.
        line: Line of the user's code that first saved the storage.
        operator: Operator that first saved the storage, such as `"aten.gelu.default"`.
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
    """Return the activations saved when the backward pass begins, largest first.

    A storage is listed once, under the operator that first saved it. Parameters and the
    batch are not listed, because they are live during the whole step.
    """
    found: dict[int, SavedActivation] = {}
    for saved in graph.saved:
        value = graph.values[saved.value]
        storage = graph.storages[value.storage]
        is_for_backward = min(saved.freed, storage.death) > graph.backward_start
        if not _is_made(storage) or not is_for_backward or value.storage in found:
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
    """Op indices between which autograd retains a storage of the forward pass.

    Attributes:
        first: First op index at which autograd retains the storage.
        last: First op index at which autograd no longer retains the storage.
        drop_start: First op index at which only autograd retains the storage.
    """

    first: int
    last: int
    drop_start: int


def saved_ranges(graph: StepGraph) -> dict[int, SavedRange]:
    """Return the saved range of each storage of the forward pass, by storage index."""
    return {
        index: _saved_range(graph, index, [graph.saved[i] for i in indices])
        for index, indices in graph.saved_on.items()
        if _is_made(graph.storages[index])
        and graph.storages[index].birth < graph.backward_start
    }


def _is_made(storage: Storage) -> bool:
    """Return whether an operator of the step made what the storage holds."""
    return storage.birth >= 0 and storage.kind != "outside"


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
        storage: Index of the storage; -1 for the workspace.
        bytes: Size of the storage or workspace.
        group: Reason why the item is live. The group "saved activations" contains what
            autograd retains at the peak; "temporaries" contains all items that fit no
            other group, such as the gradients of activations.
        module_path: Path of the module that allocated the storage; for the gradient of
            a parameter, path of the module that owns the parameter.
        line: Line of the user's code that allocated the storage.
        operator: Operator that allocated the storage.
        phase: Phase of the step in which the storage was allocated.
        shape: Shape of the first tensor in the storage.
        dtype: Dtype of the first tensor in the storage.
        is_droppable: Whether a region could have dropped the storage: only autograd
            retains it at the peak, and the peak's operator does not use it.
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
    """The memory peak of a step, and the storages that are live at the peak.

    Attributes:
        moment: Op index of the peak.
        operator: Operator that runs at the peak; `None` if the step has no operators.
        items: Storages and workspace that are live at the peak, largest first.
    """

    moment: int
    operator: Operator | None
    items: tuple[LiveItem, ...]

    @property
    def peak_bytes(self) -> int:
        """Total bytes of the items that are live at the peak."""
        return sum(item.bytes for item in self.items)

    @property
    def droppable_bytes(self) -> int:
        """Bytes live at the peak that checkpointing could have dropped."""
        return sum(item.bytes for item in self.items if item.is_droppable)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes live at the peak that the optimizer's step allocated."""
        return sum(item.bytes for item in self.items if item.phase == "optimizer")

    def by_group(self) -> dict[Group, int]:
        """Return the bytes live at the peak for each group, largest group first."""
        sizes: defaultdict[Group, int] = defaultdict(int)
        for item in self.items:
            sizes[item.group] += item.bytes
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))

    def by_module(self) -> dict[str, int]:
        """Return bytes live at the peak for each module, without the optimizer's."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for item in self.items:
            if item.phase != "optimizer":
                sizes[item.module_path] += item.bytes
        return dict(sizes)


def peak_contents(graph: StepGraph) -> PeakContents:
    """Return the contents of memory at the peak, or at the first of equal peaks."""
    if not graph.operators:
        return PeakContents(0, None, ())
    moment = timeline(graph).peak_moment
    operator = graph.operators[moment]
    ranges = saved_ranges(graph)
    produced = _first_values(graph)
    touched = touched_storages(graph, moment)
    # A storage of 0 bytes has been merged into another one.
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
    """Return the indices of the storages that an operator reads or writes."""
    operator = graph.operators[moment]
    return {graph.values[i].storage for i in (*operator.inputs, *operator.outputs)}


def _first_values(graph: StepGraph) -> dict[int, Value]:
    first: dict[int, Value] = {}
    for value in graph.values:
        if value.operator >= 0:
            first.setdefault(value.storage, value)
    return first
