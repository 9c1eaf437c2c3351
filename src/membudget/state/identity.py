"""Whether a tensor still has the content and the storage that were seen before."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    detach_with_version,
    storage_address,
    without_dispatch_modes,
)


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter; -1 for an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 without one (a sparse tensor)."""
    try:
        return storage_address(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


class _Nowhere:
    """Placeholder for the storage of a tensor that has none."""


_NOWHERE = _Nowhere()


def storage_of(tensor: Tensor) -> Any:
    """Return an object for weak references: the storage, or a placeholder."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return _NOWHERE


class SavedVersion:
    """Detects writes to a tensor after autograd saved it, without holding its memory.

    An alias shares the tensor's version counter; its data is replaced by an empty
    tensor. Autograd makes the same check for tensors saved without hooks.
    """

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: Tensor):
        """Record the current version.

        Raises:
            RuntimeError: If the tensor's data cannot be replaced by an empty tensor.
        """
        self._counter = detach_with_version(tensor)
        self._version = version_of(tensor)
        self._counter.data = _nothing(tensor.dtype, tensor.device)

    def has_moved(self) -> bool:
        """Tell whether the tensor has been written since."""
        return version_of(self._counter) != self._version


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with without_dispatch_modes():
        return torch.empty(0, dtype=dtype, device=device)
