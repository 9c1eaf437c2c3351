"""A storage that autograd saved, and the views of it that autograd holds.

autograd's node ──> View ──┐
autograd's node ──> View ──┴──> SavedStorage ──> storage on the device,
                                                 or block on the host
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from membudget._torch import storage_uses
from membudget.errors import ChangedSinceForwardError
from membudget.offload.extents import Extent
from membudget.offload.slab import HostBlock
from membudget.state.identity import SavedVersion, address_of, version_of


class SavedStorage:
    """A saved storage, on the device, on its way, or on the host.

    Attributes:
        number: Its place in the step.
        size: Its bytes.
        address: Where these are, or were.
        source: The storage; `None` once it was copied and let go.
        original: Weak reference to the storage, which others may keep alive.
        block: Its bytes on the host, if they are there.
        extent: Where its bytes are in a file, if they are there.
        copied: Event of the end of that copy.
        loaded: What was copied back, until all views have asked for it.
        arrived: Event of the end of that copy.
        saved_on: The stream that computed when it was saved, or `source` was copied.
        loaded_on: The stream that what was copied back is allocated for.
        views: How many views of it autograd holds.
        unasked: How many of these were not asked for yet.
        awaited: How often this step is expected to save it again.
        is_counted: Whether it takes a part of the window.
        stays: Whether `source` is kept after the copy.
        leaves: Whether it is to be copied, and was not yet.
    """

    __slots__ = (
        *("__weakref__", "_first", "_handed", "_version", "address", "arrived"),
        *("awaited", "block", "extent", "leaves"),
        *("copied", "is_counted", "loaded", "loaded_on", "number", "original"),
        *("saved_on", "size", "source", "stays", "unasked", "views"),
    )

    def __init__(self, tensor: Tensor, storage: UntypedStorage):
        """Hold the storage of a tensor, which is the first view of it."""
        self._first = _place_of(tensor)
        self._version = SavedVersion(tensor)
        self.number = -1
        self.size = storage.nbytes()
        self.address = address_of(tensor)
        self.source: UntypedStorage | None = storage
        self.original: Callable[[], UntypedStorage | None] = ref(storage)
        self.block: HostBlock | None = None
        self.extent: Extent | None = None
        self.loaded: UntypedStorage | None = None
        self.copied: Any = None
        self.arrived: Any = None
        self.saved_on: Any = None
        self.loaded_on: Any = None
        self.views = self.unasked = self.awaited = 0
        self.is_counted = self.stays = self.leaves = False
        self._handed: Callable[[], UntypedStorage | None] = _no_storage

    def has_now(self, tensor: Tensor) -> bool:
        """Return whether what was saved is what a tensor of the storage has now.

        Parts of a storage may count their versions each for itself, as the gates of an
        LSTM do. A part that was written to, other than the first one saved, may have
        been written to since.
        """
        if self.is_overwritten():
            return False
        return version_of(tensor) == 0 or _place_of(tensor) == self._first

    def is_overwritten(self) -> bool:
        """Return whether a version tells of a write to what was saved first."""
        return self._version.has_moved()

    def lives_anyway(self) -> bool:
        """Return whether others keep the storage alive."""
        original = self.original()
        if original is None or self.source is None:
            return original is not None
        # Beside its Python object, of which this has one.
        return storage_uses(original._cdata) > 1

    @property
    def was_copied(self) -> bool:
        """Whether its bytes are elsewhere, too, or will be."""
        return self.block is not None or self.extent is not None

    def is_on_device(self) -> bool:
        """Return whether its bytes are on the device, or will be."""
        is_there = self.source is not None or self.copy() is not None
        return is_there or self.original() is not None

    def copy(self) -> UntypedStorage | None:
        """Return what was copied back, if it is still there."""
        return self.loaded if self.loaded is not None else self._handed()

    def forget_original(self) -> None:
        """Stop to rely on the storage that was saved: others write to it."""
        self.original = _no_storage

    def hand_over(self) -> None:
        """Leave to autograd alone what was loaded, if no other view will ask for it."""
        if self.loaded is not None and not self.unasked:
            self._handed, self.loaded = ref(self.loaded), None


def _no_storage() -> None:
    return None


def _place_of(tensor: Tensor) -> tuple[int, int, int]:
    return version_of(tensor), int(tensor.storage_offset()), tensor.numel()


Dropped = Callable[[tuple[SavedStorage, bool]], None]
"""Called with the entry of a view that autograd dropped, and if it was asked for."""


class View:
    """A saved tensor whose bytes may be elsewhere.

    Attributes:
        entry: Its storage.
        is_checked: Whether writes to the tensor are errors.
        was_asked: Whether autograd has asked for it.
    """

    __slots__ = ("_dropped", "_form", "_version", "entry", "is_checked", "was_asked")

    def __init__(self, tensor: Tensor, entry: SavedStorage, dropped: Dropped):
        """Note what is to be restored."""
        self.entry = entry
        self.was_asked = False
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._form = tensor.dtype, tensor.device, size, stride, offset
        self._version = SavedVersion(tensor)
        self.is_checked = True
        self._dropped = dropped
        entry.views += 1
        entry.unasked += 1

    def restored(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor, on a storage with its bytes.

        Raises:
            ChangedSinceForwardError: If it was written to after autograd saved it.
        """
        dtype, device, size, stride, offset = self._form
        if self.is_checked and self._version.has_moved():
            raise overwritten(tuple(size))
        made = torch.empty(0, dtype=dtype, device=device)
        made.set_(storage, offset, size, stride)
        return self._version.alias(made) if self.is_checked else made

    def check_from_now(self) -> None:
        """Let writes from now on be errors, those that were made so far not."""
        self._version.renew()
        self.is_checked = True

    def __del__(self) -> None:
        """Let go of the storage. Any thread may run this at any time."""
        self._dropped((self.entry, self.was_asked))


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor):
        """Hold an alias without autograd's graph, which would never be freed."""
        self._tensor = tensor.detach()
        self._version = version_of(tensor)

    def restored(self) -> Tensor:
        """Return the tensor.

        Raises:
            ChangedSinceForwardError: If it was written to after autograd saved it.
        """
        if version_of(self._tensor) > self._version:
            raise overwritten(tuple(self._tensor.shape))
        return self._tensor


def overwritten(shape: tuple[int, ...]) -> ChangedSinceForwardError:
    """Return autograd's error, whose check is off where tensors are packed by hooks."""
    return ChangedSinceForwardError(
        "one of the variables needed for gradient computation has been modified by an "
        f"inplace operation: a saved tensor of shape {shape} was written to before its "
        "backward pass. Write to a clone, or write before it is used"
    )
