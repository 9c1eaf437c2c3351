"""Which value each live tensor has during recording, through views and writes.

Tensors are tracked by identity, for as long as they live, and checked against the
identity of their storage, because `x.data = y` exchanges it and a deep copy does not
share it. Storages are tracked for as long as *they* live: the last reference to one may
be an alias that no observed operator made (`detach` is not observed, `.data` is not an
operator).

A write gives the memory a new root value and increments its epoch. Tensors of an older
epoch get a new value when they are next used: a view by applying its view operators to
the new root. Memory from outside the region, and memory that a policy keeps, is *held*:
each tensor in it is a source, by reference. Before such memory is written, the sources
that something reads are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from membudget._torch import detach_with_version
from membudget.engine.replay.tape import (
    LiveStorage,
    LiveTensor,
    Operation,
    RecordedMemory,
    TapeValue,
)
from membudget.state.copies import alias, are_apart, copy_of, is_plain
from membudget.state.identity import address_of, storage_of

# Whichever factory made it, uninitialised memory is recorded as this operator.
EMPTY: Any = torch.ops.aten.empty_strided.default

AS_STRIDED: Any = torch.ops.aten.as_strided.default


class Tracker:
    """Maps live tensors to values.

    Attributes:
        table: The live tensors, by `id`.
        sources: Every source that something reads, in order of first use. The order is
            the same in every run of the function, because a rerun region around this
            one matches the sources it is handed by position.
        writes: Called with the address of a storage before an operator writes it.
        clock: The number of operations recorded, including those that rebuild views.
    """

    __slots__ = ("_forget", "_freed", "_places", "clock", "sources", "table", "writes")

    def __init__(self) -> None:
        """Start with no tensor known."""
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
            # `y.data =` gives a tracked tensor another storage; the epoch invalidates
            # its value.
            dead.memory.epoch += 1

        self.table = table
        self.clock = 0
        self.sources: list[ReferenceType[TapeValue]] = []
        self.writes: Callable[[int], None] | None = None
        self._places = places
        self._forget = forget
        self._freed = freed

    def clear(self) -> None:
        """Forget all tensors."""
        self.table.clear()
        self._places.clear()

    def entry(self, tensor: Tensor) -> LiveTensor:
        """Return a tensor's entry, up to date with writes to its memory."""
        entry = self.table.get(id(tensor))
        if (
            entry is None
            or entry.epoch != entry.memory.epoch
            or entry.address != address_of(tensor)
        ):
            return self.meet(tensor, entry)
        return entry

    def read(self, tensor: Tensor) -> TapeValue:
        """Return the value of a tensor whose content is needed."""
        return self.mark_read(tensor, self.entry(tensor))

    def mark_read(self, tensor: Tensor, entry: LiveTensor) -> TapeValue:
        """Return the value of a tensor with a known entry; mark it as needed."""
        value = entry.value
        root = value.root or value
        if is_empty(root):
            # It is read although no observed operator wrote it.
            entry = self.hold_memory(tensor, entry)
            value = root = entry.value
        if not value.is_used:
            self._use(value)
        if not root.is_used:
            self._use(root)
        return value

    def _use(self, value: TapeValue) -> None:
        value.is_used = True
        if value.operation is None:
            self.sources.append(ref(value))

    def enter(
        self, tensor: Tensor, value: TapeValue, memory: RecordedMemory, address: int
    ) -> LiveTensor:
        """Track a tensor under a value."""
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
        """Track a storage for as long as it lives."""
        place = LiveStorage(storage_of(tensor), self._freed)
        place.address = address
        place.memory = memory
        place.entries = {}
        if address:
            self._places[address] = place
        return place

    def enter_fresh(self, tensor: Tensor, value: TapeValue, address: int) -> LiveTensor:
        """Track a tensor in a storage of its own."""
        return self.enter(tensor, value, RecordedMemory(value, tensor.dtype), address)

    def meet(self, tensor: Tensor, entry: LiveTensor | None) -> LiveTensor:
        """Track a tensor that is new here, or whose memory was written since."""
        address = address_of(tensor)
        place = self._places.get(address)
        if place is not None:
            memory = place.memory
        elif entry is not None and not address:
            memory = entry.memory  # A sparse tensor has no storage.
        else:
            memory = RecordedMemory(None)
        if memory.root is None:
            value = self._source(tensor, memory)
            return self.enter(tensor, value, memory, address)
        if place is not None and (entry is None or entry.memory is not memory):
            entry = place.entry_like(tensor)
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

    def know(self, tensor: Tensor, value: TapeValue) -> None:
        """Track the tensor that a backward inside the forward got for a value."""
        address = address_of(tensor)
        place = self._places.get(address)
        if place is not None:
            self.enter(tensor, value, place.memory, address)
            return
        root = value.root or value
        memory = RecordedMemory(None if root.operation is None else root, tensor.dtype)
        self.enter(tensor, value, memory, address_of(tensor))

    def hold_memory(self, tensor: Tensor, entry: LiveTensor) -> LiveTensor:
        """Hold a tensor's memory by reference from now on; keep its earlier values."""
        memory = entry.memory
        memory.root = None
        memory.epoch += 1
        return self.meet(tensor, entry)

    def hold_value(self, tensor: Tensor, entry: LiveTensor) -> None:
        """Turn a tensor's value into a source, which a replay need not compute."""
        value, memory = entry.value, entry.memory
        value.hold(detach_with_version(tensor))
        memory.root = None
        memory.sources.append(ref(value))
        self.note_source(value)

    def before_write(
        self, written: Iterable[Tensor], is_needed: bool
    ) -> list[RecordedMemory]:
        """Copy the sources whose content a write is about to destroy.

        Args:
            written: The tensors that an operator will write.
            is_needed: Whether a replay of the operator reads their present content.

        Returns:
            The memories to be written, without duplicates.
        """
        parts: dict[RecordedMemory, list[Tensor]] = {}
        for tensor in written:
            entry = self.entry(tensor)
            memory = entry.memory
            if self.writes is not None:
                self.writes(entry.address)
            if memory.root is None and is_needed:
                self.mark_read(tensor, entry)
            parts.setdefault(memory, []).append(tensor)
        for memory, tensors in parts.items():
            memory.sources = [s for s in memory.sources if _survives(s(), tensors)]
        return list(parts)

    def after_write(self, memory: RecordedMemory, root: TapeValue | None) -> None:
        """Record that a memory was written.

        Args:
            memory: The memory.
            root: Its new value; `None` if the memory is held.
        """
        memory.epoch += 1
        memory.is_state |= memory.is_external
        memory.root = root

    def operation(self, operator: Any, args: list[Any], kwargs: Any) -> Operation:
        """Append an operation to the tape."""
        self.clock += 1
        return Operation(operator, args, kwargs, self.clock, torch.is_grad_enabled())

    def _rebased(self, value: TapeValue, memory: RecordedMemory) -> TapeValue:
        """Return the value of a view, or of a root, after its memory got a new root."""
        operation, root = value.operation, memory.root
        assert root is not None
        if value.root is None or operation is None:
            return root
        args = [
            self._rebased(a, memory) if type(a) is TapeValue else a
            for a in operation.args
        ]
        again = self.operation(operation.operator, args, operation.kwargs)
        return again.output(value.index, root)

    def _as_strided(self, tensor: Tensor, root: TapeValue) -> TapeValue:
        """Return a value for an alias that no observed operator made."""
        geometry = [root, tensor.shape, tensor.stride(), tensor.storage_offset()]
        return self.operation(AS_STRIDED, geometry, {}).output(0, root)

    def note_source(self, value: TapeValue) -> None:
        """List a value that has become a source, if something reads it."""
        if value.is_used:
            self.sources.append(ref(value))

    def _source(self, tensor: Tensor, memory: RecordedMemory) -> TapeValue:
        source = TapeValue(None)
        source.hold(held := alias(tensor))
        if held is tensor:
            # The function may exchange it by `.data =`.
            source.address = address_of(tensor)
        # A parameter is not running state, although FSDP rewrites it in every forward.
        # For a view, ask its base: `is_leaf` of a view rebuilds its history, which
        # raises if the view was made and its base written in different grad modes.
        base = tensor if tensor._base is None else tensor._base
        source.is_state = (
            memory.is_state and base.is_leaf and not isinstance(base, Parameter)
        )
        memory.sources.append(ref(source))
        return source


def _survives(source: TapeValue | None, written: Iterable[Tensor]) -> bool:
    """Tell whether a write leaves a source as it is; copy what it would destroy."""
    if source is None or not source.is_used or (held := source.tensor) is None:
        return False
    if not (survives := all(are_apart(held, tensor) for tensor in written)):
        source.tensor, source.address = copy_of(held), None
    return survives


def is_empty(value: TapeValue) -> bool:
    """Tell whether no observed operator has written the memory of a value."""
    operation = (value.root or value).operation
    return operation is not None and operation.operator is EMPTY
