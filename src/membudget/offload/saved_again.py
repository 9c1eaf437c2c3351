"""Find what stands for a storage again, when that is saved again."""

from __future__ import annotations

from torch import Tensor

from membudget.offload.saved_storage import SavedStorage
from membudget.state.identity import address_of


class KnownStorages:
    """The saved storages that somebody needs, by the address of their memory.

    A storage may have several: what was saved before a write, or through a part of it
    that counts its versions for itself.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._at: dict[int, list[SavedStorage]] = {}

    def add(self, entry: SavedStorage) -> None:
        """Know another one, until it is forgotten."""
        self._at.setdefault(entry.address, []).append(entry)

    def forget(self, entry: SavedStorage) -> None:
        """Forget one that nobody needs."""
        left = [other for other in self._at.pop(entry.address) if other is not entry]
        if left:
            self._at[entry.address] = left

    def of(self, tensor: Tensor) -> list[SavedStorage]:
        """Return those of a tensor's storage that are not overwritten, oldest first."""
        storage = tensor.untyped_storage()
        return [
            entry
            for entry in self._at.get(address_of(tensor), ())
            if entry.original() is storage and not entry.is_overwritten()
        ]


def that_has(entries: list[SavedStorage], tensor: Tensor) -> SavedStorage | None:
    """Return the latest of a storage's entries that stands for a tensor of it."""
    return next((e for e in reversed(entries) if e.has_now(tensor)), None)
