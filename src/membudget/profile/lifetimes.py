"""Track when the tensors and storages of a step are live, while the step is recorded.

Weak references to each tensor and its storage record the op index at which they die,
without keeping them alive. Several tensors can share a storage. A storage is *released*
when the last tensor that uses it dies, and *dies* when autograd drops it too:

    birth ── tensors on it live ── released ── only autograd holds it ── death

FSDP resizes the storages of gathered parameters to 0 bytes and back, without an
operator, while their tensors live on. A storage that is empty when the step begins is
therefore looked at before each operator: it dies when it is emptied, and is born as
another one when it is filled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from membudget._torch_accelerator import HOST, counts_on
from membudget.graph import Kind, Phase, Value
from membudget.state.bits import plain_parts
from membudget.text import dtype_name


@dataclass(slots=True)
class RecordedOperator:
    """An operator of the step being recorded; becomes a `graph.Operator`."""

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
    """A storage of the step being recorded; becomes a `graph.Storage`.

    Attributes:
        is_unpacked: Whether a backward pass inside the forward unpacked the storage
            after its release.
        grown: Bytes by which operators enlarged the storage, as `out=` does, keyed by
            op index.
    """

    bytes: int
    kind: Kind
    name: str
    birth: int
    death: int | None = None
    released: int | None = None
    tensors: int = 0
    is_unpacked: bool = False
    grown: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class RecordedSaved:
    """A saved tensor of the step being recorded; becomes a `graph.Saved`."""

    value: int
    moment: int
    place: tuple[str, str]
    asked: list[int] = field(default_factory=list)
    freed: int | None = None


class Lifetimes:
    """Tracks the live ranges of a step's tensors and storages while the step runs.

    Attributes:
        values: Values recorded so far; each is a tensor's content between two writes.
        storages: The storages recorded so far.
        moment: The current op index: the number of operators that have started.
        device: The device whose bytes count; a tensor beside it has none.
        is_forward: Whether the forward runs; only then are released storages recorded.
    """

    def __init__(self, emptied: dict[int, Any] | None = None) -> None:
        """Create a tracker with no tensors, which watches the `emptied` storages."""
        self.device = HOST
        self.values: list[Value] = []
        self.storages: list[RecordedStorage] = []
        self.moment = 0
        self.is_forward = True
        self._storage_of: dict[int, int] = {}
        self._value_of: dict[int, int] = {}
        self._values_on: dict[int, list[int]] = {}
        self._watched: dict[int, Any] = {}
        self._resized = emptied or {}

    def stop(self) -> None:
        """Stop tracking; tensors that are still live count as outliving the step."""
        self._watched.clear()

    def watch(self, thing: Any, died: Callable[[], object]) -> None:
        """Call `died` when the object `thing` is garbage-collected."""

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
        """Register `tensor` as a stand-in that shares the storage of `other`."""
        parts = zip(plain_parts(tensor), plain_parts(other), strict=True)
        for part, of_other in parts:
            self.lies_in(part, self.storage(of_other, -1))

    def name_gradient(self, tensor: Tensor, name: str) -> None:
        """Mark a tensor's storage as the final gradient of the leaf called `name`."""
        for part in plain_parts(tensor):
            storage = self.storages[self.storage(part, -1)]
            storage.kind, storage.name = "gradient", name

    # Values.

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether the tensor has a recorded value."""
        return id(tensor) in self._value_of

    def is_new(self, tensor: Tensor) -> bool:
        """Return whether a tensor is unseen, in memory of torch, not of NumPy."""
        storage = next(iter(plain_parts(tensor))).untyped_storage()
        return not self.is_known(tensor) and storage.resizable()

    def value(self, tensor: Tensor) -> int:
        """Return the index of a tensor's value; a new tensor comes from outside."""
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
        """Return the newest value with the tensor's shape in a storage."""
        # `detach` creates a tensor without an operator that could be recorded.
        for index in reversed(self._values_on.get(storage, [])):
            if self.values[index].shape == tuple(tensor.shape):
                return index
        return None

    def new_value(self, tensor: Tensor, operator: int, output: int) -> int:
        """Record the value that an operator has written; return the value's index."""
        storages = [self.storage(part, operator) for part in plain_parts(tensor)]
        index = self._append(tensor, storages[0], operator, output)
        if id(tensor) not in self._value_of:
            self._watch_tensor(tensor, self.storages[storages[0]])
        self._value_of[id(tensor)] = index
        return index

    def saved_value(self, tensor: Tensor) -> int:
        """Return the index of a saved tensor's value, even for an unrecorded alias."""
        index = self._value_of.get(id(tensor))
        if index is not None:
            return index
        storage = self.storage(next(iter(plain_parts(tensor))), -1)
        index = self._same_content(tensor, storage)
        return self._append(tensor, storage, -1, 0) if index is None else index

    def note_unpacked(self, value: int) -> None:
        """Note that a backward pass inside the forward unpacks a saved value.

        A region that has dropped the storage recomputes it: what the pass references
        does not delay the release.
        """
        storage = self.storages[self.values[value].storage]
        if self.is_forward and not storage.tensors:
            storage.is_unpacked = True

    def know_alias(self, alias: Tensor, value: int) -> None:
        """Register autograd's alias, which does not delay its storage's release."""
        key = id(alias)
        self._value_of[key] = value
        self.watch(alias, lambda: self._forget(key))

    def _append(self, tensor: Tensor, storage: int, operator: int, output: int) -> int:
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype)
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
            if not (storage.tensors or storage.is_unpacked) and self.is_forward:
                storage.released = self.moment

        self.watch(tensor, died)

    def _forget(self, key: int) -> None:
        self._value_of.pop(key, None)

    # Storages.

    def storage(self, part: Tensor, birth: int) -> int:
        """Return the index of a tensor's storage; record the storage if it is new."""
        storage = part.untyped_storage()
        index = self._storage_of.get(storage._cdata)
        size = storage.nbytes() if counts_on(self.device, part.device) else 0
        if index is None:
            kind: Kind = "outside" if birth < 0 else "activation"
            return self._new_storage(storage, size, birth, kind)
        if (more := size - self.storages[index].bytes) > 0:
            self.storages[index].bytes += more
            if birth >= 0:
                self.storages[index].grown[birth] = more
        return index

    def _new_storage(self, storage: Any, size: int, birth: int, kind: Kind) -> int:
        key, record = storage._cdata, RecordedStorage(size, kind, "", birth)
        index = self._storage_of[key] = len(self.storages)
        self.storages.append(record)
        self.watch(storage, lambda: self._died(key, record))
        return index

    def note_resized(self) -> None:
        """Note which registered empty storages were filled, and emptied, by now."""
        for key, reference in self._resized.items():
            storage, index = reference(), self._storage_of.get(key)
            # A storage that died may have left its address to another one.
            if storage is None:
                continue
            if index is None and storage.nbytes():
                self._new_storage(storage, storage.nbytes(), self.moment, "outside")
            elif index is not None and not storage.nbytes():
                self._died(key, self.storages[index])
                # What the tensors hold when it is filled again is another value.
                gone = self._values_on.pop(index, [])
                known = self._value_of.items()
                self._value_of = {k: value for k, value in known if value not in gone}

    def lies_in(self, tensor: Tensor, index: int) -> None:
        """Register a tensor as an alias of a recorded storage."""
        # A fake view of a real base is created with another storage object.
        for part in plain_parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self._storage_of:
                self._storage_of[key] = index
                self.watch(storage, partial(self._storage_of.pop, key, None))

    def _died(self, key: int, record: RecordedStorage) -> None:
        # A later storage may get the same address.
        self._storage_of.pop(key, None)
        record.death = self.moment if record.death is None else record.death


def _stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded dimension counts once."""
    count = tensor.numel()
    if count and tensor.layout is torch.strided:
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count = count if stride else count // size
    return count * tensor.element_size()
