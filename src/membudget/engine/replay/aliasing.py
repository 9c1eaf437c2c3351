"""What is known of each tensor that is alive while a region is recorded.

Tensors are known by identity, for as long as they live; the identity of the storage is
compared, too, because `x.data = y` exchanges it, and a deep copy does not share it.
Storages are known for as long as *they* live: an alias that nobody was seen to make
(`detach` is not observed, `.data` makes no operator) may be all that is left on one.

A write gives a memory a new root value, and every tensor in it is known anew when it is
met again: a view by running its view operators on the new root. Memory that came from
outside of the region, or that a policy keeps, is *held*: each tensor in it is a source,
by reference. Before a write, the sources that something needs are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from membudget._torch import detach_with_version
from membudget.engine.replay.sources import alias, copy_of, is_plain
from membudget.engine.replay.tape import (
    LiveStorage,
    LiveTensor,
    Operation,
    RecordedMemory,
    Value,
)
from membudget.state.identity import address_of, storage_of

# Memory without content is recorded by this operator, whichever made it.
EMPTY: Any = torch.ops.aten.empty_strided.default

AS_STRIDED: Any = torch.ops.aten.as_strided.default


class Tracker:
    """The values of living tensors.

    Attributes:
        table: What is known, by the `id` of the tensor.
        sources: Every source that something needs, in the order of the first use: the
            same order whenever the function runs. A rerun around this region matches
            what the region hands to it by number.
        writes: Told the storage of a tensor that an operator is about to write.
        clock: How many operations were recorded; those of derived views, too.
    """

    __slots__ = ("_forget", "_freed", "_places", "clock", "sources", "table", "writes")

    def __init__(self) -> None:
        """Begin with no tensor known."""
        table: dict[int, LiveTensor] = {}
        places: dict[int, LiveStorage] = {}

        def forget(entry: Any) -> None:
            table.pop(entry.key, None)
            place = places.get(entry.address)
            if place is not None:
                place.entries.pop(entry.key, None)

        def freed(dead: LiveStorage) -> None:
            if places.get(dead.address) is dead:
                del places[dead.address]
            # A tensor may be known by it still: `y.data =` gives it another storage.
            dead.memory.epoch += 1

        self.table = table
        self.clock = 0
        self.sources: list[ReferenceType[Value]] = []
        self.writes: Callable[[int], None] | None = None
        self._places = places
        self._forget = forget
        self._freed = freed

    def clear(self) -> None:
        """Forget every tensor."""
        self.table.clear()
        self._places.clear()

    def entry(self, tensor: Tensor) -> LiveTensor:
        """Return what is known of a tensor now."""
        entry = self.table.get(id(tensor))
        if (
            entry is None
            or entry.epoch != entry.memory.epoch
            or entry.address != address_of(tensor)
        ):
            return self.meet(tensor, entry)
        return entry

    def read(self, tensor: Tensor) -> Value:
        """Return the value of a tensor whose content is needed."""
        return self.mark_read(tensor, self.entry(tensor))

    def mark_read(self, tensor: Tensor, entry: LiveTensor) -> Value:
        """Do the same where the entry is at hand."""
        value = entry.value
        root = value.root or value
        if is_empty(root):
            # Nobody was seen to write it, and yet it is read.
            entry = self.hold_memory(tensor, entry)
            value = root = entry.value
        if not value.is_used:
            self._use(value)
        if not root.is_used:
            self._use(root)
        return value

    def _use(self, value: Value) -> None:
        value.is_used = True
        if value.operation is None:
            self.sources.append(ref(value))

    def enter(
        self, tensor: Tensor, value: Value, memory: RecordedMemory, address: int
    ) -> LiveTensor:
        """Know a tensor."""
        entry = LiveTensor(tensor, self._forget)
        entry.key = key = id(tensor)
        entry.value = value
        entry.memory = memory
        entry.epoch = memory.epoch
        entry.address = address
        self.table[key] = entry
        place = self._places.get(address)
        if place is None or place.memory is not memory:
            place = self._new_place(tensor, memory, address)
        place.entries[key] = entry
        return entry

    def _new_place(
        self, tensor: Tensor, memory: RecordedMemory, address: int
    ) -> LiveStorage:
        """Know a storage, for as long as it lives."""
        place = LiveStorage(storage_of(tensor), self._freed)
        place.address = address
        place.memory = memory
        place.entries = {}
        if address:
            self._places[address] = place
        return place

    def enter_fresh(self, tensor: Tensor, value: Value, address: int) -> LiveTensor:
        """Know a tensor that lies in memory of its own."""
        return self.enter(tensor, value, RecordedMemory(value, tensor.dtype), address)

    def meet(self, tensor: Tensor, entry: LiveTensor | None) -> LiveTensor:
        """Know a tensor that is new here, or whose memory was written since."""
        address = address_of(tensor)
        place = self._places.get(address)
        if place is not None:
            memory = place.memory
        elif entry is not None and not address:
            memory = entry.memory  # A sparse tensor has no storage of its own.
        else:
            memory = RecordedMemory(None)
        if memory.root is None:
            value = self._source(tensor, memory)
            return self.enter(tensor, value, memory, address)
        if place is not None and (entry is None or entry.memory is not memory):
            entry = _same_view(tensor, place)
        if entry is not None:
            is_current = entry.epoch == memory.epoch
            value = entry.value if is_current else self._rebased(entry.value, memory)
        elif is_plain(tensor) and tensor.dtype is memory.dtype:
            value = self._as_strided(tensor, memory.root)
        else:
            memory.root = None
            memory.epoch += 1
            value = self._source(tensor, memory)
        return self.enter(tensor, value, memory, address)

    def know(self, tensor: Tensor, value: Value) -> None:
        """Know what a backward inside of the forward is given in place of a value."""
        address = address_of(tensor)
        place = self._places.get(address)
        if place is not None:
            self.enter(tensor, value, place.memory, address)
            return
        root = value.root or value
        memory = RecordedMemory(None if root.operation is None else root, tensor.dtype)
        self.enter(tensor, value, memory, address_of(tensor))

    def hold_memory(self, tensor: Tensor, entry: LiveTensor) -> LiveTensor:
        """Hold the memory of a tensor by reference from now on.

        What was recorded of its content before stays as it is.
        """
        memory = entry.memory
        memory.root = None
        memory.epoch += 1
        return self.meet(tensor, entry)

    def hold_value(self, tensor: Tensor, entry: LiveTensor) -> None:
        """Make the value itself a source: what is recorded of it needs no operator."""
        value, memory = entry.value, entry.memory
        value.hold(detach_with_version(tensor))
        memory.root = None
        memory.sources.append(ref(value))
        self.note_source(value)

    def before_write(
        self, written: Iterable[Tensor], is_needed: bool
    ) -> list[RecordedMemory]:
        """Copy sources whose content is about to be lost; return the memories.

        Args:
            written: The tensors that an operator will write.
            is_needed: Whether a replay of the operator will want what they hold now.
        """
        memories: list[RecordedMemory] = []
        for tensor in written:
            entry = self.entry(tensor)
            memory = entry.memory
            if self.writes is not None:
                self.writes(entry.address)
            if memory.root is None and is_needed:
                self.mark_read(tensor, entry)
            if memory not in memories:
                memories.append(memory)
        for memory in memories:
            for reference in memory.sources:
                source = reference()
                if source is not None and source.is_used and source.tensor is not None:
                    source.tensor = copy_of(source.tensor)
                    source.address = None
            memory.sources.clear()
        return memories

    def after_write(self, memory: RecordedMemory, root: Value | None) -> None:
        """Note that a memory was written.

        Args:
            memory: The memory.
            root: Its value now; `None` if it is held.
        """
        memory.epoch += 1
        memory.is_state |= memory.is_external
        memory.root = root

    def operation(self, operator: Any, args: list[Any], kwargs: Any) -> Operation:
        """Return a new operation, the last one so far."""
        self.clock += 1
        return Operation(operator, args, kwargs, self.clock, torch.is_grad_enabled())

    def _rebased(self, value: Value, memory: RecordedMemory) -> Value:
        """Return what a view, or a root, is now that its memory has another root."""
        operation, root = value.operation, memory.root
        assert root is not None
        if value.root is None or operation is None:
            return root
        args = [
            self._rebased(a, memory) if type(a) is Value else a for a in operation.args
        ]
        again = self.operation(operation.operator, args, operation.kwargs)
        return again.output(value.index, root)

    def _as_strided(self, tensor: Tensor, root: Value) -> Value:
        """Return the value of a tensor that came to alias a memory unseen."""
        geometry = [root, tensor.shape, tensor.stride(), tensor.storage_offset()]
        return self.operation(AS_STRIDED, geometry, {}).output(0, root)

    def note_source(self, value: Value) -> None:
        """Note that a value has become a source."""
        if value.is_used:
            self.sources.append(ref(value))

    def _source(self, tensor: Tensor, memory: RecordedMemory) -> Value:
        source = Value(None)
        source.hold(held := alias(tensor))
        if held is tensor:
            source.address = address_of(tensor)  # The function may exchange it.
        # A parameter is no running state, though FSDP writes it anew in each forward.
        # Of a view the base is asked, because `is_leaf` of a view renews its history,
        # which raises where it was made and its base written in different grad modes.
        base = tensor if tensor._base is None else tensor._base
        source.is_state = (
            memory.is_state and base.is_leaf and not isinstance(base, Parameter)
        )
        memory.sources.append(ref(source))
        return source


def is_empty(value: Value) -> bool:
    """Tell whether nobody was seen to write the memory of a value."""
    operation = (value.root or value).operation
    return operation is not None and operation.operator is EMPTY


def _same_view(tensor: Tensor, place: LiveStorage) -> LiveTensor | None:
    """Return what is known of a tensor that shows the same part of a storage.

    Autograd saves detached aliases, and `detach` is not observed.
    """
    if not is_plain(tensor):
        return None
    geometry = _geometry(tensor)
    found = None
    for entry in list(place.entries.values()):
        other = entry()
        if (
            other is not None
            and is_plain(other)
            and _geometry(other) == geometry
            and address_of(other) == place.address
        ):
            found = entry
            if entry.epoch == entry.memory.epoch:
                break
    return found


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
