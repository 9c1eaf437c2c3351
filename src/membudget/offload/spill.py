"""Make room on the host by writing what is needed last to a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from membudget.offload.disk import Disk
from membudget.offload.saved_storage import SavedStorage
from membudget.offload.slab import HostBlock, Slab


class Spill:
    """Moves blocks of one slab to a file, if there is one."""

    def __init__(self, slab: Slab, disk: Disk | None, moved_bytes: Counter[str]):
        """Use a file that other devices may use, too, and count what goes there."""
        self._slab = slab
        self._disk = disk
        self._moved_bytes = moved_bytes

    def room(self, size: int, others: Iterable[SavedStorage]) -> HostBlock | None:
        """Return a block of the host; write others to the file where that is needed.

        Args:
            size: Its bytes.
            others: Storages that may have blocks, those that are needed last first.
        """
        block = self._slab.take(size)
        if block is not None or self._disk is None:
            return block
        for entry in list(others):
            if entry.block is not None and self._write(self._disk, entry):
                block = self._slab.take(size)
                if block is not None:
                    return block
        return None

    def _write(self, disk: Disk, entry: SavedStorage) -> bool:
        assert entry.block is not None
        if entry.copied is not None:
            entry.copied.synchronize()
        entry.extent = disk.write(entry.block.content)
        if entry.extent is None:
            return False
        self._slab.give_back(entry.block)
        entry.block = None
        self._moved_bytes["spilled"] += entry.size
        return True

    def read(self, entry: SavedStorage, target: Tensor) -> None:
        """Read a storage from the file."""
        assert self._disk is not None
        assert entry.extent is not None
        self._disk.read(entry.extent, target)

    def forget(self, entry: SavedStorage) -> None:
        """Give back what a storage takes on the host and in the file."""
        if entry.block is not None:
            self._slab.give_back(entry.block)
        if entry.extent is not None and self._disk is not None:
            self._disk.give_back(entry.extent, entry.size)
        entry.block = entry.extent = None
