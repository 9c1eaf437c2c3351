"""What tells whether a tensor's content is still the one that was seen."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from membudget._torch import storage_address


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor's content; -1 where torch keeps none."""
    try:
        return tensor._version
    except RuntimeError:  # An inference tensor tracks no version.
        return -1


def address_of(tensor: Tensor) -> int:
    """Return where the tensor's storage lies; 0 where it has none (a sparse tensor)."""
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


class StorageMark:
    """Knows a storage again without keeping its memory.

    The reference is weak, and while it lives the address is given to no other storage.
    """

    __slots__ = ("_address", "_reference")

    def __init__(self, tensor: Tensor):
        """Mark the storage of `tensor`, if it has one."""
        self._address = address_of(tensor)
        self._reference = (
            StorageWeakRef(tensor.untyped_storage()) if self._address else None
        )

    def is_of(self, tensor: Tensor) -> bool:
        """Tell whether this is the storage of `tensor`."""
        return self._address != 0 and address_of(tensor) == self._address
