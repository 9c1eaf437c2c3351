"""Map live tensors to tape values during recording, across views and in-place writes.

Live tensors are tracked by `id`, together with the address of their storage, because
`x.data = y` replaces the storage of `x`. Storages are tracked until they are freed: the
last reference to a storage may be an alias that the recorder did not observe, made by
`detach` or `.data`.

Each write gives the storage a new *root*, the tape value of its whole content, and
increments its *epoch*, a write counter. A tensor last used before a write gets a new
tape value at its next use; for a view, the tracker re-applies the view operators to the
storage's new root value. Tensors from outside the region, or kept by the policy, are
*sources*: the tape references them instead of recomputing them. A tensor that a replay
may read is copied before an operator overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from membudget._torch import detach_with_version
from membudget.engine.replay.extension import callbacks_of
from membudget.engine.replay.living import LiveStorage, LiveTensor, RecordedMemory
from membudget.engine.replay.offloaded import Offloaded
from membudget.engine.replay.shared_memory import leaves_source
from membudget.engine.replay.tape import Operation, TapeValue
from membudget.state.copies import alias, copy_of, is_plain
from membudget.state.identity import address_of, storage_of

# Whichever factory made it, uninitialised memory is recorded as this operator.
EMPTY: Any = torch.ops.aten.empty_strided.default

AS_STRIDED: Any = torch.ops.aten.as_strided.default


class Tracker:
    """Maps live tensors to their values on the tape.

    Attributes:
        table: Tape value and storage of each live tensor, keyed by `id(tensor)`.
        sources: Values that a replay may read but not recompute, in order of first use.
            A repeated forward yields the same order, so an enclosing rerun region can
            match the values by position.
        writes: Callback that receives the address of a storage before each write to it.
        clock: Number of recorded operations, including re-applied view operators.
    """

    __slots__ = ("_forget", "_freed", "_places", "clock", "sources", "table", "writes")

    def __init__(self) -> None:
        """Create a tracker that tracks no tensors yet."""
        table: dict[int, LiveTensor] = {}
        places: dict[int, LiveStorage] = {}

        self._forget, self._freed = callbacks_of(table, places)
        self.table = table
        self.clock = 0
        self.sources: list[ReferenceType[TapeValue]] = []
        self.writes: Callable[[int], None] | None = None
        self._places = places

    def clear(self) -> None:
        """Stop tracking all tensors."""
        self.table.clear()
        self._places.clear()

    def entry(self, tensor: Tensor) -> LiveTensor:
        """Return a tensor's tracking record, updated if the tensor was overwritten."""
        entry = self.table.get(id(tensor))
        if (
            entry is None
            or entry.epoch != entry.memory.epoch
            or entry.address != address_of(tensor)
        ):
            return self.meet(tensor, entry)
        return entry

    def read(self, tensor: Tensor) -> TapeValue:
        """Return a tensor's tape value, marked as needed for a replay."""
        return self.mark_read(tensor, self.entry(tensor))

    def mark_read(self, tensor: Tensor, entry: LiveTensor) -> TapeValue:
        """Mark the tape value in `entry` as needed for a replay, and return it."""
        value = entry.value
        if not value.is_used:
            if is_empty(value):
                # It is read although no observed operator wrote it.
                value = self.hold_memory(tensor, entry).value
            value.is_used = True
            self._need(value)
            if value.root is not None:
                self._need(value.root)
        return value

    def _need(self, value: TapeValue) -> None:
        if not value.is_needed:
            value.is_needed = True
            if value.operation is None:
                self.sources.append(ref(value))

    def enter(
        self, tensor: Tensor, value: TapeValue, memory: RecordedMemory, address: int
    ) -> LiveTensor:
        """Associate a live tensor with its value on the tape."""
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
        """Track a storage until it is freed."""
        place = LiveStorage(storage_of(tensor), self._freed)
        place.address = address
        place.memory = memory
        place.entries = {}
        if address:
            self._places[address] = place
        return place

    def enter_fresh(self, tensor: Tensor, value: TapeValue, address: int) -> LiveTensor:
        """Track a tensor with newly allocated storage."""
        return self.enter(tensor, value, RecordedMemory(value, tensor.dtype), address)

    def meet(self, tensor: Tensor, entry: LiveTensor | None) -> LiveTensor:
        """Track a tensor that is new, or was written after its last recorded use."""
        address = address_of(tensor)
        place = self._places.get(address)
        if place is not None:
            memory = place.memory
        elif entry is not None and not address:
            memory = entry.memory  # A sparse tensor has no storage.
        else:
            memory = RecordedMemory(None)
        if memory.root is None:
            value = self._source(tensor, memory, address)
            return self.enter(tensor, value, memory, address)
        if place is not None and (entry is None or entry.memory is not memory):
            entry = place.entry_like(tensor)
        if entry is not None:
            is_current = entry.epoch == memory.epoch
            value = entry.value if is_current else self._rebased(entry.value, memory)
        elif is_plain(tensor) and tensor.dtype is memory.dtype:
            value = self._as_strided(tensor, memory.root)
        else:
            # `as_strided` cannot rebuild this alias from the root, e.g. another dtype.
            memory.root = None
            memory.epoch += 1
            value = self._source(tensor, memory, address)
        return self.enter(tensor, value, memory, address)

    def know(self, tensor: Tensor, value: TapeValue) -> None:
        """Track a tensor that was unpacked by a backward pass inside the forward.

        A held tensor is a source whenever it is read; its entry would reference it.
        """
        if value.is_held():
            return
        address = address_of(tensor)
        place = self._places.get(address)
        if place is not None:
            self.enter(tensor, value, place.memory, address)
            return
        root = value.root or value
        memory = RecordedMemory(None if root.operation is None else root, tensor.dtype)
        self.enter(tensor, value, memory, address_of(tensor))

    def hold_memory(self, tensor: Tensor, entry: LiveTensor) -> LiveTensor:
        """Keep a tensor's current content in memory; recompute only older content."""
        memory = entry.memory
        memory.root = None
        memory.epoch += 1
        return self.meet(tensor, entry)

    def hold_value(self, tensor: Tensor, entry: LiveTensor) -> None:
        """Keep a tensor in memory, so that replays do not recompute its value."""
        value, memory = entry.value, entry.memory
        value.hold(detach_with_version(tensor))
        memory.root = None
        memory.add_source(value)
        self.note_source(value)

    def before_write(
        self, written: Iterable[Tensor], is_needed: bool
    ) -> list[RecordedMemory]:
        """Copy kept tensors before a write; return the write histories affected.

        Set `is_needed` if a replay of the writing operator reads the old content.
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
            if memory.sources is not None:
                kept = [s for s in memory.sources if _survives(s(), tensors)]
                memory.sources = kept or None
        return list(parts)

    def after_write(self, memory: RecordedMemory, root: TapeValue | None) -> None:
        """Record a write; `root` is the new tape value, `None` if not recomputed."""
        memory.epoch += 1
        # The next call overwrites it too, so its sources must be copied (Rule 6).
        memory.is_state |= memory.is_external
        memory.root = root

    def operation(self, operator: Any, args: list[Any], kwargs: Any) -> Operation:
        """Append an operation to the tape."""
        self.clock += 1
        return Operation(operator, args, kwargs, self.clock, torch.is_grad_enabled())

    def _rebased(self, value: TapeValue, memory: RecordedMemory) -> TapeValue:
        """Re-apply a view's operators to the new content of its storage."""
        operation, root = value.operation, memory.root
        assert root is not None
        # The recursion ends at the root, which the write has replaced.
        if value.root is None or operation is None:
            return root
        args = [
            self._rebased(a, memory) if type(a) is TapeValue else a
            for a in operation.args
        ]
        again = self.operation(operation.operator, args, operation.kwargs)
        return again.output(value.index, root)

    def _as_strided(self, tensor: Tensor, root: TapeValue) -> TapeValue:
        """Return a tape value for an alias that an unobserved operator created."""
        geometry = [root, tensor.shape, tensor.stride(), tensor.storage_offset()]
        return self.operation(AS_STRIDED, geometry, {}).output(0, root)

    def note_source(self, value: TapeValue) -> None:
        """Register a value that stays in memory, if a replay may read it."""
        if value.is_needed and value.operation is None:
            self.sources.append(ref(value))

    def _source(
        self, tensor: Tensor, memory: RecordedMemory, address: int
    ) -> TapeValue:
        source = TapeValue(None)
        source.is_input = True
        # A leaf that the region has made is none that its entry may hold to the end.
        # FSDP makes a parameter's memory there, and frees it: its class tells that.
        is_own = memory.is_external or isinstance(tensor, Parameter)
        source.hold(held := alias(tensor) if is_own else detach_with_version(tensor))
        if held is tensor:
            # The function may exchange it by `.data =`.
            source.address = address
        if memory.is_state:
            # A parameter is not running state, although FSDP rewrites it in every
            # forward. For a view, ask its base: `is_leaf` of a view rebuilds its
            # history, which raises if the view was made and its base written in
            # different grad modes.
            base = tensor if tensor._base is None else tensor._base
            source.is_state = base.is_leaf and not isinstance(base, Parameter)
        memory.add_source(source)
        return source


def _survives(source: TapeValue | None, written: list[Tensor]) -> bool:
    """Return whether a write leaves a source as it is; copy what it would destroy."""
    if source is not None and isinstance(source.packed, Offloaded):
        source.packed.before_write()
    if source is None or not source.is_needed or (held := source.tensor) is None:
        return False
    if not (survives := leaves_source(written, source)):
        source.tensor, source.address = copy_of(held), None
    return survives


def is_empty(value: TapeValue) -> bool:
    """Return whether no observed operator has written to a value's memory yet."""
    operation = (value.root or value).operation
    return operation is not None and operation.operator is EMPTY
