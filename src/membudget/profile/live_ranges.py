"""What is alive at the peak of a step."""

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
class Alive:
    """A storage that is alive at the peak, or the workspace of the peak's operator.

    Attributes:
        storage: Its index; -1 for the workspace.
        bytes: Its size.
        group: Why it is alive. Saved activations are those that autograd holds at the
            peak; temporaries are all that is nothing else, such as the gradients of
            activations.
        module_path: The module of what made it; a parameter's gradient belongs to the
            module that holds the parameter.
        line: The user's line of what made it.
        operator: What made it.
        phase: When it was made.
        shape: Of what it was made for.
        dtype: Likewise.
        is_read: Whether the peak's operator reads or writes it.
        is_droppable: Whether only autograd holds it, and the operator does without it.
    """

    storage: int
    bytes: int
    group: Group
    module_path: str
    line: str
    operator: str
    phase: Phase
    shape: tuple[int, ...]
    dtype: str
    is_read: bool
    is_droppable: bool


@dataclass(frozen=True)
class PeakContents:
    """The moment of the peak, and what is alive then.

    Attributes:
        moment: Of the peak.
        operator: What runs then; `None` for a step without operators.
        items: What is alive, the largest first.
    """

    moment: int
    operator: Operator | None
    items: tuple[Alive, ...]

    @property
    def peak_bytes(self) -> int:
        """The sum of the items."""
        return sum(item.bytes for item in self.items)

    @property
    def droppable_bytes(self) -> int:
        """What of it checkpointing could have dropped."""
        return sum(item.bytes for item in self.items if item.is_droppable)

    @property
    def optimizer_bytes(self) -> int:
        """What of it the optimizer made."""
        return sum(item.bytes for item in self.items if item.phase == "optimizer")

    def by_group(self) -> dict[Group, int]:
        """Return the bytes by group, the largest first."""
        sizes: defaultdict[Group, int] = defaultdict(int)
        for item in self.items:
            sizes[item.group] += item.bytes
        return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))

    def by_module(self) -> dict[str, int]:
        """Return the bytes by module path, without what the optimizer made."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for item in self.items:
            if item.phase != "optimizer":
                sizes[item.module_path] += item.bytes
        return dict(sizes)


def peak_contents(graph: StepGraph) -> PeakContents:
    """Return what is alive at the first moment of the peak."""
    if not graph.operators:
        return PeakContents(0, None, ())
    moment = timeline(graph).peak_moment
    operator = graph.operators[moment]
    held = keeping(graph)
    makers = _first_values(graph)
    touched = touched_storages(graph, moment)
    items = [
        _alive(graph, index, held.get(index), makers.get(index), touched, moment)
        for index, storage in enumerate(graph.storages)
        if 0 <= storage.birth <= moment < storage.death and storage.bytes
    ]
    if operator.workspace_bytes:
        items.append(_workspace(operator))
    items.sort(key=lambda item: (-item.bytes, item.storage))
    return PeakContents(moment, operator, tuple(items))


def _alive(
    graph: StepGraph,
    index: int,
    held: Held | None,
    value: Value | None,
    touched: set[int],
    moment: int,
) -> Alive:
    storage = graph.storages[index]
    maker = graph.operators[storage.birth]
    is_held = held is not None and held.first <= moment < held.last
    is_gradient = storage.kind == "gradient"
    return Alive(
        storage=index,
        bytes=storage.bytes,
        group=_group(storage, is_held),
        module_path=(
            storage.name.rpartition(".")[0] if is_gradient else maker.module_path
        ),
        line=maker.line,
        operator=maker.name,
        phase=maker.phase,
        shape=value.shape if value else (),
        dtype=value.dtype if value else "",
        is_read=index in touched,
        is_droppable=(
            is_held
            and held is not None
            and index not in touched
            and held.drop_start <= moment
        ),
    )


def _group(storage: Storage, is_held: bool) -> Group:
    if storage.kind == "gradient":
        return "gradients"
    if storage.kind == "optimizer":
        return "optimizer state"
    return "saved activations" if is_held else "temporaries"


def _workspace(operator: Operator) -> Alive:
    return Alive(
        storage=-1,
        bytes=operator.workspace_bytes,
        group="workspace",
        module_path=operator.module_path,
        line=operator.line,
        operator=operator.name,
        phase=operator.phase,
        shape=(),
        dtype="",
        is_read=True,
        is_droppable=False,
    )


@dataclass(frozen=True, slots=True)
class Held:
    """When autograd holds a storage that the forward made.

    Attributes:
        first: The first moment at which it does.
        last: The first moment at which it does no more.
        drop_start: From when on nothing else does.
    """

    first: int
    last: int
    drop_start: int


def keeping(graph: StepGraph) -> dict[int, Held]:
    """Return when autograd holds which storage of the forward."""
    return {
        index: _held(graph, index, [graph.saved[i] for i in indices])
        for index, indices in graph.saved_on.items()
        if 0 <= graph.storages[index].birth < graph.backward_start
    }


def _held(graph: StepGraph, index: int, records: Sequence[Saved]) -> Held:
    storage = graph.storages[index]
    first = min(saved.moment for saved in records)
    last = min(max(saved.freed for saved in records), storage.death)
    if storage.released is not None:
        return Held(first, last, max(first, storage.released))
    # Another held it until the backward or, if it outlives autograd's hold, throughout.
    alone = graph.backward_start if storage.death <= last else storage.death
    return Held(first, last, max(first, alone))


def described(operator: Operator) -> str:
    """Return what runs and where, in words."""
    if operator.phase == "optimizer":
        return f"{operator.name} (the optimizer's step)"
    of = operator.module_path or "the model's own code or the loss"
    line = f", {operator.line}" if operator.line else ""
    return f"{operator.name} ({operator.phase} of {of}{line})"


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
