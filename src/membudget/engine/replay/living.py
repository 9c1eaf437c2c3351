"""Tensors and storages that are alive while a region runs, and their tape values."""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from membudget.engine.replay.tape import TapeValue
from membudget.state.copies import is_plain
from membudget.state.identity import address_of


class RecordedMemory:
    """The write history of one storage during recording.

    Attributes:
        root: Current tape value of the whole storage; `None` if tensors in the storage
            are not recomputed.
        dtype: Dtype of the tape value `root`.
        epoch: Counter, incremented by each write, that invalidates older values.
        is_external: Whether the storage was created outside the region.
        is_state: Whether the region wrote to a storage created outside it, such as
            running statistics.
        sources: Weak references to the values to copy before the next write; `None`
            before the first.
    """

    __slots__ = (
        *("__weakref__", "dtype", "epoch", "is_external", "is_state", "root"),
        "sources",
    )

    def __init__(self, root: TapeValue | None, dtype: torch.dtype | None = None):
        """Create a write history; `root=None` marks a storage from outside a region."""
        self.root = root
        self.dtype = dtype
        self.epoch = 0
        self.is_external = root is None
        self.is_state = False
        self.sources: list[ReferenceType[TapeValue]] | None = None

    def add_source(self, source: TapeValue) -> None:
        """Note a value to be copied before the next write."""
        if self.sources is None:
            self.sources = []
        self.sources.append(ref(source))


class LiveStorage(ref[Any]):
    """A weak reference to a storage, with its write history and tracked tensors.

    Attributes:
        address: The storage's address.
        memory: The storage's write history.
        entries: Tracked tensors in the storage, keyed by `id(tensor)`.
    """

    __slots__ = ("address", "entries", "memory")

    address: int
    entries: dict[int, LiveTensor]
    memory: RecordedMemory

    def entry_like(self, tensor: Tensor) -> LiveTensor | None:
        """Return a tracked tensor that has the same elements and strides as `tensor`.

        Autograd saves detached aliases, but the recorder does not observe `detach`.
        """
        if not is_plain(tensor):
            return None
        geometry = _geometry(tensor)
        found = None
        # Prefer a current entry; an outdated one still shows how to rebuild the view.
        for entry in list(self.entries.values()):
            other = entry()
            if (
                other is not None
                and is_plain(other)
                and _geometry(other) == geometry
                and address_of(other) == self.address
            ):
                found = entry
                if entry.epoch == entry.memory.epoch:
                    break
        return found


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


class LiveTensor(ref[Tensor]):
    """A weak reference to a tensor, with its value on the tape.

    Attributes:
        key: The tensor's `id`.
        value: The tensor's tape value, valid while `epoch` equals `memory.epoch`.
        memory: The write history of the tensor's storage.
        epoch: The storage's epoch (write counter) for which `value` is valid.
        address: Address of the tensor's storage, which `.data =` may replace.
    """

    __slots__ = ("address", "epoch", "key", "memory", "value")

    key: int
    value: TapeValue
    memory: RecordedMemory
    epoch: int
    address: int
