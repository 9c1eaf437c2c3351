"""Record one training step as it runs, on real tensors or on fake ones.

A dispatch mode sees each operator with the tensors that the backend sees. A tensor, and
the storage behind it, is watched through a weak reference, so the recorder knows the
moment at which each dies and keeps none alive. The saved-tensor hooks give autograd an
alias of what it keeps: so it is known how long something *else* holds a storage, which
is when a region that drops the saved tensor would free it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from membudget._torch import (
    DispatchMode,
    OperatorOverload,
    current_autograd_node,
    is_view_operator,
    node_sequence_number,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    tree_iter,
    written_arguments,
)
from membudget.callsite import place_of
from membudget.graph import Kind, Phase
from membudget.memory.storage import plain_parts
from membudget.profile.flops import flops_of

MARK = "membudget operator "
"""With an operator's index, the name of its event under a profiler."""


@dataclass(slots=True)
class RecordedOperator:
    """An operator while the step is recorded; see `graph.Operator`."""

    operator: Any
    phase: Phase
    place: tuple[str, str]
    node: int | None
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    flops: int = 0
    nanoseconds: int = 0
    workspace_bytes: int = 0


@dataclass(slots=True)
class RecordedValue:
    """A content; see `graph.Value`."""

    storage: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: int
    output: int


@dataclass(slots=True)
class RecordedStorage:
    """A storage, and how many tensors look at it; see `graph.Storage`."""

    bytes: int
    kind: Kind
    name: str
    birth: int
    death: int | None = None
    released: int | None = None
    tensors: int = 0


@dataclass(slots=True)
class RecordedSaved:
    """A tensor that autograd keeps; see `graph.Saved`."""

    value: int
    moment: int
    place: tuple[str, str]
    asked: list[int] = field(default_factory=list)
    freed: int | None = None


class _Kept:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "index", "tensor")

    def __init__(self, tensor: Tensor, index: int):
        self.tensor = tensor
        self.index = index


class StepRecorder(DispatchMode):
    """The mode that records a step.

    Attributes:
        operators: What ran.
        values: The contents that were seen.
        storages: The storages that were seen.
        saved: What autograd kept.
        phase: The part of the step that runs now; the owner moves it on.
    """

    supports_higher_order_operators = True

    def __init__(self, module_names: Mapping[int, str], marks_events: bool = False):
        """Begin with nothing recorded.

        Args:
            module_names: The paths of modules, by their `id`.
            marks_events: Whether each operator is an event for a running profiler.
        """
        super().__init__()
        self.operators: list[RecordedOperator] = []
        self.values: list[RecordedValue] = []
        self.storages: list[RecordedStorage] = []
        self.saved: list[RecordedSaved] = []
        self.phase: Phase = "forward"
        self._names = module_names
        self._marks_events = marks_events
        self._moment = 0
        self._is_suspended = False
        self._last_node = 0
        self._places: dict[int, tuple[str, str]] = {}
        self._storage_of: dict[int, int] = {}
        self._value_of: dict[int, int] = {}
        self._watched: dict[Any, None] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forward, the loss and the backward that run inside."""
        push_saved_tensors_hooks(self._pack, self._unpack)
        try:
            with self:
                self._last_node = node_sequence_number()
                yield
        finally:
            pop_saved_tensors_hooks()

    def know(self, tensor: Tensor, kind: Kind, name: str) -> None:
        """Know a tensor that was there before the step."""
        for part in plain_parts(tensor):
            index = self._storage(part, -1)
            if self.storages[index].kind == "outside":
                self.storages[index].kind = kind
                self.storages[index].name = name

    def name_gradient(self, tensor: Tensor, name: str) -> None:
        """Say of a storage that the step left behind that it is a gradient."""
        for part in plain_parts(tensor):
            storage = self.storages[self._storage(part, -1)]
            storage.kind, storage.name = "gradient", name

    def finish(self) -> None:
        """Stop watching: what is alive now outlives the step."""
        self._watched.clear()

    # Operators.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator and note it."""
        kwargs = kwargs or {}
        if self._is_suspended or getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        index = len(self.operators)
        node = current_autograd_node()
        number = None if node is None else node._sequence_nr()
        recorded = RecordedOperator(func, self.phase, self._place(number), number)
        self.operators.append(recorded)
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        is_import = getattr(func, "_opname", "") == "lift_fresh"
        birth = index if is_import else -1
        recorded.inputs = [self._value(tensor, birth) for tensor in inputs]
        self._moment = index + 1
        event = record_function(f"{MARK}{index}") if self._marks_events else _NOTHING
        with event:
            start = time.perf_counter_ns()
            output = func(*args, **kwargs)
            recorded.nanoseconds = time.perf_counter_ns() - start
        outputs = [t for t in tree_iter(output) if isinstance(t, Tensor)]
        recorded.flops = flops_of(func, args, kwargs, output)
        self._note_outputs(recorded, index, _written(func, args, kwargs), outputs)
        return output

    def _note_outputs(
        self,
        recorded: RecordedOperator,
        index: int,
        written: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        outputs += [t for t in written if all(t is not o for o in outputs)]
        if recorded.inputs and _is_view(recorded.operator):
            for tensor in outputs:
                self._same_storage(tensor, self.values[recorded.inputs[0]].storage)
        for position, tensor in enumerate(outputs):
            known = id(tensor) in self._value_of
            if known and all(tensor is not w for w in written):
                continue  # Handed through as it was.
            recorded.outputs.append(self._make_value(tensor, index, position))

    def _place(self, node: int | None) -> tuple[str, str]:
        """Return module path and line: the stack's, or those of the node's forward."""
        if node is not None and node in self._places:
            return self._places[node]
        if self.phase != "forward":
            return ("", "")
        place = place_of(self._names)
        newest = node_sequence_number()
        for number in range(self._last_node, newest):
            self._places[number] = place
        self._last_node = newest
        return place

    # Tensors.

    def _value(self, tensor: Tensor, birth: int) -> int:
        """Return the index of a tensor's content now."""
        index = self._value_of.get(id(tensor))
        if index is None:
            parts = list(plain_parts(tensor))
            storages = [self._storage(part, birth) for part in parts]
            index = self._enter(tensor, storages[0], -1 if birth < 0 else birth, 0)
        return index

    def _make_value(self, tensor: Tensor, operator: int, output: int) -> int:
        storages = [self._storage(part, operator) for part in plain_parts(tensor)]
        return self._enter(tensor, storages[0], operator, output)

    def _enter(self, tensor: Tensor, storage: int, operator: int, output: int) -> int:
        index = len(self.values)
        size = min(tensor.numel() * tensor.element_size(), self.storages[storage].bytes)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values.append(
            RecordedValue(storage, size, tuple(tensor.shape), dtype, operator, output)
        )
        key = id(tensor)
        if key not in self._value_of:
            self._watch_tensor(tensor, key, storage)
        self._value_of[key] = index
        return index

    def _watch_tensor(self, tensor: Tensor, key: int, index: int) -> None:
        storage = self.storages[index]
        storage.tensors += 1

        def died(reference: Any) -> None:
            self._value_of.pop(key, None)
            self._watched.pop(reference, None)
            storage.tensors -= 1
            if not storage.tensors and self.phase == "forward":
                storage.released = self._moment

        self._watched[ref(tensor, died)] = None

    def _storage(self, part: Tensor, birth: int) -> int:
        storage = part.untyped_storage()
        key = storage._cdata
        index = self._storage_of.get(key)
        if index is None:
            index = self._storage_of[key] = len(self.storages)
            kind: Kind = "outside" if birth < 0 else "activation"
            self.storages.append(RecordedStorage(storage.nbytes(), kind, "", birth))
            self._watch_storage(storage, key, self.storages[index])
        elif storage.nbytes() > self.storages[index].bytes:
            self.storages[index].bytes = storage.nbytes()  # `resize_` has let it grow.
        return index

    def _same_storage(self, tensor: Tensor, index: int) -> None:
        """Know the storage of a view, which fake tensors copy from a real base."""
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self._storage_of:
                self._storage_of[key] = index
                self._forget_at_death(storage, key)

    def _forget_at_death(self, storage: Any, key: int) -> None:
        def died(reference: Any) -> None:
            self._storage_of.pop(key, None)
            self._watched.pop(reference, None)

        self._watched[ref(storage, died)] = None

    def _watch_storage(self, storage: Any, key: int, record: RecordedStorage) -> None:
        def died(reference: Any) -> None:
            self._storage_of.pop(key, None)
            self._watched.pop(reference, None)
            record.death = self._moment

        self._watched[ref(storage, died)] = None

    # What autograd keeps.

    def _pack(self, tensor: Tensor) -> _Kept:
        if self._is_suspended or self.phase != "forward":
            return _Kept(tensor, -1)
        with self._suspended():
            is_leaf = tensor.is_leaf and tensor.requires_grad
            kept = _Kept(tensor if is_leaf else tensor.detach(), len(self.saved))
        value = self._saved_value(tensor)
        saved = RecordedSaved(value, len(self.operators), place_of(self._names))
        self.saved.append(saved)

        def freed(reference: Any) -> None:
            self._watched.pop(reference, None)
            saved.freed = self._moment

        self._watched[ref(kept, freed)] = None
        return kept

    def _saved_value(self, tensor: Tensor) -> int:
        """Return the content that is saved; autograd may hand out an alias of it."""
        index = self._value_of.get(id(tensor))
        if index is not None:
            return index
        storage = self._storage(next(iter(plain_parts(tensor))), -1)
        shape = tuple(tensor.shape)
        for index in range(len(self.values) - 1, -1, -1):
            value = self.values[index]
            if value.storage == storage and value.shape == shape:
                return index
        size = min(tensor.numel() * tensor.element_size(), self.storages[storage].bytes)
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.values.append(RecordedValue(storage, size, shape, dtype, -1, 0))
        return len(self.values) - 1

    def _unpack(self, kept: _Kept) -> Tensor:
        if kept.index >= 0:
            self.saved[kept.index].asked.append(self._moment)
        return kept.tensor

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before


_NOTHING = nullcontext()


def _is_view(func: Any) -> bool:
    return isinstance(func, OperatorOverload) and is_view_operator(func)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that the operator writes, statistics of a norm included."""
    if not isinstance(func, OperatorOverload):
        return []
    return [t for t in written_arguments(func, args, kwargs) if isinstance(t, Tensor)]
