"""Which tensors and storages are live at which op index of a step that is recorded.

Each tensor, and the storage behind it, is watched through a weak reference, so the op
index of its death is recorded and nothing is kept alive. Several tensors can share a
storage. A storage is *released* when the last tensor on it has died, and dead when
autograd has let go of it too:

    birth ── tensors on it live ── released ── only autograd holds it ── death
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from membudget.graph import Kind, Phase, Value
from membudget.state.bits import plain_parts


@dataclass(slots=True)
class RecordedOperator:
    """An operator while the step is recorded; becomes a `graph.Operator`."""

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
class RecordedStorage:
    """A storage with its number of live tensors; becomes a `graph.Storage`.

    Attributes:
        grown: Bytes by which operators enlarged it, as `out=` does, by op index.
    """

    bytes: int
    kind: Kind
    name: str
    birth: int
    death: int | None = None
    released: int | None = None
    tensors: int = 0
    grown: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class RecordedSaved:
    """A tensor that autograd saves; becomes a `graph.Saved`."""

    value: int
    moment: int
    place: tuple[str, str]
    asked: list[int] = field(default_factory=list)
    freed: int | None = None


class Lifetimes:
    """The tensors of a step, while it runs.

    Attributes:
        values: The tensor contents seen so far.
        storages: The storages seen so far.
        moment: The current op index: how many operators have started.
        is_forward: Whether the forward is running; releases are recorded only then.
    """

    def __init__(self) -> None:
        """Start with no tensor known."""
        self.values: list[Value] = []
        self.storages: list[RecordedStorage] = []
        self.moment = 0
        self.is_forward = True
        self._storage_of: dict[int, int] = {}
        self._value_of: dict[int, int] = {}
        self._values_on: dict[int, list[int]] = {}
        self._watched: dict[int, Any] = {}

    def stop(self) -> None:
        """Stop watching: what is live now outlives the step."""
        self._watched.clear()

    def watch(self, thing: Any, died: Callable[[], object]) -> None:
        """Call `died` when `thing` dies."""

        def callback(reference: Any) -> None:
            self._watched.pop(id(reference), None)
            died()

        # Keyed by id: comparing two references would compare the tensors.
        reference = ref(thing, callback)
        self._watched[id(reference)] = reference

    # Tensors from before the step.

    def know(self, tensor: Tensor, kind: Kind, name: str) -> None:
        """Register a tensor that exists before the step."""
        for part in plain_parts(tensor):
            storage = self.storages[self.storage(part, -1)]
            if storage.kind == "outside":
                storage.kind, storage.name = kind, name

    def know_as(self, tensor: Tensor, other: Tensor) -> None:
        """Treat a tensor as one with another's storage, which it stands in for."""
        parts = zip(plain_parts(tensor), plain_parts(other), strict=True)
        for part, of_other in parts:
            self.lies_in(part, self.storage(of_other, -1))

    def name_gradient(self, tensor: Tensor, name: str) -> None:
        """Mark the storage of a parameter's final gradient."""
        for part in plain_parts(tensor):
            storage = self.storages[self.storage(part, -1)]
            storage.kind, storage.name = "gradient", name

    # Values.

    def is_known(self, tensor: Tensor) -> bool:
        """Tell whether the tensor was seen."""
        return id(tensor) in self._value_of

    def is_new(self, tensor: Tensor) -> bool:
        """Tell whether an unseen tensor lies in memory that torch allocated.

        Memory that NumPy lends is not the step's.
        """
        part = next(iter(plain_parts(tensor)))
        return not self.is_known(tensor) and part.untyped_storage().resizable()

    def value(self, tensor: Tensor) -> int:
        """Return the index of a tensor's content; what is new is from outside."""
        index = self._value_of.get(id(tensor))
        if index is not None:
            return index
        part = next(iter(plain_parts(tensor)))
        storage = self._storage_of.get(part.untyped_storage()._cdata, -1)
        index = self._same_content(tensor, storage)
        if index is None:
            return self.new_value(tensor, -1, 0)
        self._watch_tensor(tensor, self.storages[storage])
        self._value_of[id(tensor)] = index
        return index

    def _same_content(self, tensor: Tensor, storage: int) -> int | None:
        """Return the newest content of that shape in a storage.

        `detach` makes a new tensor without any operator that could be recorded.
        """
        for index in reversed(self._values_on.get(storage, [])):
            if self.values[index].shape == tuple(tensor.shape):
                return index
        return None

    def new_value(self, tensor: Tensor, operator: int, output: int) -> int:
        """Record what an operator made or wrote; return its index."""
        storages = [self.storage(part, operator) for part in plain_parts(tensor)]
        index = self._append(tensor, storages[0], operator, output)
        if id(tensor) not in self._value_of:
            self._watch_tensor(tensor, self.storages[storages[0]])
        self._value_of[id(tensor)] = index
        return index

    def saved_value(self, tensor: Tensor) -> int:
        """Return the content that autograd saves, maybe through an unseen alias."""
        index = self._value_of.get(id(tensor))
        if index is not None:
            return index
        storage = self.storage(next(iter(plain_parts(tensor))), -1)
        index = self._same_content(tensor, storage)
        return self._append(tensor, storage, -1, 0) if index is None else index

    def know_alias(self, alias: Tensor, value: int) -> None:
        """Register the alias that autograd holds; it does not delay the release."""
        key = id(alias)
        self._value_of[key] = value
        self.watch(alias, lambda: self._forget(key))

    def _append(self, tensor: Tensor, storage: int, operator: int, output: int) -> int:
        shape = tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = min(_stored_bytes(tensor), self.storages[storage].bytes)
        self.values.append(Value(storage, size, shape, dtype, operator, output))
        self._values_on.setdefault(storage, []).append(len(self.values) - 1)
        return len(self.values) - 1

    def _watch_tensor(self, tensor: Tensor, storage: RecordedStorage) -> None:
        key = id(tensor)
        storage.tensors += 1

        def died() -> None:
            self._forget(key)
            storage.tensors -= 1
            if not storage.tensors and self.is_forward:
                storage.released = self.moment

        self.watch(tensor, died)

    def _forget(self, key: int) -> None:
        self._value_of.pop(key, None)

    # Storages.

    def storage(self, part: Tensor, birth: int) -> int:
        """Return the index of a tensor's storage; record the storage if it is new."""
        storage = part.untyped_storage()
        key = storage._cdata
        index = self._storage_of.get(key)
        if index is None:
            index = self._storage_of[key] = len(self.storages)
            kind: Kind = "outside" if birth < 0 else "activation"
            record = RecordedStorage(storage.nbytes(), kind, "", birth)
            self.storages.append(record)
            self.watch(storage, lambda: self._died(key, record))
        elif (more := storage.nbytes() - self.storages[index].bytes) > 0:
            self.storages[index].bytes += more
            if birth >= 0:
                self.storages[index].grown[birth] = more
        return index

    def lies_in(self, tensor: Tensor, index: int) -> None:
        """Assign a tensor to a known storage.

        A fake view of a real base has a new storage of its own.
        """
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self._storage_of:
                self._storage_of[key] = index
                self.watch(storage, partial(self._storage_of.pop, key, None))

    def _died(self, key: int, record: RecordedStorage) -> None:
        self._storage_of.pop(key, None)
        record.death = self.moment


def _stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded dimension counts once."""
    count = tensor.numel()
    if count and tensor.layout is torch.strided:
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count = count if stride else count // size
    return count * tensor.element_size()
